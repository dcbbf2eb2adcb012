"""Attention kernels of the accelerators: JAX's own splash attention on TPU, tokamax on GPU (extra 'gpu'). Both have memory linear in the length.

Invariants:
* Both compute what ``blockwise_attention`` computes, at padding too; products are those of bfloat16 inputs, accumulated in float32.
* Nothing here is imported before it is used: the kernels' modules are heavy, and tokamax may be absent.
"""

from __future__ import annotations

import functools
import importlib.util
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from areal_jax.config import ConfigError
from areal_jax.models.remat import SAVED

LANES = 128
"""Splash attention takes whole multiples of so many queries and keys."""
TPU_BLOCK = 512
GPU_IMPLEMENTATIONS = ("mosaic", "triton")
"""Of tokamax, the first that takes the inputs; its others are not linear in memory or not kernels."""
INTERPRET = False
"""Splash attention by Pallas' interpreter, for machines without a TPU."""


def obstacle(platform: str, queries: int, dtype: Any) -> str:
    """Why there is no kernel for ``queries`` queries of a device and their type; '' if there is one.

    Raises:
      ConfigError: on a GPU without tokamax.
    """
    if platform not in ("tpu", "gpu"):
        return f"kernels are for tpu and gpu; the device is a {platform}"
    if jnp.dtype(dtype) != jnp.bfloat16:
        return f"kernels compute in bfloat16; 'model.dtype' is {jnp.dtype(dtype).name}"
    if platform == "tpu" and queries % LANES:
        return f"the TPU's kernel takes multiples of {LANES} positions a device; got {queries}"
    if platform == "gpu" and importlib.util.find_spec("tokamax") is None:
        raise ConfigError(
            "the GPU's attention kernel is tokamax, which is not installed; install this project's extra 'gpu' (pip install -e '.[gpu]'), "
            "or set model.attention=blockwise"
        )
    return ""


@functools.lru_cache(maxsize=16)
def _splash(heads: int, length: int, shards: int, interpret: bool) -> Any:
    from jax.experimental.pallas.ops.tpu import splash_attention as splash

    block = next(size for size in (TPU_BLOCK, 256, LANES) if length // shards % size == 0)
    sizes = dict.fromkeys(("block_q", "block_kv", "block_q_dkv", "block_kv_dkv", "block_q_dq", "block_kv_dq"), block)
    mask = splash.MultiHeadMask([splash.CausalMask((length, length), shard_count=shards)] * heads)
    with jax.ensure_compile_time_eval():
        return splash.make_splash_mha(
            mask, head_shards=1, q_seq_shards=shards, block_sizes=splash.BlockSizes(**sizes), residual_checkpoint_name=SAVED, interpret=interpret
        )


def splash_kernel(heads: int, length: int, mesh: Mesh | None, context: str | None) -> tuple[Any, Any]:
    """(kernel, its partition specs for ``jax.shard_map``): arrays about which blocks are seen, divided over the axis ``context`` like the queries.

    Args:
      heads: query heads of a device.
      length: of a row.
      mesh: None on one device.
      context: axis over which queries are divided; None: they are not.
    """
    kernel = _splash(heads, length, mesh.shape[context] if mesh is not None and context else 1, INTERPRET)
    return kernel, None if mesh is None else kernel.manual_sharding_spec(NamedSharding(mesh, P(None, context)))


def splash_attention(kernel: Any, query: jax.Array, key: jax.Array, value: jax.Array, query_segments: jax.Array, key_segments: jax.Array) -> jax.Array:
    """The kernel on [rows, length, heads, head_dim] and segment ids [rows, length] of queries and keys."""
    from jax.experimental.pallas.ops.tpu import splash_attention as splash

    query, key, value = (x.swapaxes(1, 2) for x in (query * query.shape[-1] ** -0.5, key, value))
    return jax.vmap(kernel)(query, key, value, splash.SegmentIds(query_segments, key_segments)).swapaxes(1, 2).astype(value.dtype)


def tokamax_attention(query: jax.Array, key: jax.Array, value: jax.Array, starts: jax.Array, offset: Any) -> jax.Array:
    """``blockwise_attention`` by tokamax: causal, within a window a query.

    With queries divided over context each device's are padded to the whole row, so that a context axis divides the memory but may not divide the
    kernel's work.
    """
    import tokamax  # pyright: ignore[reportMissingImports]
    from absl import flags

    if not flags.FLAGS.is_parsed():
        flags.FLAGS.mark_as_parsed()  # else tokamax reads its options from this program's command line, and refuses ours
    rows, queries, *rest = query.shape
    keys = key.shape[1]
    before = offset + jnp.arange(queries) - starts
    if queries < keys:
        # A window a query needs as many queries as keys: those of other devices stand in as zeros that see only themselves.
        query = jax.lax.dynamic_update_slice_in_dim(jnp.zeros((rows, keys, *rest), query.dtype), query, offset, axis=1)
        before = jax.lax.dynamic_update_slice_in_dim(jnp.zeros((rows, keys), before.dtype), before, offset, axis=1)
    window: Any = (before[:, None], 0)
    mixed = tokamax.dot_product_attention(query, key, value, is_causal=True, local_window_size=window, implementation=GPU_IMPLEMENTATIONS)
    return jax.lax.dynamic_slice_in_dim(mixed, offset, queries, axis=1)
