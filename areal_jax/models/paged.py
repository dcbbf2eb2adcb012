"""Attention over pages of keys and values: of one new token a sequence (decoding) or of a block of them (prefill), by one function.

Invariants:
* Pages are [kv_heads, pages, page_size, head_dim]; a sequence's position p stands in page ``table[p // page_size]`` at p % page_size.
* The keys and values of the queries themselves stand in the pages already; a query sees the positions up to its own, and nothing else of a page.
* Pages are finite everywhere, also where nothing was written yet: what is not seen takes part with weight 0. Page 0 exists and is no sequence's.
* The work is that of the longest sequence of a few neighbouring rows, whatever the width of the tables: rows ordered by length cost what they hold.
* A row's result depends on its own queries and pages alone, to the last bit: blocks of keys beyond its end change nothing.
* Scores and softmax are float32.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from areal_jax.config import ConfigError
from areal_jax.models import paged_kernels
from areal_jax.models.axes import divided, fitting, logical_to_mesh, platform_of
from areal_jax.models.blockwise import MASKED
from areal_jax.models.layers import precision

TOGETHER = {"cpu": (8, 32)}
"""Of a platform the sequences whose keys are visited together, at most, and the keys of each, at least. On the CPU as measured: what its second
cache holds, and few keys beyond a row's end."""
ELSEWHERE = (64, 512)
"""Of accelerators, where each step of a loop costs launches; not measured."""


def paged_attention(
    query: jax.Array,
    key_pages: jax.Array,
    value_pages: jax.Array,
    tables: jax.Array,
    starts: jax.Array,
    backend: str = "auto",
    mesh: Mesh | None = None,
) -> jax.Array:
    """Causal attention of some queries a sequence over its pages.

    Args:
      query: [rows, queries, heads, head_dim], at consecutive positions of a row.
      key_pages, value_pages: [kv_heads, pages, page_size, head_dim].
      tables: int32 [rows, pages of a row], of pages that exist.
      starts: int32 [rows], the position of a row's first query.
      backend: for decoding (one query a row) 'kernel' (the accelerator's), 'plain' or 'blockwise' (both this module's), or 'auto': the kernel where there
        is one. More queries a row take this module's on every device.
      mesh: that the arrays lie on; None: one device. Heads are divided over the axis of 'kv_heads' where it divides those, all else is on every device.

    Returns:
      [rows, queries, heads, head_dim].

    Raises:
      ConfigError: 'kernel' where there is none for decoding.
    """
    platform = platform_of(mesh)
    reason = paged_kernels.obstacle(platform, query.shape, key_pages.shape[2], tables.shape, query.dtype)
    if backend == "kernel" and query.shape[1] == 1 and reason:
        raise ConfigError(f"'model.attention=kernel' needs a kernel that decodes over pages: {reason}; set model.attention=auto")
    kernel = backend in ("kernel", "auto") and query.shape[1] == 1 and not reason
    attend: Any = functools.partial(_decode if kernel else _plain, platform)
    if mesh is None or not divided(mesh):
        return attend(query, key_pages, value_pages, tables, starts)
    pages = fitting(mesh, logical_to_mesh("kv_heads"), key_pages.shape)
    heads = P(None, None, pages[0])
    specs = (heads, pages, pages, P(), P())
    return jax.shard_map(attend, mesh=mesh, in_specs=specs, out_specs=heads, check_vma=False)(query, key_pages, value_pages, tables, starts)


def _decode(platform: str, query: jax.Array, *arrays: jax.Array) -> jax.Array:
    return paged_kernels.decode(platform, query[:, 0], *arrays)[:, None]


