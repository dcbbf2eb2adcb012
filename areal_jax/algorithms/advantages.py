"""From one outcome reward a sample to one advantage a token.

Invariants:
* Host functions in float64; statistics cover the whole global batch.
* Groups are named by id, never by place, and need not be whole. A group of one, and one of equal rewards, gives 0 wherever its own mean is the baseline.
* What is divided by is a standard deviation plus ``EPSILON``; equal values have their differences, 0, divided by it.
* Masked positions give 0 and their contents do not matter.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

EPSILON = 1e-5
"""Added to standard deviations."""


def scale_rewards(rewards: np.ndarray, scale: float, bias: float, clip: float) -> np.ndarray:
    """clip((reward + bias)·scale, ±clip), float64 [n]. The paper's ±5 is bias -0.5, scale 10 of a reward of 0 or 1 (arXiv 2505.24298, table 3)."""
    return np.clip((np.asarray(rewards, np.float64) + bias) * scale, -clip, clip)


def overlong_penalty(lengths: np.ndarray, truncated: np.ndarray, longest: int, buffer: int, factor: float) -> np.ndarray:
    """Soft penalty of long responses (DAPO, arXiv 2503.14476, equation 13), to be added to raw rewards.

    Args:
      lengths: [n], generated tokens, as the sampler counted them.
      truncated: [n], the sampler's flag.
      longest: length limit of a response.
      buffer: tokens before the limit over which the penalty rises linearly.
      factor: the whole penalty.

    Returns:
      float64 [n], from 0 to -factor; a truncated response has the whole of it, whatever its length.
    """
    past = (np.asarray(lengths, np.float64) - (longest - buffer)) / max(buffer, 1)
    return -factor * np.where(np.asarray(truncated, bool), 1.0, np.clip(past, 0.0, 1.0))


def outcome_rewards(rewards: np.ndarray, mask: np.ndarray, penalties: np.ndarray | None = None) -> np.ndarray:
    """Puts each sample's reward on its last trained token, and subtracts each token's own penalty.

    Args:
      rewards: [n], scaled.
      mask: [n, t].
      penalties: [n, t], such as a coefficient times ``kl.reference_kl``; None: none.

    Returns:
      float64 [n, t].
    """
    mask = np.asarray(mask) > 0
    result = np.zeros(mask.shape) if penalties is None else -np.where(mask, penalties, 0.0).astype(np.float64)
    filled = mask.any(1)
    last = mask.shape[1] - 1 - np.argmax(mask[:, ::-1], 1)
    result[filled, last[filled]] += np.asarray(rewards, np.float64)[filled]
    return result


