"""Causal attention within segments whose memory is linear in the length, forward and backward, in plain XLA (arXiv 2205.14135, 2307.08691).

Invariants:
* Scores exist for one block of queries against one block of keys; the backward pass computes them anew from the queries' normalisers.
* Blocks of keys that no query of a block sees are not computed: later ones, and those before the block's earliest segment.
* Scores and softmax are float32.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from areal_jax.models.layers import precision
from areal_jax.models.remat import SAVED

MASKED = -1e30


def blockwise_attention(query: jax.Array, key: jax.Array, value: jax.Array, starts: jax.Array, offset: Any, block: int = 512) -> jax.Array:
    """Attention of each query over the keys from its segment's start to itself.

    Args:
      query: [rows, queries, heads, head_dim].
      key, value: [rows, keys, kv_heads, head_dim].
      starts: int [rows, queries], the first key that a query sees.
      offset: int [], the first query's place among the keys.
      block: queries and keys of a block.

    Returns:
      [rows, queries, heads, head_dim].
    """
    rows, queries, heads, head_dim = query.shape
    keys, kv_heads = key.shape[1:3]
    size = min(block, max(queries, keys))
    more_queries, more_keys = -queries % size, -keys % size
    starts = jnp.pad(starts, ((0, 0), (0, more_queries)), mode="edge")
    query = jnp.pad(query, ((0, 0), (0, more_queries), (0, 0), (0, 0)))
    # The query heads that share a key head are folded into the queries of one batched product.
    folded = (
        query.reshape(rows, -1, size, kv_heads, heads // kv_heads, head_dim)
        .transpose(1, 0, 3, 4, 2, 5)
        .reshape(-1, rows, kv_heads, heads // kv_heads * size, head_dim)
    )
    key, value = (jnp.pad(x, ((0, 0), (0, more_keys), (0, 0), (0, 0))).transpose(0, 2, 1, 3) for x in (key, value))
    mixed: Any = _attention(size, folded, key, value, starts.reshape(rows, -1, size).transpose(1, 0, 2), jnp.asarray(offset, jnp.int32))
    mixed = mixed.reshape(-1, rows, kv_heads, heads // kv_heads, size, head_dim).transpose(1, 0, 4, 2, 3, 5)
    return mixed.reshape(rows, -1, heads, head_dim)[:, :queries]


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attention(size: int, query: jax.Array, key: jax.Array, value: jax.Array, starts: jax.Array, offset: jax.Array) -> jax.Array:
    """Queries [blocks, rows, kv_heads, group · size, head_dim] over keys [rows, kv_heads, keys, head_dim]; starts [blocks, rows, size]."""
    return _forward(size, query, key, value, starts, offset)[0]


def _product(x: jax.Array, y: jax.Array) -> jax.Array:
    return jnp.matmul(x, y, precision=precision(x.dtype), preferred_element_type=jnp.float32)


def _block(x: jax.Array, index: Any, size: int) -> jax.Array:
    return jax.lax.dynamic_slice_in_dim(x, index * size, size, axis=2)


def _scores(query: jax.Array, key: jax.Array, starts: jax.Array, first_query: Any, first_key: Any) -> jax.Array:
    """Masked scores float32 [rows, kv_heads, group · size, size] of a block of queries and one of keys."""
    size = starts.shape[-1]
    places, columns = first_query + jnp.arange(size), first_key + jnp.arange(size)
    visible = (columns >= starts[:, :, None]) & (columns[None, :] <= places[:, None])
    scores = _product(query, key.swapaxes(-1, -2)) * query.shape[-1] ** -0.5
    by_head = scores.reshape(*scores.shape[:2], -1, size, size)
    return jnp.where(visible[:, None, None], by_head, MASKED).reshape(scores.shape)


def _seen(starts: jax.Array, first_query: Any, size: int, keys: int) -> tuple[jax.Array, jax.Array]:
    """Blocks [from, to) of keys that a block of queries sees."""
    return jnp.min(starts) // size, jnp.minimum((first_query + size - 1) // size + 1, keys // size)


def _forward(size: int, query: jax.Array, key: jax.Array, value: jax.Array, starts: jax.Array, offset: jax.Array) -> tuple[jax.Array, Any]:
    def one(block: tuple[jax.Array, ...]) -> tuple[jax.Array, jax.Array]:
        index, query, starts = block
        first = offset + index * size

        def step(j: jax.Array, carry: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
            top, total, mixed = carry
            scores = _scores(query, _block(key, j, size), starts, first, j * size)
            higher = jnp.maximum(top, jnp.max(scores, -1))
            weights, shrink = jnp.exp(scores - higher[..., None]), jnp.exp(top - higher)
            mixed = mixed * shrink[..., None] + _product(weights.astype(value.dtype), _block(value, j, size))
            return higher, total * shrink + jnp.sum(weights, -1), mixed

        nothing = jnp.zeros(query.shape[:-1], jnp.float32)
        lowest, highest = _seen(starts, first, size, key.shape[2])
        top, total, mixed = jax.lax.fori_loop(lowest, highest, step, (nothing + MASKED, nothing, jnp.zeros(query.shape, jnp.float32)))
        return (mixed / total[..., None]).astype(value.dtype), top + jnp.log(total)

    mixed, normaliser = jax.lax.map(one, (jnp.arange(len(query)), query, starts))
    mixed, normaliser = checkpoint_name(mixed, SAVED), checkpoint_name(normaliser, SAVED)
    return mixed, (query, key, value, starts, offset, mixed, normaliser)


def _backward(size: int, kept: Any, d_mixed: jax.Array) -> tuple[Any, ...]:
    query, key, value, starts, offset, mixed, normaliser = kept
    scale = query.shape[-1] ** -0.5

    def one(carry: tuple[jax.Array, jax.Array], block: tuple[jax.Array, ...]) -> tuple[tuple[jax.Array, jax.Array], jax.Array]:
        index, query, starts, d_mixed, normaliser, expected = block
        first = offset + index * size

        def step(j: jax.Array, carry: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
            d_query, d_key, d_value = carry
            keys = _block(key, j, size)
            weights = jnp.exp(_scores(query, keys, starts, first, j * size) - normaliser[..., None])
            d_scores = weights * (_product(d_mixed, _block(value, j, size).swapaxes(-1, -2)) - expected[..., None]) * scale
            d_scores = d_scores.astype(query.dtype)
            more_key = _block(d_key, j, size) + _product(d_scores.swapaxes(-1, -2), query)
            more_value = _block(d_value, j, size) + _product(weights.astype(value.dtype).swapaxes(-1, -2), d_mixed)
            d_key = jax.lax.dynamic_update_slice_in_dim(d_key, more_key, j * size, axis=2)
            return d_query + _product(d_scores, keys), d_key, jax.lax.dynamic_update_slice_in_dim(d_value, more_value, j * size, axis=2)

        lowest, highest = _seen(starts, first, size, key.shape[2])
        d_query, d_key, d_value = jax.lax.fori_loop(lowest, highest, step, (jnp.zeros(query.shape, jnp.float32), *carry))
        return (d_key, d_value), d_query.astype(query.dtype)

    expected = jnp.sum(d_mixed.astype(jnp.float32) * mixed.astype(jnp.float32), -1)
    zeros = (jnp.zeros(key.shape, jnp.float32), jnp.zeros(value.shape, jnp.float32))
    (d_key, d_value), d_query = jax.lax.scan(one, zeros, (jnp.arange(len(query)), query, starts, d_mixed, normaliser, expected))
    return d_query, d_key.astype(key.dtype), d_value.astype(value.dtype), None, None


_attention.defvjp(_forward, _backward)