def _plain(platform: str, query: jax.Array, key_pages: jax.Array, value_pages: jax.Array, tables: jax.Array, starts: jax.Array) -> jax.Array:
    most_rows, least_keys = TOGETHER.get(platform, ELSEWHERE)
    rows, queries, heads, head_dim = query.shape
    kv_heads, _, page_size, _ = key_pages.shape
    together = max(1, least_keys // page_size)
    count = -(-rows // most_rows)
    size = -(-rows // count)
    group = heads // kv_heads
    more = (0, count * size - rows)  # rows that see page 0 alone
    tables, starts = jnp.pad(tables, (more, (0, -tables.shape[1] % together))), jnp.pad(starts, more)
    folded = jnp.pad(query, (more, (0, 0), (0, 0), (0, 0))).reshape(count, size, queries, kv_heads, group, head_dim)
    folded = folded.transpose(0, 3, 1, 4, 2, 5).reshape(count, kv_heads, size, group * queries, head_dim)
    exact = precision(query.dtype)
    # On a CPU a product of a few queries with a cache that is not transposed is slow, and one vector at a time is fast.
    apart = platform == "cpu" and queries == 1

    def products(own: jax.Array, key: jax.Array) -> jax.Array:
        return jnp.matmul(own, key.swapaxes(2, 3), precision=exact, preferred_element_type=jnp.float32)

    def products_apart(own: jax.Array, key: jax.Array) -> jax.Array:
        vectors = (own[:, :, i, :, None] for i in range(group))
        return jnp.stack([jnp.matmul(key, vector, precision=exact, preferred_element_type=jnp.float32)[..., 0] for vector in vectors], 2)

    def attend(block: tuple[jax.Array, jax.Array, jax.Array]) -> jax.Array:
        own, pages, first = block  # [kv_heads, size, group·queries, head_dim], [size, pages], [size]
        ends = jnp.tile(first[:, None] + jnp.arange(queries), (1, group))

        def visit(index: jax.Array, carry: tuple[jax.Array, jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array, jax.Array]:
            highest, mass, mixed = carry
            ids = jax.lax.dynamic_slice_in_dim(pages, index * together, together, axis=1)
            key, value = (x[:, ids].reshape(kv_heads, size, together * page_size, head_dim) for x in (key_pages, value_pages))
            scores = (products_apart if apart else products)(own, key) * head_dim**-0.5
            places = index * (together * page_size) + jnp.arange(together * page_size)
            scores = jnp.where(places <= ends[..., None], scores, MASKED)
            now = jnp.maximum(highest, jnp.max(scores, -1))
            kept, weights = jnp.exp(highest - now), jnp.exp(scores - now[..., None])
            part = jnp.matmul(weights.astype(value.dtype), value, precision=exact, preferred_element_type=jnp.float32)
            return now, mass * kept + jnp.sum(weights, -1), mixed * kept[..., None] + part

        shape = own.shape[:3]
        carry = (jnp.full(shape, MASKED), jnp.zeros(shape), jnp.zeros(own.shape, jnp.float32))
        last = jnp.max(ends) // (together * page_size)
        _, mass, mixed = jax.lax.fori_loop(0, last + 1, visit, carry)
        return (mixed / mass[..., None]).astype(query.dtype)

    blocks = (folded, tables.reshape(count, size, -1), starts.reshape(count, size))
    mixed = attend(jax.tree.map(lambda x: x[0], blocks))[None] if count == 1 else jax.lax.map(attend, blocks)
    mixed = mixed.reshape(count, kv_heads, size, group, queries, head_dim).transpose(0, 2, 4, 1, 3, 5)
    return mixed.reshape(count * size, queries, heads, head_dim)[:rows]


def write_pages(pages: jax.Array, new: jax.Array, tables: jax.Array, starts: jax.Array, counts: jax.Array) -> jax.Array:
    """The pages with the first ``counts[r]`` of a row's new keys (or values) at its positions from ``starts[r]`` on; the others go to page 0.

    Args:
      pages: [kv_heads, pages, page_size, head_dim].
      new: [rows, queries, kv_heads, head_dim].
      tables: int32 [rows, pages of a row].
      starts, counts: int32 [rows].
    """
    page_size, queries = pages.shape[2], new.shape[1]
    places = starts[:, None] + jnp.arange(queries)
    page = jnp.take_along_axis(tables, jnp.minimum(places // page_size, tables.shape[1] - 1), axis=1)
    page = jnp.where(jnp.arange(queries) < counts[:, None], page, 0)
    return pages.at[:, page.reshape(-1), (places % page_size).reshape(-1)].set(new.reshape(-1, *new.shape[2:]).swapaxes(0, 1).astype(pages.dtype))