def gae(
    rewards: np.ndarray, mask: np.ndarray, gamma: float, lam: float, values: np.ndarray | None = None, bootstrap: np.ndarray | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """Generalised advantage estimation over the trained tokens (arXiv 1506.02438); masked tokens are skipped and take no discount step.

    Args:
      rewards: [n, t], a token's own.
      mask: [n, t].
      gamma: discount.
      lam: λ.
      values: [n, t], value of the state before each token; None: no critic, 0.
      bootstrap: [n], value of the last state of samples cut off by the length limit; None: 0.

    Returns:
      (advantages, returns), float64 [n, t].
    """
    mask = np.asarray(mask) > 0
    rewards = np.where(mask, rewards, 0.0).astype(np.float64)
    values = np.zeros(mask.shape) if values is None else np.where(mask, values, 0.0).astype(np.float64)
    next_value = np.zeros(mask.shape[0]) if bootstrap is None else np.asarray(bootstrap, np.float64).copy()
    carried = np.zeros(mask.shape[0])
    advantages = np.zeros(mask.shape)
    for t in range(mask.shape[1] - 1, -1, -1):
        delta = rewards[:, t] + gamma * next_value - values[:, t] + gamma * lam * carried
        advantages[:, t] = np.where(mask[:, t], delta, 0.0)
        carried = np.where(mask[:, t], delta, carried)
        next_value = np.where(mask[:, t], values[:, t], next_value)
    return advantages, np.where(mask, advantages + values, 0.0)


def normalise(
    values: np.ndarray,
    mask: np.ndarray,
    group_ids: np.ndarray | None = None,
    std_level: str | None = "group",
    unbiased: bool = True,
    epsilon: float = EPSILON,
) -> np.ndarray:
    """Centres values on their group's mean and divides by a standard deviation around it.

    Args:
      values, mask: [n, t]; all unmasked values of a group are pooled.
      group_ids: [n], the group of each row; None: all rows are one group.
      std_level: 'group'; 'batch', over all values around their own group's mean; or None, no division.
      unbiased: divide the sum of squares by count - 1.
      epsilon: added to the standard deviation.

    Returns:
      float64 [n, t].
    """
    mask = np.asarray(mask) > 0
    values = np.where(mask, values, 0.0).astype(np.float64)
    ids = np.zeros(len(values), np.int64) if group_ids is None else np.unique(np.asarray(group_ids), return_inverse=True)[1]
    groups = int(ids.max(initial=-1)) + 1

    def total(x: np.ndarray) -> np.ndarray:
        return np.bincount(ids, x.sum(1), groups)

    counts = total(mask)
    centred = np.where(mask, values - (total(values) / np.maximum(counts, 1))[ids][:, None], 0.0)
    if std_level is None:
        return centred
    squares = total(np.square(centred))
    if std_level == "batch":
        squares, counts = np.full(groups, squares.sum()), np.full(groups, counts.sum())
    spread = np.sqrt(squares / np.maximum(counts - unbiased, 1))
    return centred / (np.where(counts <= 1, 1.0, spread) + epsilon)[ids][:, None]


def _per_sample(rewards: np.ndarray, group_ids: np.ndarray, std_level: str | None) -> np.ndarray:
    column = np.asarray(rewards, np.float64)[:, None]
    return normalise(column, np.ones_like(column), group_ids, std_level)[:, 0]


def grpo(rewards: np.ndarray, group_ids: np.ndarray) -> np.ndarray:
    """(r - group mean)/(group std + ε) (arXiv 2402.03300)."""
    return _per_sample(rewards, group_ids, "group")


def dr_grpo(rewards: np.ndarray, group_ids: np.ndarray) -> np.ndarray:
    """r - group mean (arXiv 2503.20783)."""
    return _per_sample(rewards, group_ids, None)


def rloo(rewards: np.ndarray, group_ids: np.ndarray) -> np.ndarray:
    """r - mean of the group's other rewards (arXiv 2402.14740)."""
    _, ids, counts = np.unique(np.asarray(group_ids), return_inverse=True, return_counts=True)
    size = counts[ids]
    return dr_grpo(rewards, group_ids) * np.where(size > 1, size / np.maximum(size - 1, 1), 0.0)


def lite_ppo(rewards: np.ndarray, group_ids: np.ndarray) -> np.ndarray:
    """(r - group mean)/(std over the batch around the group means + ε) (arXiv 2508.08221)."""
    return _per_sample(rewards, group_ids, "batch")


def _tokens(rewards: np.ndarray, mask: np.ndarray, gamma: float, lam: float, penalties: np.ndarray | None) -> np.ndarray:
    return gae(outcome_rewards(rewards, mask, penalties), mask, gamma, lam)[0]


def _of_group(method: Callable[[np.ndarray, np.ndarray], np.ndarray]) -> Callable[..., np.ndarray]:
    def advantages(
        rewards: np.ndarray, group_ids: np.ndarray, mask: np.ndarray, gamma: float = 1.0, lam: float = 1.0, penalties: np.ndarray | None = None
    ) -> np.ndarray:
        return _tokens(method(rewards, group_ids), mask, gamma, lam, penalties)

    advantages.__doc__ = f"{method.__doc__} On the last token, then discounted back by ``gae``."
    return advantages


def batch(
    rewards: np.ndarray, group_ids: np.ndarray, mask: np.ndarray, gamma: float = 1.0, lam: float = 1.0, penalties: np.ndarray | None = None
) -> np.ndarray:
    """AReaL's: ``gae`` of the outcome, then (A - mean)/(std + ε) over all trained tokens of the batch (arXiv 2505.24298, table 3)."""
    del group_ids
    return normalise(_tokens(rewards, mask, gamma, lam, penalties), mask)


def reinforce_pp(
    rewards: np.ndarray, group_ids: np.ndarray, mask: np.ndarray, gamma: float = 1.0, lam: float = 1.0, penalties: np.ndarray | None = None
) -> np.ndarray:
    """REINFORCE++: the discounted sum of rewards and KL penalties, normalised over all trained tokens of the batch (arXiv 2501.03262).

    Without penalties it is ``batch``: the two came to the same estimate from different sides.
    """
    return batch(rewards, group_ids, mask, gamma, lam, penalties)


def reinforce_pp_baseline(
    rewards: np.ndarray, group_ids: np.ndarray, mask: np.ndarray, gamma: float = 1.0, lam: float = 1.0, penalties: np.ndarray | None = None
) -> np.ndarray:
    """REINFORCE++ with a baseline: r - group mean, then normalised over all trained tokens of the batch (arXiv 2501.03262)."""
    return batch(dr_grpo(rewards, group_ids), group_ids, mask, gamma, lam, penalties)


ADVANTAGES: dict[str, Callable[..., np.ndarray]] = {
    "batch": batch,
    "grpo": _of_group(grpo),
    "dr_grpo": _of_group(dr_grpo),
    "rloo": _of_group(rloo),
    "reinforce_pp": reinforce_pp,
    "reinforce_pp_baseline": reinforce_pp_baseline,
    "lite_ppo": _of_group(lite_ppo),
}
"""By ``algorithm.advantage``. All take (scaled rewards [n], group ids [n], mask [n, t], gamma, lam, penalties [n, t] or None) and give float64 [n, t].

A critic's estimate is ``gae`` with its values; it needs the value head that the trainer does not have."""
