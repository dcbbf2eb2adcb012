"""The policies that are measured: a checkpoint of the user's, or a new one of named sizes.

Invariant: the architecture that is run has no end token, so that every request reaches its own length.
"""

from __future__ import annotations

import dataclasses
import pathlib
from typing import Any

import jax

from areal_jax.config import ConfigError
from areal_jax.models.architecture import ModelConfig
from areal_jax.models.checkpoint import load_policy
from areal_jax.models.policy import init_params, param_shapes

RANDOM = {
    "tiny": ModelConfig("qwen2", 48, layers=2, hidden_size=32, heads=4, kv_heads=2, head_dim=8, mlp_size=64),
    "qwen2-small": ModelConfig("qwen2", 48, layers=4, hidden_size=256, heads=4, kv_heads=2, head_dim=64, mlp_size=768),
    "mid": ModelConfig("qwen2", 32768, layers=8, hidden_size=2048, heads=16, kv_heads=4, head_dim=128, mlp_size=8192, tie_embeddings=True),
    "qwen2-0.5b": ModelConfig("qwen2", 151936, layers=24, hidden_size=896, heads=14, kv_heads=2, head_dim=64, mlp_size=4864, tie_embeddings=True),
}
"""New policies by name: parameters are random, sizes those of the name."""


def make_policy(model: str, random: str, dtype: str, seed: int = 0) -> tuple[str, ModelConfig, Any]:
    """(name, architecture, parameters) of a checkpoint's directory, or of one of ``RANDOM``.

    Args:
      model: directory; '' for a new policy.
      random: a name in ``RANDOM``; '' for a checkpoint.
      dtype: type of computation and of parameters.
      seed: of new parameters.

    Raises:
      ConfigError: both or neither are named, or the name is not known.
    """
    if bool(model) == bool(random):
        raise ConfigError(f"name one policy, by '--model=DIR' or by '--random' ({', '.join(RANDOM)}); got '{model}' and '{random}'")
    if model:
        config, params = load_policy(model, dtype, dtype)
        return pathlib.Path(model).name, dataclasses.replace(config, eos_ids=()), params
    config = dataclasses.replace(random_model(random), dtype=dtype)
    params = jax.jit(lambda key: jax.tree.map(lambda leaf: leaf.astype(dtype), init_params(config, key)))(jax.random.key(seed))
    return random, dataclasses.replace(config, eos_ids=()), params


def random_model(name: str) -> ModelConfig:
    """The architecture of a name in ``RANDOM``."""
    if name not in RANDOM:
        raise ConfigError(f"'--random' must be one of {', '.join(RANDOM)}; got '{name}'")
    return RANDOM[name]


def parameter_count(model: ModelConfig) -> int:
    """Of all parameters."""
    return sum(leaf.size for leaf in jax.tree.leaves(param_shapes(model)))
