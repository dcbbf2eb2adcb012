"""The accelerators' kernels for decoding over pages, both of JAX itself: one new token a sequence, pages of bfloat16.

Invariants:
* Both compute what ``paged_attention`` computes for one query a row; products are those of bfloat16 inputs, accumulated in float32.
* They serve decoding alone. Blocks of queries (prefill) take plain XLA on every device: the TPU's ragged kernel wants keys and values interleaved in
  one array [pages, page_size, 2 · kv_heads, head_dim], and the GPU's takes one query a row.
* Pages past a row's end may be loaded, never seen; they are the table's own or page 0, so a table names pages that exist.
* Nothing here is imported before it is used: the kernels' modules are heavy.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from areal_jax.models import kernels

TPU_KEYS = 256
"""Keys that the TPU's kernel loads together."""
TPU_TABLES = 2**17
"""Entries of the tables of all rows that the TPU's kernel may hold in scalar memory (half of its 1 MiB)."""
GPU_KEYS = 128
"""Keys that a GPU's program visits together, as the kernel's own default of 8 pages of 16."""
GPU_SPLITS = 16
"""Programs among which a long row's keys are divided, at most: the kernel's own default."""


def obstacle(platform: str, shape: tuple[int, ...], page_size: int, tables: tuple[int, ...], dtype: Any) -> str:
    """Why there is no kernel for decoding; '' if there is one. Limits as of the kernels' sources and compilers.

    Args:
      platform: of the devices.
      shape: of the queries, [rows, queries, heads, head_dim].
      page_size: positions of a page.
      tables: shape of the tables, [rows, pages of a row].
      dtype: of queries and pages.
    """
    head_dim = shape[-1]
    if platform not in ("tpu", "gpu"):
        return f"kernels are for tpu and gpu; the device is a {platform}"
    if jnp.dtype(dtype) != jnp.bfloat16:
        return f"kernels compute in bfloat16; the queries are {jnp.dtype(dtype).name}"
    if platform == "tpu" and head_dim % kernels.LANES:
        return f"the TPU's kernel takes heads of multiples of {kernels.LANES}; 'head_dim' is {head_dim}"
    if platform == "tpu" and tables[0] * tables[1] > TPU_TABLES:
        return f"the TPU's kernel holds tables of {TPU_TABLES} pages; {tables[0]} rows of {tables[1]} pages are {tables[0] * tables[1]}"
    if platform == "gpu" and (head_dim < 16 or head_dim & (head_dim - 1)):
        return f"the GPU's kernel takes heads of a power of two from 16 on; 'head_dim' is {head_dim}"
    if platform == "gpu" and page_size & (page_size - 1):
        return f"the GPU's kernel takes pages of a power of two positions; 'page_size' is {page_size}"
    return ""


def decode(platform: str, query: jax.Array, key_pages: jax.Array, value_pages: jax.Array, tables: jax.Array, starts: jax.Array) -> jax.Array:
    """The platform's kernel on queries [rows, heads, head_dim]; the rest as of ``paged_attention``."""
    return (_tpu if platform == "tpu" else _gpu)(query, key_pages, value_pages, tables, starts + 1)


def _tpu(query: jax.Array, key_pages: jax.Array, value_pages: jax.Array, tables: jax.Array, lengths: jax.Array) -> jax.Array:
    from jax.experimental.pallas.ops.tpu.paged_attention import paged_attention

    pages = min(tables.shape[1], max(1, TPU_KEYS // key_pages.shape[2]))
    tables = jnp.pad(tables, ((0, 0), (0, -tables.shape[1] % pages)))
    # The kernel accumulates in the type of the queries, and does not scale them.
    scaled = query.astype(jnp.float32) * query.shape[-1] ** -0.5
    return paged_attention(scaled, key_pages, value_pages, lengths, tables, pages_per_compute_block=pages).astype(query.dtype)


def _gpu(query: jax.Array, key_pages: jax.Array, value_pages: jax.Array, tables: jax.Array, lengths: jax.Array) -> jax.Array:
    from jax.experimental.pallas.ops.gpu.paged_attention import paged_attention

    # A program's pages are a power of two, and no fewer than a matrix product takes keys.
    pages = max(1, GPU_KEYS // key_pages.shape[2])
    blocks = -(-tables.shape[1] // pages)
    splits = min(GPU_SPLITS, blocks)
    tables = jnp.pad(tables, ((0, 0), (0, -tables.shape[1] % (pages * splits))))
    scaled = query * query.shape[-1] ** -0.5
    return paged_attention(scaled, key_pages, value_pages, tables, lengths, pages_per_compute_block=pages, k_splits=splits, interpret=kernels.INTERPRET)
