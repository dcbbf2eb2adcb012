"""The training forward pass over packed rows: scanned or unrolled blocks, rematerialisation, shardings, chunked log-probs.

Invariants:
* What is computed does not depend on the settings; they divide it among devices, and trade memory for time.
* Scanned blocks run over one stack a parameter, cast to the compute type: the copy that mixed precision needs anyway. What layers compute in
  float32 (norms, the router) is not cast.
* Under a mesh the residual stream lies with rows over data and fsdp and positions over context; a block's parameters are gathered over fsdp when
  it runs, are not kept for the backward pass, and their gradients are divided over fsdp block by block.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from areal_jax.models.architecture import ModelConfig
from areal_jax.models.attention import packed_attention
from areal_jax.models.axes import divided, fitting, logical_to_mesh, names_of
from areal_jax.models.block import Block
from areal_jax.models.policy import Params, bind
from areal_jax.models.remat import GATHERED, rematerialised
from areal_jax.models.scores import token_scores
from areal_jax.models.sharding import param_specs

SCAN_FROM = 8
"""Blocks from which 'model.scan_layers=None' scans."""
FLOAT32 = ("scale", "router")
"""Parameters that the layers use in float32."""


@dataclasses.dataclass(frozen=True)
class ForwardSettings:
    """How the training forward pass is computed.

    Attributes:
      attention: backend, of ``models.attention``.
      scan: blocks run under ``jax.lax.scan``.
      remat: 'none', 'dots' (matrix products and attention's result are kept, the rest is computed anew in the backward pass; of a mixture the experts'
        gate and up products, not the down product, whose result is ``experts_per_token`` hidden vectors a token; the GPU's attention kernel runs again,
        as tokamax does not name what its backward pass needs) or 'full' (whole blocks are computed anew).
      chunk: tokens a device whose logits over the vocabulary exist at once.
      mesh: that parameters and rows lie on; None: one device.
    """

    attention: str = "auto"
    scan: bool = False
    remat: str = "none"
    chunk: int = 1024
    mesh: Mesh | None = None


DEFAULT = ForwardSettings()


def forward_settings(config: Any, model: ModelConfig, mesh: Mesh) -> ForwardSettings:
    """From ``model.attention``, ``model.scan_layers``, ``trainer.remat`` and ``trainer.logprob_chunk``."""
    scan = config.model.scan_layers
    return ForwardSettings(
        config.model.attention, model.layers >= SCAN_FROM if scan is None else scan, config.trainer.remat, config.trainer.logprob_chunk, mesh
    )


def packed_logprobs(
    model: ModelConfig,
    params: Params,
    tokens: jax.Array,
    positions: jax.Array,
    segment_ids: jax.Array,
    targets: jax.Array,
    temperature: Any,
    settings: ForwardSettings = DEFAULT,
) -> tuple[jax.Array, jax.Array]:
    """Log-probs of ``targets`` and the entropy, under logits / temperature.

    Args:
      model: the architecture.
      params: its parameters.
      tokens, positions, segment_ids, targets: int [rows, length]; ``targets[t]`` is the token that follows ``tokens[t]``.
      temperature: the sampler's.
      settings: how it is computed.

    Returns:
      (log-probs, entropy), float32 [rows, length]; meaningless where a segment has no next token.
    """
    policy = bind(model, params)
    if settings.mesh is not None and divided(settings.mesh):
        x, tables = embedded(settings.mesh, policy.embedding[...], tokens, model.dtype), policy.rotary(positions)
    else:
        x, tables = policy.embedded(tokens, positions)
    x = _run_blocks(model, params["layers"], x, tables, segment_ids, settings)
    return token_scores(policy.final_norm(x), policy.head, targets, temperature, settings.chunk, settings.mesh)


def embedded(mesh: Mesh, embedding: jax.Array, tokens: jax.Array, dtype: str) -> jax.Array:
    """embedding[tokens], [rows, length, hidden] in ``dtype``, where only rows that are looked up travel between devices.

    A device looks up its columns for the tokens of all devices of its fsdp group, and exchanges them for all columns of its own tokens; where the
    vocabulary is divided the parts, zero but on one device, are summed.
    """
    table = fitting(mesh, logical_to_mesh("vocab", "hidden"), embedding.shape)
    rows = fitting(mesh, logical_to_mesh("batch", "length"), tokens.shape)
    vocabulary, hidden = (names_of(part) for part in table)
    exchanged = bool(hidden) and set(hidden) <= set(names_of(rows[0]))

    def local(table: jax.Array, tokens: jax.Array) -> jax.Array:
        if exchanged:
            tokens = jax.lax.all_gather(tokens, hidden, axis=0, tiled=True)
        if vocabulary:
            tokens = tokens - jax.lax.axis_index(vocabulary) * table.shape[0]
        here = (tokens >= 0) & (tokens < table.shape[0])
        x = jnp.where(here[..., None], table[jnp.clip(tokens, 0, table.shape[0] - 1)], 0).astype(dtype)
        if exchanged:
            x = jax.lax.all_to_all(x, hidden, split_axis=0, concat_axis=2, tiled=True)
        elif hidden:
            x = jax.lax.all_gather(x, hidden, axis=2, tiled=True)
        return jax.lax.psum(x, vocabulary) if vocabulary else x

    return jax.shard_map(local, mesh=mesh, in_specs=(table, rows), out_specs=P(*rows, None), check_vma=False)(embedding, tokens)


@functools.cache
def _block_definition(model: ModelConfig) -> tuple[Any, Any]:
    return nnx.split(nnx.eval_shape(lambda: Block(model, nnx.Rngs(0))), nnx.Param)


def _block(model: ModelConfig, params: Params) -> Block:
    definition, shapes = _block_definition(model)
    state = jax.tree.map(lambda leaf: leaf, shapes)
    nnx.replace_by_pure_dict(state, params)
    return nnx.merge(definition, state)


def _run_blocks(model: ModelConfig, layers: Params, x: jax.Array, tables: Any, segment_ids: jax.Array, settings: ForwardSettings) -> jax.Array:
    mesh = settings.mesh if divided(settings.mesh) else None

    def attend(_: int, query: jax.Array, key: jax.Array, value: jax.Array) -> jax.Array:
        return packed_attention(query, key, value, segment_ids, settings.attention, mesh)

    def block(x: jax.Array, params: Params) -> jax.Array:
        params = params if mesh is None else _gathered(model, mesh, params)
        return _residual(mesh, _block(model, params)(0, x, tables, attend, mesh))

    block = rematerialised(block, settings.remat, gathers=mesh is not None, scanned=settings.scan)
    x = _residual(mesh, x)
    ordered = [layers[f"layer_{i}"] for i in range(model.layers)]
    if not settings.scan:
        return functools.reduce(block, ordered, x)
    stack = jax.tree.map(lambda *leaves: jnp.stack(leaves), *(_compute_copy(model, params) for params in ordered))
    if mesh is not None:
        stack = jax.tree.map(lambda leaf, spec: _constrained(mesh, leaf, P(None, *spec)), stack, _block_specs(model))
    return jax.lax.scan(lambda x, params: (block(x, params), None), x, stack)[0]


def _compute_copy(model: ModelConfig, params: Params) -> Params:
    def cast(path: tuple[Any, ...], leaf: jax.Array) -> jax.Array:
        return leaf if any(part.key in FLOAT32 for part in path) else leaf.astype(model.dtype)

    return jax.tree_util.tree_map_with_path(cast, params)


def _block_specs(model: ModelConfig) -> Any:
    return param_specs(model)["layers"]["layer_0"]


def _constrained(mesh: Mesh, x: jax.Array, spec: P) -> jax.Array:
    return jax.lax.with_sharding_constraint(x, NamedSharding(mesh, fitting(mesh, spec, x.shape)))


def _residual(mesh: Mesh | None, x: jax.Array) -> jax.Array:
    return x if mesh is None else _constrained(mesh, x, logical_to_mesh("batch", "length", None))


def _gathered(model: ModelConfig, mesh: Mesh, params: Params) -> Params:
    """A block's parameters whole over fsdp, but for the experts' kernels, which the mixture gathers itself."""

    def gather(path: tuple[Any, ...], leaf: jax.Array, spec: P) -> jax.Array:
        leaf = leaf if any(part.key in FLOAT32 for part in path) else leaf.astype(model.dtype)
        own = any(part.key == "experts" for part in path)
        return leaf if own else checkpoint_name(_gather(mesh, spec, leaf), GATHERED)

    return jax.tree_util.tree_map_with_path(gather, params, _block_specs(model))


def _whole(mesh: Mesh, spec: P, x: jax.Array) -> jax.Array:
    return _constrained(mesh, x, P(*(None if "fsdp" in names_of(part) else part for part in spec)))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _gather(mesh: Mesh, spec: P, x: jax.Array) -> jax.Array:
    """A parameter on every device of fsdp; its gradient is divided like the parameter."""
    return _whole(mesh, spec, x)


_gather.defvjp(lambda mesh, spec, x: (_whole(mesh, spec, x), None), lambda mesh, spec, _, gradient: (_constrained(mesh, gradient, spec),))
