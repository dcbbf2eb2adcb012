"""Policy losses per token: one table of pure functions, and the modifiers that they share.

Invariants:
* Pure functions of arrays of one shape, aligned on the predicted token. ``policy_loss`` is the way in: what stands at masked positions does not
  matter, not even NaN, and gives 0.
* Only ``logprobs`` carries a gradient: proximal and behaviour log-probs, weights and advantages are constants.
* The importance weight π_prox/π_behav multiplies every decoupled loss, and only those; a bound on it is a separate choice and off by default.
* A loss is per token; how tokens become one number, and by what they are divided, is ``aggregation``'s. A token that a bound takes out still counts.

What each named algorithm is made of stands in ``README.md`` beside this file.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

LOG_WEIGHT_BOUND = 20.0
"""Of the logarithm of a whole sequence's weight, a sum over its tokens, so that its exponential stays finite."""


@dataclasses.dataclass(frozen=True)
class LossSettings:
    """The switches of a policy loss.

    Attributes:
      clip_low, clip_high: the ratio is clipped to [1 - clip_low, 1 + clip_high] (clip-higher: arXiv 2503.14476, equation 10).
      dual_clip: c > 1 bounds the loss by c·|A| where A < 0 (arXiv 1912.09729, equation 5); None: off.
      weight_cap, weight_floor: bounds of the importance weight; None: no bound.
      weight_mode: 'truncate' moves a weight to its bound, 'mask' takes the token's loss out.
      weight_level: 'token'; 'sequence': the product over the sequence's tokens; 'geometric': their geometric mean.
      decoupled: of the losses that leave the choice, the ratio is around π_prox and π_prox/π_behav multiplies the loss.
      tau_positive, tau_negative: SAPO's temperatures.
    """

    clip_low: float = 0.2
    clip_high: float = 0.2
    dual_clip: float | None = None
    weight_cap: float | None = None
    weight_floor: float | None = None
    weight_mode: str = "truncate"
    weight_level: str = "token"
    decoupled: bool = False
    tau_positive: float = 1.0
    tau_negative: float = 1.05


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
        decoupled=section.decoupled,
        tau_positive=section.sapo_tau_positive,
        tau_negative=section.sapo_tau_negative,
    )


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Tokens:
    """What a policy loss sees of packed rows, each [rows, length].

    Attributes:
      logprobs: float32, of the policy that is trained.
      proximal: of the weights before the training step.
      behaviour: of the policy that sampled each token.
      advantages: float32.
      mask: 1 where the token is trained.
      segment_ids: int, below length + 1; sequences are told apart within a row only.
    """

    logprobs: Any
    proximal: Any
    behaviour: Any
    advantages: Any
    mask: Any
    segment_ids: Any


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TokenLoss:
    """What a policy loss says of each token.

    Attributes:
      loss: to be aggregated.
      ratio: the clipped quantity u.
      weight: π_prox/π_behav as applied (after a bound), 0 where a token is taken out; 1 for losses without a weight.
      clipped: 1 where the clip changes the loss (of CISPO and SAPO: where the ratio lies outside the band).
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


def _of_sequence(values: jax.Array, t: Tokens) -> tuple[jax.Array, jax.Array]:
    """For each token (sum of ``values`` over the unmasked tokens of its sequence, their number), [rows, length] each."""

    def row(v: jax.Array, m: jax.Array, s: jax.Array) -> tuple[jax.Array, jax.Array]:
        sums, counts = (jax.ops.segment_sum(x, s, num_segments=v.shape[0] + 1)[s] for x in (jnp.where(m > 0, v, 0.0), m))
        return sums, counts

    return jax.vmap(row)(values, (t.mask > 0).astype(values.dtype), t.segment_ids)


def sequence_mean(values: jax.Array, t: Tokens) -> jax.Array:
    """For each token the mean of ``values`` over the unmasked tokens of its sequence, [rows, length]."""
    sums, counts = _of_sequence(values, t)
    return sums / jnp.maximum(counts, 1.0)


def importance_weight(t: Tokens, s: LossSettings) -> tuple[jax.Array, jax.Array]:
    """π_prox/π_behav, bounded: truncated (TIS), or masked by token (IcePop), by sequence or by its geometric mean (MIS).

    Returns:
      (weight as applied, 1 where a bound acted), constants [rows, length].
    """
    log_weight = t.proximal - t.behaviour
    if s.weight_level == "sequence":
        log_weight = jnp.clip(_of_sequence(log_weight, t)[0], -LOG_WEIGHT_BOUND, LOG_WEIGHT_BOUND)
    elif s.weight_level == "geometric":
        log_weight = sequence_mean(log_weight, t)
    raw = jnp.exp(log_weight)
    low = 0.0 if s.weight_floor is None else s.weight_floor
    high = jnp.inf if s.weight_cap is None else s.weight_cap
    outside = (raw < low) | (raw > high)
    weight = jnp.where(outside, 0.0, raw) if s.weight_mode == "mask" else jnp.clip(raw, low, high)
    return jax.lax.stop_gradient((weight, outside.astype(raw.dtype)))


def _result(
    t: Tokens, s: LossSettings, weighted: bool, loss: jax.Array, ratio: jax.Array, clipped: jax.Array | None = None, dual: jax.Array | None = None
) -> TokenLoss:
    """Multiplies a surrogate by the importance weight, where the loss has one."""
    nothing = jnp.zeros_like(loss)
    weight, capped = importance_weight(t, s) if weighted else (jnp.ones_like(loss), nothing)
    clipped, dual = (nothing if x is None else x.astype(loss.dtype) for x in (clipped, dual))
    return TokenLoss(jnp.where(weight == 0, 0.0, weight * loss), ratio, weight, clipped, dual, capped)


def _clipped_surrogate(log_ratio: jax.Array, advantages: jax.Array, s: LossSettings) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """PPO's pessimistic loss max(-A·u, -A·clip(u)) (arXiv 1707.06347, equation 7): (loss, ratio u, clipped, dual clipped)."""
    ratio = jnp.exp(log_ratio)
    plain = -advantages * ratio
    bounded = -advantages * jnp.clip(ratio, 1.0 - s.clip_low, 1.0 + s.clip_high)
    loss, dual = jnp.maximum(plain, bounded), jnp.zeros_like(plain)
    if s.dual_clip is not None:
        limit = s.dual_clip * jnp.abs(advantages)
        dual = (limit < loss).astype(loss.dtype)
        loss = jnp.minimum(loss, limit)
    return loss, ratio, plain < bounded, dual


