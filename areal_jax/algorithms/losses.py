"""Policy losses per token, and how tokens become one number.

Invariants:
* Pure functions of arrays of one shape, aligned on the predicted token; what stands at masked positions does not matter, not even NaN.
* Only ``logprobs`` carries a gradient: proximal and behaviour log-probs, weights and advantages are constants.
* The importance weight π_prox/π_behav always multiplies the decoupled loss; a cap is a separate choice and off by default.
* The denominator is the number of unmasked tokens, counted before any weight filter.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp


@dataclasses.dataclass(frozen=True)
class LossSettings:
    """The switches of a policy loss.

    Attributes:
      clip_low, clip_high: the ratio is clipped to [1 - clip_low, 1 + clip_high].
      dual_clip: c > 1 bounds the loss by c·|A| where A < 0 (arXiv 1912.09729); None: off.
      weight_cap, weight_floor: bounds of the importance weight; None: no bound.
      weight_mode: 'truncate' moves a weight to its bound, 'mask' takes the token's loss out.
      weight_level: 'token', or 'sequence': the weight is the geometric mean over the sequence.
    """

    clip_low: float = 0.2
    clip_high: float = 0.2
    dual_clip: float | None = None
    weight_cap: float | None = None
    weight_floor: float | None = None
    weight_mode: str = "truncate"
    weight_level: str = "token"


def settings_of(section: Any) -> LossSettings:
    """The settings in the ``algorithm`` section of a configuration."""
    high = section.clip_epsilon if section.clip_epsilon_high is None else section.clip_epsilon_high
    return LossSettings(
        clip_low=section.clip_epsilon,
        clip_high=high,
        dual_clip=section.dual_clip,
        weight_cap=section.importance_weight_cap,
        weight_floor=section.importance_weight_floor,
        weight_mode=section.importance_weight_mode,
        weight_level=section.importance_weight_level,
    )


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TokenLoss:
    """What a policy loss says of each token; 0 at masked positions.

    Attributes:
      loss: to be summed and divided by the number of tokens.
      ratio: the clipped quantity u.
      weight: π_prox/π_behav as applied (after a cap), 0 where a token is taken out; 1 for losses without a weight.
      clipped: 1 where the clipped branch is strictly the larger loss.
      dual_clipped: 1 where the dual clip binds.
      capped: 1 where a bound changed the weight or took the token out.
    """

    loss: jax.Array
    ratio: jax.Array
    weight: jax.Array
    clipped: jax.Array
    dual_clipped: jax.Array
    capped: jax.Array


def masked_sum(values: jax.Array, mask: jax.Array) -> jax.Array:
    """Sum over the tokens with mask 1."""
    return jnp.sum(jnp.where(mask > 0, values, 0.0))


def token_mean(values: jax.Array, mask: jax.Array) -> jax.Array:
    """Mean over the tokens with mask 1; 0 if there is none."""
    return masked_sum(values, mask) / jnp.maximum(1.0, jnp.sum(mask > 0))


def _difference(a: jax.Array, b: jax.Array, mask: jax.Array) -> jax.Array:
    """a - b on the mask, 0 elsewhere, safe for the gradient."""
    return jnp.where(mask > 0, a, 0.0) - jnp.where(mask > 0, b, 0.0)


def sequence_mean(values: jax.Array, mask: jax.Array, segment_ids: jax.Array) -> jax.Array:
    """For each token the mean of ``values`` over the unmasked tokens of its sequence.

    Args:
      values, mask: [rows, length].
      segment_ids: int [rows, length], below length + 1; sequences are told apart within a row only.

    Returns:
      [rows, length].
    """

    def row(v: jax.Array, m: jax.Array, s: jax.Array) -> jax.Array:
        sums = jax.ops.segment_sum(v * m, s, num_segments=v.shape[0] + 1)
        counts = jax.ops.segment_sum(m, s, num_segments=v.shape[0] + 1)
        return (sums / jnp.maximum(counts, 1.0))[s]

    return jax.vmap(row)(values, (mask > 0).astype(values.dtype), segment_ids)


def importance_weight(
    proximal: jax.Array, behaviour: jax.Array, mask: jax.Array, segment_ids: jax.Array, settings: LossSettings
) -> tuple[jax.Array, jax.Array]:
    """π_prox/π_behav.

    Returns:
      (weight as applied, 1 where a bound acted), constants of mask's shape, 0 outside the mask.
    """
    log_weight = _difference(proximal, behaviour, mask)
    if settings.weight_level == "sequence":
        log_weight = sequence_mean(log_weight, mask, segment_ids)
    raw = jnp.where(mask > 0, jnp.exp(log_weight), 0.0)
    low = 0.0 if settings.weight_floor is None else settings.weight_floor
    high = jnp.inf if settings.weight_cap is None else settings.weight_cap
    outside = ((raw < low) | (raw > high)) & (mask > 0)
    weight = jnp.where(outside, 0.0, raw) if settings.weight_mode == "mask" else jnp.where(mask > 0, jnp.clip(raw, low, high), 0.0)
    return jax.lax.stop_gradient((weight, outside.astype(raw.dtype)))


def clipped_surrogate(
    logprobs: jax.Array, centre: jax.Array, advantages: jax.Array, mask: jax.Array, settings: LossSettings
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """PPO's pessimistic loss around ``centre``: max(-A·u, -A·clip(u)), u = π/π_centre (arXiv 1707.06347).

    Returns:
      (loss, ratio u, clipped, dual clipped), each of mask's shape, 0 outside the mask.
    """
    inside = mask > 0
    advantages = jnp.where(inside, jax.lax.stop_gradient(advantages), 0.0)
    ratio = jnp.exp(_difference(logprobs, jax.lax.stop_gradient(centre), mask))
    plain = -advantages * ratio
    bounded = -advantages * jnp.clip(ratio, 1.0 - settings.clip_low, 1.0 + settings.clip_high)
    loss = jnp.maximum(plain, bounded)
    dual = jnp.zeros_like(loss)
    if settings.dual_clip is not None:
        limit = settings.dual_clip * jnp.abs(advantages)
        dual = (limit < loss).astype(loss.dtype)
        loss = jnp.minimum(loss, limit)
    return loss, jnp.where(inside, ratio, 0.0), jnp.where(inside, plain < bounded, False).astype(loss.dtype), dual


def decoupled_ppo(
    logprobs: jax.Array,
    proximal: jax.Array,
    behaviour: jax.Array,
    advantages: jax.Array,
    mask: jax.Array,
    segment_ids: jax.Array,
    settings: LossSettings,
) -> TokenLoss:
    """Decoupled PPO: π_prox/π_behav times the surrogate clipped around π_prox (arXiv 2505.24298, equation 5; arXiv 2110.00641).

    Args:
      logprobs: float32 [rows, length], of the policy that is trained.
      proximal: of the weights before the training step.
      behaviour: of the policy that sampled each token.
      advantages, mask: [rows, length].
      segment_ids: int [rows, length]; used by ``weight_level='sequence'``.
      settings: bounds and modes.
    """
    weight, capped = importance_weight(proximal, behaviour, mask, segment_ids, settings)
    loss, ratio, clipped, dual = clipped_surrogate(logprobs, proximal, advantages, mask, settings)
    return TokenLoss(jnp.where(weight > 0, weight * loss, 0.0), ratio, weight, clipped, dual, capped)


def ppo(
    logprobs: jax.Array,
    proximal: jax.Array,
    behaviour: jax.Array,
    advantages: jax.Array,
    mask: jax.Array,
    segment_ids: jax.Array,
    settings: LossSettings,
) -> TokenLoss:
    """Plain PPO: the surrogate clipped around the behaviour policy (arXiv 2505.24298, equation 2); the proximal policy is not used."""
    del proximal, segment_ids
    loss, ratio, clipped, dual = clipped_surrogate(logprobs, behaviour, advantages, mask, settings)
    ones = (mask > 0).astype(loss.dtype)
    return TokenLoss(loss, ratio, ones, clipped, dual, jnp.zeros_like(loss))


POLICY_LOSSES: dict[str, Callable[..., TokenLoss]] = {"decoupled_ppo": decoupled_ppo, "ppo": ppo}
"""By ``algorithm.loss``. All take (logprobs, proximal, behaviour, advantages, mask, segment_ids, settings)."""
