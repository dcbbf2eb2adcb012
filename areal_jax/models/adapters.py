"""Low-rank adapters (LoRA, arXiv 2106.09685): which leaves of a policy's tree they are, and the tree with and without them.

Invariants:
* Adapters are leaves ``lora_a`` and ``lora_b`` of the policy's own tree. Two trees without a leaf in common ``join`` to one.
* Without adapters in the architecture everything is trained: ``split`` gives the whole tree and an empty one, ``merge`` gives back what it got.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from areal_jax.models.architecture import ModelConfig
from areal_jax.models.policy import Params, init_params

ADAPTERS = ("lora_a", "lora_b")


def split(model: ModelConfig, tree: Any) -> tuple[Any, Any]:
    """(trained, frozen) parts of a nested dict like the parameters; a dict that holds nothing is left out."""
    if model.lora is None:
        return tree, {}
    return _chosen(tree, adapters=True), _chosen(tree, adapters=False)


def join(one: Any, other: Any) -> Any:
    """The tree with the leaves of both.

    Raises:
      ValueError: a leaf is in both.
    """
    joined = dict(one)
    for name, value in other.items():
        if name not in joined:
            joined[name] = value
        elif isinstance(value, dict) and isinstance(joined[name], dict):
            joined[name] = join(joined[name], value)
        else:
            raise ValueError(f"two parts of a policy must have no parameter in common; both have '{name}'; take the parts that split gives")
    return joined


def add(model: ModelConfig, base: Params, key: jax.Array) -> Params:
    """The parameters of ``model`` (with ``lora``) that are ``base`` and fresh adapters: A random, B zero, so that the policy is unchanged."""
    # Compiled, so that the base's numbers are not drawn.
    return join(base, jax.jit(lambda key: split(model, init_params(model, key))[0])(key))


def merge(model: ModelConfig, params: Params) -> tuple[ModelConfig, Params]:
    """The same policy without adapters: kernel + (alpha / rank) · A · B, added in float32 and stored in the kernel's type."""
    lora = model.lora
    if lora is None:
        return model, params

    @jax.jit
    def product(kernel: jax.Array, a: jax.Array, b: jax.Array) -> jax.Array:
        low = jnp.matmul(a.astype(jnp.float32), b.astype(jnp.float32), precision=jax.lax.Precision.HIGHEST)
        return (kernel.astype(jnp.float32) + lora.scale * low).astype(kernel.dtype)

    def walk(tree: Any) -> Any:
        if not isinstance(tree, dict):
            return tree
        merged = {name: walk(value) for name, value in tree.items() if name not in ADAPTERS}
        return merged | ({"kernel": product(tree["kernel"], tree["lora_a"], tree["lora_b"])} if "lora_a" in tree else {})

    return dataclasses.replace(model, lora=None), walk(params)


def fingerprint(tree: Any) -> str:
    """A checksum of the bits, names and places of all numbers of a tree, whatever mesh they lie on; '' of an empty tree."""
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    if not leaves:
        return ""
    return f"{int(jax.jit(_checksum)([leaf for _, leaf in leaves])):08x}"


def _checksum(leaves: list[jax.Array]) -> jax.Array:
    """Sums modulo 2^32, which come out alike in any order."""
    total = jnp.uint32(0)
    for leaf in leaves:
        bits = jax.lax.bitcast_convert_type(leaf, jnp.dtype(f"uint{8 * leaf.dtype.itemsize}")).astype(jnp.uint32)
        place = jnp.zeros(leaf.shape, jnp.uint32)
        for axis in range(leaf.ndim):
            place = place * jnp.uint32(0x9E3779B1) + jax.lax.broadcasted_iota(jnp.uint32, leaf.shape, axis)
        total = total * jnp.uint32(0x85EBCA6B) + jnp.sum(bits * (2 * place + 1), dtype=jnp.uint32)
    return total


def _chosen(tree: Any, *, adapters: bool) -> Any:
    chosen = {}
    for name, value in tree.items():
        if isinstance(value, dict):
            inner = _chosen(value, adapters=adapters)
            if inner:
                chosen[name] = inner
        elif (name in ADAPTERS) == adapters:
            chosen[name] = value
    return chosen
