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

from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from areal_jax.models.axes import divided, fitting, logical_to_mesh, names_of
from areal_jax.models.blockwise import MASKED, blockwise_attention
from areal_jax.models.layers import precision

PLAIN_LENGTH = 1024
"""Longest row whose scores 'auto' materialises."""


def packed_attention(query: jax.Array, key: jax.Array, value: jax.Array, segment_ids: jax.Array, backend: str = "auto", mesh: Mesh | None = None) -> jax.Array:
    """Causal attention within segments.

    Args:
      query: [rows, length, heads, head_dim].
      key, value: [rows, length, kv_heads, head_dim].
      segment_ids: int [rows, length]; 0 is padding.
      backend: 'plain' (scores materialised), 'blockwise' (memory linear in length) or 'auto'.
      mesh: that the arrays lie on; None: one device, or as the compiler divides it.

    Returns:
      [rows, length, heads, head_dim].
    """
    if backend == "auto":
        backend = "plain" if query.shape[1] <= PLAIN_LENGTH else "blockwise"
    compute = {"plain": plain_attention, "blockwise": blockwise_attention}[backend]
    if mesh is None or not divided(mesh):
        return compute(query, key, value, segment_starts(segment_ids), 0)
    spec = fitting(mesh, logical_to_mesh("batch", "length", "heads", None), query.shape)
    rows, context, heads = (names_of(part) for part in spec[:3])
    whole_heads = fitting(mesh, P(None, None, heads or None, None), key.shape)[2]
    keys = P(spec[0], spec[1], whole_heads, None)

    def local(query: jax.Array, key: jax.Array, value: jax.Array, segment_ids: jax.Array) -> jax.Array:
        length = query.shape[1]
        offset = 0
        starts = segment_starts(segment_ids)
        if context:
            offset = jax.lax.axis_index(context) * length
            starts = jax.lax.dynamic_slice_in_dim(starts, offset, length, axis=1)
            key, value = (jax.lax.all_gather(x, context, axis=1, tiled=True) for x in (key, value))
        if heads and not names_of(whole_heads):
            key, value = (_own_heads(x, query.shape[2], heads) for x in (key, value))
        return compute(query, key, value, starts, offset)

    return jax.shard_map(local, mesh=mesh, in_specs=(spec, keys, keys, P(rows or None, None)), out_specs=spec, check_vma=False)(query, key, value, segment_ids)


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
