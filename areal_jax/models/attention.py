"""Attention over packed rows and over a decode cache.

Invariants:
* A token sees exactly the tokens of its own segment that are not after it. A segment is one run of equal ids; padding (segment 0) sees its own run
  only, so no row of the softmax is empty and nothing real depends on it.
* Scores and softmax are float32.
* Under a mesh rows lie over data and fsdp, query heads over tensor and queries over context; keys and values are gathered over context. What
  does not divide is on every device.
* Cache layouts are key [slots, kv_heads, head_dim, length] and value [slots, kv_heads, length, head_dim]: both products
  are then row-major on the CPU and need no copy of the cache.
"""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from areal_jax.config import ConfigError
from areal_jax.models.axes import divided, fitting, logical_to_mesh, names_of, platform_of
from areal_jax.models.blockwise import MASKED, blockwise_attention
from areal_jax.models.kernels import obstacle, splash_attention, splash_kernel, tokamax_attention
from areal_jax.models.layers import precision
from areal_jax.models.remat import SAVED

PLAIN_LENGTH = 1024
"""Longest row whose scores 'auto' materialises."""


def packed_attention(query: jax.Array, key: jax.Array, value: jax.Array, segment_ids: jax.Array, backend: str = "auto", mesh: Mesh | None = None) -> jax.Array:
    """Causal attention within segments.

    Args:
      query: [rows, length, heads, head_dim].
      key, value: [rows, length, kv_heads, head_dim].
      segment_ids: int [rows, length]; 0 is padding.
      backend: 'plain' (scores materialised), 'blockwise' (memory linear in length), 'kernel' (the accelerator's) or 'auto'.
      mesh: that the arrays lie on; None: one device, or as the compiler divides it.

    Returns:
      [rows, length, heads, head_dim].

    Raises:
      ConfigError: 'kernel' where there is none.
    """
    length, whole = query.shape[1], mesh is None or not divided(mesh)
    spec = P() if mesh is None else fitting(mesh, logical_to_mesh("batch", "length", "heads", None), query.shape)
    rows, context, heads = ((), (), ()) if mesh is None or whole else (names_of(part) for part in spec[:3])
    own_heads = query.shape[2] // math.prod(mesh.shape[name] for name in heads) if mesh is not None else query.shape[2]
    own_length = length // math.prod(mesh.shape[name] for name in context) if mesh is not None else length
    platform = platform_of(mesh)
    backend = chosen_backend(backend, platform, length, own_length, query.dtype)
    splash = backend == "kernel" and platform == "tpu"
    kernel, kernel_spec = splash_kernel(own_heads, length, None if whole else mesh, context[0] if context else None) if splash else ((), ())

    def attend(kernel: Any, query: jax.Array, key: jax.Array, value: jax.Array, segment_ids: jax.Array, offset: Any) -> jax.Array:
        def mine(x: jax.Array) -> jax.Array:
            return jax.lax.dynamic_slice_in_dim(x, offset, own_length, axis=1) if context else x

        if splash:
            return splash_attention(kernel, query, key, value, mine(segment_ids), segment_ids)
        compute = {"plain": plain_attention, "blockwise": blockwise_attention, "kernel": tokamax_attention}[backend]
        mixed = compute(query, key, value, mine(segment_starts(segment_ids)), offset)
        return mixed if backend == "blockwise" else checkpoint_name(mixed, SAVED)  # blockwise names what its backward pass needs, as splash does

    if mesh is None or whole:
        return attend(kernel, query, key, value, segment_ids, 0)
    by_key_head = fitting(mesh, P(None, None, heads or None, None), key.shape)[2]

    def local(kernel: Any, query: jax.Array, key: jax.Array, value: jax.Array, segment_ids: jax.Array) -> jax.Array:
        if context:
            key, value = (jax.lax.all_gather(x, context, axis=1, tiled=True) for x in (key, value))
        if heads and not names_of(by_key_head):
            key, value = (_own_heads(x, own_heads, heads) for x in (key, value))
        return attend(kernel, query, key, value, segment_ids, jax.lax.axis_index(context) * own_length if context else 0)

    keys = P(spec[0], spec[1], by_key_head, None)
    specs = (kernel_spec, spec, keys, keys, P(rows or None, None))
    return jax.shard_map(local, mesh=mesh, in_specs=specs, out_specs=spec, check_vma=False)(kernel, query, key, value, segment_ids)


