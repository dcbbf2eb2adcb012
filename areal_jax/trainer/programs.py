"""The programs of a reinforcement-learning step, lowered from shapes alone: the trainer compiles them, the planner measures them.

Invariants:
* Nothing here needs an array: the state is given by shapes, types and shardings.
* One micro-batch program a row count, one update.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax

from areal_jax.algorithms.losses import POLICY_LOSSES, TokenLoss, masked_sum, settings_of
from areal_jax.models.adapters import join
from areal_jax.models.architecture import ModelConfig
from areal_jax.models.forward import forward_settings, packed_logprobs
from areal_jax.trainer.packing import MicroBatch
from areal_jax.trainer.step import Placement, TrainState, update
from areal_jax.trainer.versions import earlier_versions

SUMS = (
    "tokens",
    "loss",
    "entropy",
    "approx_kl",
    "clip_low",
    "clip_high",
    "weight",
    "weight_squared",
    "capped",
    "engine_tokens",
    "engine_gap",
    "engine_kl",
    "stale_tokens",
    "staleness_gap",
    "staleness_kl",
    "rescored_tokens",
    "rescored_gap",
)
MAXIMA = ("weight_max", "engine_gap_max", "rescored_gap_max")


def token_statistics(
    loss: TokenLoss, entropy: jax.Array, proximal: jax.Array, micro: MicroBatch, version: jax.Array, sampled: jax.Array | None
) -> dict[str, jax.Array]:
    """Sums and maxima over a micro-batch's generated tokens, by the names in ``SUMS`` and ``MAXIMA``.

    KL terms are the non-negative estimator r - 1 - log r of the sampled tokens. The engine gap is taken on tokens of the trainer's own
    version, the staleness gap on the others: π_prox against π_behav both times. Where π_behav was scored anew, the rescored gap sets it
    against what the sampler said (``sampled``), on all tokens.
    """
    mask = micro.loss_mask
    behind = jnp.where(mask > 0, proximal, 0.0) - jnp.where(mask > 0, micro.behaviour_logprobs, 0.0)
    weight = jnp.exp(behind)
    mismatch = weight - 1.0 - behind
    ratio = jnp.where(mask > 0, loss.ratio, 1.0)
    own = jnp.where(micro.versions == version, mask, 0.0)
    stale = mask - own
    rescored = jnp.zeros_like(mask) if sampled is None else jnp.where(mask > 0, jnp.abs(micro.behaviour_logprobs - sampled), 0.0)
    sums = {
        "tokens": mask.sum(),
        "loss": masked_sum(loss.loss, mask),
        "entropy": masked_sum(entropy, mask),
        "approx_kl": masked_sum(ratio - 1.0 - jnp.log(ratio), mask),
        "clip_low": masked_sum(loss.clipped * (micro.advantages < 0), mask),
        "clip_high": masked_sum(loss.clipped * (micro.advantages > 0), mask),
        "weight": masked_sum(weight, mask),
        "weight_squared": masked_sum(jnp.square(weight), mask),
        "capped": masked_sum(loss.capped, mask),
        "engine_tokens": own.sum(),
        "engine_gap": masked_sum(jnp.abs(behind), own),
        "engine_kl": masked_sum(mismatch, own),
        "stale_tokens": stale.sum(),
        "staleness_gap": masked_sum(jnp.abs(behind), stale),
        "staleness_kl": masked_sum(mismatch, stale),
        "rescored_tokens": jnp.zeros(()) if sampled is None else mask.sum(),
        "rescored_gap": rescored.sum(),
    }
    maxima = {
        "weight_max": jnp.max(jnp.where(mask > 0, weight, 0.0)),
        "engine_gap_max": jnp.max(jnp.where(own > 0, jnp.abs(behind), 0.0)),
        "rescored_gap_max": rescored.max(),
    }
    return jax.lax.stop_gradient({**sums, **maxima})


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
      'gradients' and 'statistics' (zeros to accumulate into), ('proximal', rows) for π_prox of later minibatches, ('accumulate', rows)
      for a micro-batch's gradient, 'apply' for the update. With ``rollout.exact_logprobs`` and η > 0 also 'copy' and ('choose', rows), for
      ``versions.EarlierVersions``.
    """
    exact = config.rollout.exact_logprobs
    earlier = earlier_versions(config) > 0
    temperature, loss_settings = config.rollout.temperature, settings_of(config.algorithm)
    policy_loss = POLICY_LOSSES[config.algorithm.loss]
    scalar = jax.ShapeDtypeStruct((), jnp.float32, sharding=here.scalar)
    forward = functools.partial(packed_logprobs, model, settings=forward_settings(config, model, here.mesh))

    def proximal(params: Any, frozen: Any, micro: MicroBatch) -> jax.Array:
        return forward(join(params, frozen), micro.tokens, micro.positions, micro.segment_ids, micro.targets, temperature)[0]

    def loss(params: Any, frozen: Any, micro: MicroBatch, centre: Any, fresh: Any, version: Any, sampled: Any) -> tuple[jax.Array, dict[str, jax.Array]]:
        logprobs, entropy = forward(join(params, frozen), micro.tokens, micro.positions, micro.segment_ids, micro.targets, temperature)
        centre = jnp.where(fresh, jax.lax.stop_gradient(logprobs), centre)
        if exact:  # what sampled a token of the trainer's own version is the proximal policy itself
            micro = dataclasses.replace(micro, behaviour_logprobs=jnp.where(micro.versions == version, centre, micro.behaviour_logprobs))
        tokens = policy_loss(logprobs, centre, micro.behaviour_logprobs, micro.advantages, micro.loss_mask, micro.segment_ids, loss_settings)
        return masked_sum(tokens.loss, micro.loss_mask), token_statistics(tokens, entropy, centre, micro, version, sampled)

    def accumulate(
        params: Any, frozen: Any, gradients: Any, statistics: Any, micro: MicroBatch, centre: Any, fresh: Any, version: Any, sampled: Any
    ) -> tuple[Any, Any]:
        more, seen = jax.grad(loss, has_aux=True)(params, frozen, micro, centre, fresh, version, sampled)
        gradients = jax.tree.map(lambda total, g: total + g.astype(jnp.float32), gradients, more)
        joined = {name: statistics[name] + seen[name] for name in SUMS} | {name: jnp.maximum(statistics[name], seen[name]) for name in MAXIMA}
        return gradients, joined

    def apply(state: TrainState, gradients: Any, tokens: Any, rate: Any, version: Any) -> tuple[TrainState, jax.Array, jax.Array]:
        mean = jax.tree.map(lambda g: g / tokens, gradients)
        state, norm, finite = update(optimizer, state, mean, rate, config.trainer.grad_clip)
        return dataclasses.replace(state, step=version + 1), norm, finite

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
        "apply": jax.jit(apply, donate_argnums=0, out_shardings=(here.state, here.scalar, here.scalar)).lower(state, gradients, scalar, scalar, version),
    }
    if earlier:
        programs["copy"] = jax.jit(lambda tree: jax.tree.map(jnp.copy, tree), out_shardings=here.state.params).lower(state.params)
    for rows in counts:
        shape = (rows, config.trainer.micro_batch_tokens)
        integers, floats = (jax.ShapeDtypeStruct(shape, dtype, sharding=here.rows) for dtype in (jnp.int32, jnp.float32))
        micro = MicroBatch(integers, integers, integers, integers, floats, floats, integers, floats)
        if config.trainer.minibatches > 1 or earlier:
            programs["proximal", rows] = jax.jit(proximal, out_shardings=here.rows).lower(state.params, frozen, micro)
        programs["accumulate", rows] = jax.jit(accumulate, donate_argnums=(2, 3), out_shardings=shardings).lower(
            state.params, frozen, gradients, statistics, micro, floats, flag, version, floats if exact else None
        )
        if earlier:
            programs["choose", rows] = jax.jit(choose, out_shardings=here.rows).lower(floats, integers, version, floats)
    return programs
