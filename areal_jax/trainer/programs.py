"""The programs of a reinforcement-learning step, lowered from shapes alone: the trainer compiles them, the planner measures them.

Invariants:
* Nothing here needs an array: the state is given by shapes, types and shardings.
* One micro-batch program a row count, one update.
* A micro-batch adds Σ weight·loss over its tokens to the gradient, and the update divides by the minibatch's denominator: neither knows of the packing.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax

from areal_jax.models.adapters import join
from areal_jax.models.architecture import ModelConfig
from areal_jax.models.forward import forward_settings, packed_logprobs
from areal_jax.trainer.objective import MAXIMA, SUMS, in_loss, needs_proximal, needs_reference, objective, reference_part
from areal_jax.trainer.packing import MicroBatch
from areal_jax.trainer.step import Placement, TrainState, make_schedule, update
from areal_jax.trainer.versions import earlier_versions


def train_programs(
    config: Any, model: ModelConfig, here: Placement, optimizer: optax.GradientTransformation, state: TrainState, frozen: Any, counts: Sequence[int]
) -> dict[Any, jax.stages.Lowered]:
    """The lowered programs of a training step.

    Args:
      config: validated and settled; reads ``trainer``, ``algorithm``, ``rollout``, ``model.attention`` and ``model.scan_layers``.
      model: the architecture.
      here: from ``step.place``.
      optimizer: from ``step.make_optimizer``.
      state: of ``jax.ShapeDtypeStruct`` with shardings.
      frozen: likewise, the parameters that are not trained; {} when all are.
      counts: static row counts of micro-batches.

    Returns:
      'gradients' and 'statistics' (zeros to accumulate into), ('accumulate', rows) for a micro-batch's gradient, 'apply' for the update. Where they are
      needed ('proximal', rows) for π_prox, ('reference', rows) for the reference policy's log-probs, and with ``rollout.exact_logprobs`` and η > 0 'copy'
      and ('choose', rows), for ``versions.EarlierVersions``.
    """
    exact = config.rollout.exact_logprobs
    earlier = earlier_versions(config) > 0
    temperature, schedule, penalised = config.rollout.temperature, make_schedule(config.trainer), in_loss(config.algorithm)
    scalar = jax.ShapeDtypeStruct((), jnp.float32, sharding=here.scalar)
    forward = functools.partial(packed_logprobs, model, settings=forward_settings(config, model, here.mesh))

    def proximal(params: Any, frozen: Any, micro: MicroBatch) -> jax.Array:
        return forward(join(params, frozen), micro.tokens, micro.positions, micro.segment_ids, micro.targets, temperature)[0]

    loss = objective(config, lambda params, micro: forward(params, micro.tokens, micro.positions, micro.segment_ids, micro.targets, temperature))
    base, reference_params = reference_part(model, state.params, frozen)

    def reference(params: Any, micro: MicroBatch) -> jax.Array:
        how = forward_settings(config, base, here.mesh)
        return packed_logprobs(base, params, micro.tokens, micro.positions, micro.segment_ids, micro.targets, temperature, how)[0]

    def accumulate(
        params: Any, frozen: Any, gradients: Any, statistics: Any, micro: MicroBatch, centre: Any, fresh: Any, version: Any, sampled: Any, reference: Any
    ) -> tuple[Any, Any]:
        more, seen = jax.grad(loss, has_aux=True)(params, frozen, micro, centre, fresh, version, sampled, reference)
        gradients = jax.tree.map(lambda total, g: total + g.astype(jnp.float32), gradients, more)
        joined = {name: statistics[name] + seen[name] for name in SUMS} | {name: jnp.maximum(statistics[name], seen[name]) for name in MAXIMA}
        return gradients, joined

    def apply(state: TrainState, gradients: Any, denominator: Any, version: Any) -> tuple[TrainState, jax.Array, jax.Array, jax.Array]:
        mean = jax.tree.map(lambda g: g / denominator, gradients)
        rate = jnp.asarray(schedule(version), jnp.float32)
        state, norm, finite = update(optimizer, state, mean, rate, config.trainer.grad_clip)
        return dataclasses.replace(state, step=version + 1), norm, finite, rate

    def choose(logprobs: Any, versions: Any, version: Any, scored: Any) -> jax.Array:
        return jnp.where(versions == version, scored, logprobs)

    gradients = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, jnp.float32, sharding=leaf.sharding), state.params)
    statistics = dict.fromkeys(SUMS + MAXIMA, scalar)
    shardings = jax.tree.map(lambda leaf: leaf.sharding, (gradients, statistics))

    def zeros(tree: Any) -> Any:
        return jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), tree)

    flag, version = (jax.ShapeDtypeStruct((), dtype, sharding=here.scalar) for dtype in (jnp.bool_, jnp.int32))
    programs: dict[Any, Any] = {
        "gradients": jax.jit(lambda: zeros(gradients), out_shardings=shardings[0]).lower(),
        "statistics": jax.jit(lambda: zeros(statistics), out_shardings=shardings[1]).lower(),
        "apply": jax.jit(apply, donate_argnums=0, out_shardings=(here.state, *[here.scalar] * 3)).lower(state, gradients, scalar, version),
    }
    if earlier:
        programs["copy"] = jax.jit(lambda tree: jax.tree.map(jnp.copy, tree), out_shardings=here.state.params).lower(state.params)
    for rows in counts:
        shape = (rows, config.trainer.micro_batch_tokens)
        integers, floats = (jax.ShapeDtypeStruct(shape, dtype, sharding=here.rows) for dtype in (jnp.int32, jnp.float32))
        micro = MicroBatch(integers, integers, integers, integers, floats, floats, integers, floats, floats)
        if needs_reference(config.algorithm):
            programs["reference", rows] = jax.jit(reference, out_shardings=here.rows).lower(reference_params, micro)
        if needs_proximal(config):
            programs["proximal", rows] = jax.jit(proximal, out_shardings=here.rows).lower(state.params, frozen, micro)
        programs["accumulate", rows] = jax.jit(accumulate, donate_argnums=(2, 3), out_shardings=shardings).lower(
            state.params, frozen, gradients, statistics, micro, floats, flag, version, floats if exact else None, floats if penalised else None
        )
        if earlier:
            programs["choose", rows] = jax.jit(choose, out_shardings=here.rows).lower(floats, integers, version, floats)
    return programs
