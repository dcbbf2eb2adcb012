"""Attention over packed rows and over a decode cache, in plain XLA.

Invariants:
* A token sees exactly the tokens of its own segment that are not after it; padding (segment 0) sees padding only, so no row
  of the softmax is empty and nothing real depends on it.
* Scores and softmax are float32.
* Cache layouts are key [slots, kv_heads, head_dim, length] and value [slots, kv_heads, length, head_dim]: both products
  are then row-major on the CPU and need no copy of the cache.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from areal_jax.models.layers import precision

MASKED = -1e30


def packed_attention(query: jax.Array, key: jax.Array, value: jax.Array, segment_ids: jax.Array) -> jax.Array:
    """Causal attention within segments.

    Args:
      query: [rows, length, heads, head_dim].
      key, value: [rows, length, kv_heads, head_dim].
      segment_ids: int [rows, length]; 0 is padding.

    Returns:
      [rows, length, heads, head_dim].
    """
    rows, length, heads, head_dim = query.shape
    kv_heads = key.shape[2]
    group = heads // kv_heads
    # The query heads of a group are folded into the rows of one batched product.
    folded = query.reshape(rows, length, kv_heads, group, head_dim).transpose(0, 2, 3, 1, 4).reshape(rows, kv_heads, group * length, head_dim)
    scores = jnp.matmul(folded, key.transpose(0, 2, 3, 1), precision=precision(query.dtype), preferred_element_type=jnp.float32)
    order = jnp.arange(length)
    visible = (segment_ids[:, :, None] == segment_ids[:, None, :]) & (order[:, None] >= order[None, :])
    scores = scores.reshape(rows, kv_heads, group, length, length) * head_dim**-0.5
    weights = jax.nn.softmax(jnp.where(visible[:, None, None], scores, MASKED), -1).astype(value.dtype)
    mixed = jnp.matmul(weights.reshape(rows, kv_heads, group * length, length), value.transpose(0, 2, 1, 3), precision=precision(query.dtype))
    return mixed.reshape(rows, kv_heads, group, length, head_dim).transpose(0, 3, 1, 2, 4).reshape(rows, length, heads, head_dim)


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