def _centre(t: Tokens, s: LossSettings) -> jax.Array:
    return t.proximal if s.decoupled else t.behaviour


def decoupled_ppo(t: Tokens, s: LossSettings) -> TokenLoss:
    """Decoupled PPO: π_prox/π_behav times the surrogate clipped around π_prox (arXiv 2505.24298, equation 5; arXiv 2110.00641)."""
    return _result(t, s, True, *_clipped_surrogate(t.logprobs - t.proximal, t.advantages, s))


def ppo(t: Tokens, s: LossSettings) -> TokenLoss:
    """Naive PPO: the surrogate clipped around the behaviour policy (arXiv 2505.24298, equation 2); π_prox is not used."""
    return _result(t, s, False, *_clipped_surrogate(t.logprobs - t.behaviour, t.advantages, s))


def gspo(t: Tokens, s: LossSettings) -> TokenLoss:
    """GSPO: PPO's clip on the sequence's ratio, the geometric mean of its tokens' (arXiv 2507.18071, equations 5 and 7), and the mean of its advantages."""
    log_ratio, advantages = sequence_mean(t.logprobs - _centre(t, s), t), sequence_mean(t.advantages, t)
    return _result(t, s, s.decoupled, *_clipped_surrogate(log_ratio, advantages, s))


def cispo(t: Tokens, s: LossSettings) -> TokenLoss:
    """CISPO: -sg(clip(u))·A·log π, so that a clipped token keeps a gradient (arXiv 2506.13585, equations 4 and 5)."""
    ratio = jnp.exp(t.logprobs - _centre(t, s))
    bounded = jnp.clip(ratio, 1.0 - s.clip_low, 1.0 + s.clip_high)
    return _result(t, s, s.decoupled, -jax.lax.stop_gradient(bounded) * t.advantages * t.logprobs, ratio, bounded != ratio)


def sapo(t: Tokens, s: LossSettings) -> TokenLoss:
    """SAPO: -A·(4/τ)·sigmoid(τ·(u - 1)), τ by the advantage's sign, in place of a clip (arXiv 2511.20347, equations 5 and 6)."""
    ratio = jnp.exp(t.logprobs - _centre(t, s))
    tau = jnp.where(t.advantages > 0, s.tau_positive, s.tau_negative)
    gate = 4.0 / tau * jax.nn.sigmoid(tau * (ratio - 1.0))
    return _result(t, s, s.decoupled, -t.advantages * gate, ratio, (ratio < 1.0 - s.clip_low) | (ratio > 1.0 + s.clip_high))


def m2po(t: Tokens, s: LossSettings) -> TokenLoss:
    """M2PO: -A·π/π_behav without a clip (arXiv 2510.01161); ``proximal.second_moment_filter`` takes the batch's outliers out before."""
    ratio = jnp.exp(t.logprobs - t.behaviour)
    return _result(t, s, False, -t.advantages * ratio, ratio)


def reinforce(t: Tokens, s: LossSettings) -> TokenLoss:
    """REINFORCE: -A·log π (Williams 1992); decoupled, times π_prox/π_behav."""
    return _result(t, s, s.decoupled, -t.advantages * t.logprobs, jax.lax.stop_gradient(jnp.exp(t.logprobs - _centre(t, s))))


POLICY_LOSSES: dict[str, Callable[[Tokens, LossSettings], TokenLoss]] = {
    "decoupled_ppo": decoupled_ppo,
    "ppo": ppo,
    "gspo": gspo,
    "cispo": cispo,
    "sapo": sapo,
    "m2po": m2po,
    "reinforce": reinforce,
}
"""By ``algorithm.loss``; they want 0 at masked positions, which ``policy_loss`` provides."""


def policy_loss(name: str, tokens: Tokens, settings: LossSettings) -> TokenLoss:
    """A loss of the table.

    Args:
      name: of ``POLICY_LOSSES``.
      tokens: anything at masked positions; only ``logprobs`` is differentiated.
      settings: its switches.

    Returns:
      Arrays [rows, length], 0 at masked positions.
    """
    inside = tokens.mask > 0

    def on_mask(x: Any) -> jax.Array:
        return jnp.where(inside, x, 0.0)

    proximal, behaviour, advantages = jax.lax.stop_gradient([on_mask(x) for x in (tokens.proximal, tokens.behaviour, tokens.advantages)])
    clean = Tokens(on_mask(tokens.logprobs), proximal, behaviour, advantages, inside.astype(behaviour.dtype), tokens.segment_ids)
    return jax.tree.map(on_mask, POLICY_LOSSES[name](clean, settings))