def chosen_backend(backend: str, platform: str, length: int, own_length: int, dtype: Any) -> str:
    """What 'auto' stands for: the platform's kernel, else 'plain' for rows of up to ``PLAIN_LENGTH`` positions and 'blockwise' for longer ones.

    Args:
      backend: as asked for.
      platform: of the devices.
      length: of a row; ``own_length`` of it are on a device.
      dtype: compute type.

    Raises:
      ConfigError: 'kernel' is asked for where there is none.
    """
    if backend in ("plain", "blockwise"):
        return backend
    reason = obstacle(platform, own_length, dtype)
    if backend == "kernel" and reason:
        raise ConfigError(f"'model.attention=kernel' needs a kernel: {reason}; set model.attention=auto")
    return "plain" if reason and length <= PLAIN_LENGTH else "blockwise" if reason else "kernel"


def _own_heads(x: jax.Array, heads: int, axis: tuple[str, ...]) -> jax.Array:
    """Of keys [rows, length, kv_heads, head_dim] of all heads those that this device's ``heads`` query heads share, one each where groups are torn."""
    group = heads * jax.lax.axis_size(axis) // x.shape[2]
    first = jax.lax.axis_index(axis) * heads
    if group % heads == 0:
        return jax.lax.dynamic_slice_in_dim(x, first // group, 1, axis=2)
    return jnp.take(x, (first + jnp.arange(heads)) // group, axis=2)


def segment_starts(segment_ids: jax.Array) -> jax.Array:
    """Int32 [rows, length]: the place at which each token's segment starts."""
    places = jnp.arange(segment_ids.shape[1], dtype=jnp.int32)
    begins = jnp.pad(segment_ids[:, 1:] != segment_ids[:, :-1], ((0, 0), (1, 0)), constant_values=True)
    return jax.lax.cummax(jnp.where(begins, places, 0), axis=1)


def plain_attention(query: jax.Array, key: jax.Array, value: jax.Array, starts: jax.Array, offset: Any) -> jax.Array:
    """``blockwise_attention`` with all scores at once."""
    rows, queries, heads, head_dim = query.shape
    keys, kv_heads = key.shape[1:3]
    group = heads // kv_heads
    # The query heads of a group are folded into the rows of one batched product.
    folded = query.reshape(rows, queries, kv_heads, group, head_dim).transpose(0, 2, 3, 1, 4).reshape(rows, kv_heads, group * queries, head_dim)
    scores = jnp.matmul(folded, key.transpose(0, 2, 3, 1), precision=precision(query.dtype), preferred_element_type=jnp.float32)
    places, columns = offset + jnp.arange(queries), jnp.arange(keys)
    visible = (columns >= starts[:, :, None]) & (columns[None, :] <= places[:, None])
    scores = scores.reshape(rows, kv_heads, group, queries, keys) * head_dim**-0.5
    weights = jax.nn.softmax(jnp.where(visible[:, None, None], scores, MASKED), -1).astype(value.dtype)
    mixed = jnp.matmul(weights.reshape(rows, kv_heads, group * queries, keys), value.transpose(0, 2, 1, 3), precision=precision(query.dtype))
    return mixed.reshape(rows, kv_heads, group, queries, head_dim).transpose(0, 3, 1, 2, 4).reshape(rows, queries, heads, head_dim)


def cached_attention(query: jax.Array, key_cache: jax.Array, value_cache: jax.Array, positions: jax.Array) -> jax.Array:
    """Attention of one new token a slot over its cache, in which its own key and value stand already.

    Args:
      query: [slots, heads, head_dim].
      key_cache: [slots, kv_heads, head_dim, length].
      value_cache: [slots, kv_heads, length, head_dim].
      positions: int [slots], the place of the new token; later places are not seen.

    Returns:
      [slots, heads, head_dim].
    """
    slots, heads, head_dim = query.shape
    kv_heads, length = key_cache.shape[1], key_cache.shape[3]
    grouped = query.reshape(slots, kv_heads, heads // kv_heads, head_dim)
    scores = jnp.matmul(grouped, key_cache, precision=precision(query.dtype), preferred_element_type=jnp.float32) * head_dim**-0.5
    visible = jnp.arange(length)[None, :] <= positions[:, None]
    weights = jax.nn.softmax(jnp.where(visible[:, None, None], scores, MASKED), -1).astype(value_cache.dtype)
    return jnp.matmul(weights, value_cache, precision=precision(query.dtype)).reshape(slots, heads, head_dim)
