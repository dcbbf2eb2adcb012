"""What a micro-batch adds to the loss of a step, which policies that takes, and what is measured on the way.

Invariants:
* Σ weight·loss over the micro-batch's tokens, not divided by anything: the packing does not enter.
* Only the trained parameters carry a gradient; π_prox, π_behav, the reference and advantages are constants.
* Terms that the configuration leaves out are not computed.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from areal_jax.algorithms.kl import reference_kl
from areal_jax.algorithms.losses import TokenLoss, Tokens, masked_sum, policy_loss, settings_of
from areal_jax.algorithms.proximal import log_linear
from areal_jax.models.adapters import join
from areal_jax.models.architecture import ModelConfig
from areal_jax.trainer.packing import MicroBatch
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
    "reference_loss",
    "reference_kl",
)
MAXIMA = ("weight_max", "engine_gap_max", "rescored_gap_max")


def needs_reference(section: Any) -> bool:
    """Whether the ``algorithm`` section asks for a reference policy."""
    return section.kl_coefficient > 0


def in_loss(section: Any) -> bool:
    """Whether the KL to the reference is part of the loss."""
    return needs_reference(section) and section.kl_in == "loss"


def needs_proximal(config: Any) -> bool:
    """Whether a step scores micro-batches under the policy before it, beyond what the first minibatch's own forward pass gives.

    Not with one minibatch, whose own pass is before the first update, nor where π_prox is approximated; always for M2PO's filter and for earlier versions.
    """
    a = config.algorithm
    recomputed = a.proximal == "recompute" and config.trainer.minibatches > 1
    return recomputed or a.loss == "m2po" or earlier_versions(config) > 0


def reference_part(model: ModelConfig, params: Any, frozen: Any) -> tuple[ModelConfig, Any]:
    """The reference policy's architecture and its tree, of arrays or shapes: with adapters what is frozen below them, else a tree like the trained one."""
    return (model, params) if model.lora is None else (dataclasses.replace(model, lora=None), frozen)


def token_statistics(
    loss: TokenLoss,
    entropy: jax.Array,
    proximal: jax.Array,
    micro: MicroBatch,
    version: jax.Array,
    sampled: jax.Array | None,
    measured: tuple[jax.Array, jax.Array],
    kl: jax.Array,
) -> dict[str, jax.Array]:
    """Sums and maxima over a micro-batch's generated tokens, by the names in ``SUMS`` and ``MAXIMA``.

    KL terms are the non-negative estimator r - 1 - log r of the sampled tokens. The engine gap is taken on tokens of the trainer's own
    version, the staleness gap on the others: π_prox against π_behav both times, where π_prox is known: ``measured`` is (log-probs, 1 where they are
    those of the policy before the step). Where π_behav was scored anew, the rescored gap sets it against what the sampler said (``sampled``), on all
    tokens. ``kl`` is each token's to the reference.
    """
    mask = micro.loss_mask
    behaviour = jnp.where(mask > 0, micro.behaviour_logprobs, 0.0)
    weight = jnp.exp(jnp.where(mask > 0, proximal, 0.0) - behaviour)
    known = mask * measured[1]
    behind = jnp.where(mask > 0, measured[0], 0.0) - behaviour
    mismatch = jnp.exp(behind) - 1.0 - behind
    ratio = jnp.where(mask > 0, loss.ratio, 1.0)
    own = jnp.where(micro.versions == version, known, 0.0)
    stale = known - own
    rescored = jnp.zeros_like(mask) if sampled is None else jnp.where(mask > 0, jnp.abs(micro.behaviour_logprobs - sampled), 0.0)
    sums = {
        "tokens": mask.sum(),
        "loss": masked_sum(loss.loss * micro.loss_weights, mask),
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
        "reference_loss": masked_sum(kl * micro.loss_weights, mask),
        "reference_kl": masked_sum(kl, mask),
    }
    maxima = {
        "weight_max": jnp.max(jnp.where(mask > 0, weight, 0.0)),
        "engine_gap_max": jnp.max(jnp.where(own > 0, jnp.abs(behind), 0.0)),
        "rescored_gap_max": rescored.max(),
    }
    return jax.lax.stop_gradient({**sums, **maxima})


def objective(config: Any, scores: Callable[[Any, MicroBatch], tuple[jax.Array, jax.Array]]) -> Callable[..., tuple[jax.Array, dict[str, jax.Array]]]:
    """The loss of a micro-batch.

    Args:
      config: reads ``algorithm`` and ``rollout.exact_logprobs``.
      scores: from (all parameters, micro-batch) to (log-probs, entropy), float32 [rows, C].

    Returns:
      loss(trained parameters, frozen ones, micro-batch, π_prox, whether its own log-probs are π_prox instead, the trainer's version, what the sampler said
      or None, the reference's log-probs or None) → (Σ weight·loss, statistics).
    """
    a, settings = config.algorithm, settings_of(config.algorithm)

    def loss(
        params: Any, frozen: Any, micro: MicroBatch, centre: Any, fresh: Any, version: Any, sampled: Any, reference: Any
    ) -> tuple[jax.Array, dict[str, jax.Array]]:
        logprobs, entropy = scores(join(params, frozen), micro)
        mask, now = micro.loss_mask, jax.lax.stop_gradient(logprobs)
        centre = jnp.where(fresh, now, centre)
        measured = (centre, jnp.ones_like(centre))
        if config.rollout.exact_logprobs:  # what sampled a token of the trainer's own version is the proximal policy itself
            micro = dataclasses.replace(micro, behaviour_logprobs=jnp.where(micro.versions == version, centre, micro.behaviour_logprobs))
        if a.proximal == "log_linear":  # the policy before the step is known where nothing was updated yet
            measured = (now, jnp.broadcast_to(fresh, now.shape).astype(now.dtype))
            centre = log_linear(micro.behaviour_logprobs, now, micro.versions, version + 1, version)
        tokens = policy_loss(a.loss, Tokens(logprobs, centre, micro.behaviour_logprobs, micro.advantages, mask, micro.segment_ids), settings)
        total, kl = tokens.loss, jnp.zeros_like(logprobs)
        if in_loss(a):
            kl = reference_kl(a.kl_estimator, logprobs, reference, mask)
            total = total + a.kl_coefficient * kl
        if a.entropy_coefficient:
            total = total - a.entropy_coefficient * jnp.where(mask > 0, entropy, 0.0)
        statistics = token_statistics(tokens, entropy, centre, micro, version, sampled, measured, kl)
        return masked_sum(total * micro.loss_weights, mask), statistics

    return loss
