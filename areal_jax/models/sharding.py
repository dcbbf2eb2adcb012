"""The one table from a parameter's name to its logical axes, and the shardings of whole trees.

Invariant: sampler, trainer and weight push all take their shardings from here, so that they cannot disagree.
"""

from __future__ import annotations

from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from areal_jax.models.architecture import ModelConfig
from areal_jax.models.axes import fitting, logical_to_mesh
from areal_jax.models.policy import param_shapes

LOGICAL_AXES: dict[str, tuple[str, ...]] = {
    "embedding": ("vocab", "hidden"),
    "lm_head/kernel": ("hidden", "vocab"),
    "query/kernel": ("hidden", "heads"),
    "key/kernel": ("hidden", "kv_heads"),
    "value/kernel": ("hidden", "kv_heads"),
    "output/kernel": ("heads", "hidden"),
    "query/bias": ("heads",),
    "key/bias": ("kv_heads",),
    "value/bias": ("kv_heads",),
    "mlp/gate/kernel": ("hidden", "mlp"),
    "mlp/up/kernel": ("hidden", "mlp"),
    "mlp/down/kernel": ("mlp", "hidden"),
    "router/kernel": ("hidden", "experts"),
    "experts/gate/kernel": ("experts", "hidden", "mlp"),
    "experts/up/kernel": ("experts", "hidden", "mlp"),
    "experts/down/kernel": ("experts", "mlp", "hidden"),
    "scale": ("norm",),
    # Adapters, beside the kernels of their layers.
    "query/lora_a": ("hidden", "rank"),
    "query/lora_b": ("rank", "heads"),
    "key/lora_a": ("hidden", "rank"),
    "key/lora_b": ("rank", "kv_heads"),
    "value/lora_a": ("hidden", "rank"),
    "value/lora_b": ("rank", "kv_heads"),
    "output/lora_a": ("heads", "rank"),
    "output/lora_b": ("rank", "hidden"),
    "gate/lora_a": ("hidden", "rank"),
    "gate/lora_b": ("rank", "mlp"),
    "up/lora_a": ("hidden", "rank"),
    "up/lora_b": ("rank", "mlp"),
    "down/lora_a": ("mlp", "rank"),
    "down/lora_b": ("rank", "hidden"),
}


def param_specs(model: ModelConfig) -> Any:
    """Tree of ``PartitionSpec`` like the parameters.

    Raises:
      KeyError: a parameter has no line in the table.
    """

    def spec(path: tuple[Any, ...], _: Any) -> P:
        name = "/".join(str(part.key) for part in path)
        for suffix, axes in LOGICAL_AXES.items():
            if name == suffix or name.endswith("/" + suffix):
                return logical_to_mesh(*axes)
        raise KeyError(f"no logical axes for the parameter '{name}'; add a line to LOGICAL_AXES")

    return jax.tree_util.tree_map_with_path(spec, param_shapes(model))


def named_shardings(mesh: Mesh, specs: Any, shapes: Any) -> Any:
    """Tree of ``NamedSharding``; an axis that does not divide its dimension is replicated instead."""

    def legal(spec: P, leaf: Any) -> NamedSharding:
        return NamedSharding(mesh, fitting(mesh, spec, leaf.shape))

    return jax.tree.map(legal, specs, shapes, is_leaf=lambda x: isinstance(x, P))
