"""From one outcome reward a sample to one advantage a token.

Invariants:
* Host functions in float64; statistics cover the whole global batch.
* Groups are named by id, never by place; a group of one gives 0.
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


def outcome_rewards(
    rewards: np.ndarray,
    mask: np.ndarray,
    behaviour: np.ndarray | None = None,
    reference: np.ndarray | None = None,
    kl_coefficient: float = 0.0,
) -> np.ndarray:
    """Puts each sample's reward on its last trained token, and a KL penalty on all.

    Args:
      rewards: [n], scaled.
      mask: [n, t].
      behaviour, reference: log-probs [n, t]; needed if ``kl_coefficient`` is not 0.
      kl_coefficient: weight of -clip(behaviour - reference, ±10) on each token.

    Returns:
      float64 [n, t].
    """
    mask = np.asarray(mask) > 0
    result = np.zeros(mask.shape)
    if kl_coefficient and behaviour is not None and reference is not None:
        result = -kl_coefficient * np.clip(np.where(mask, behaviour, 0.0) - np.where(mask, reference, 0.0), -10.0, 10.0)
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


def _tokens(rewards: np.ndarray, mask: np.ndarray, gamma: float, lam: float) -> np.ndarray:
    return gae(outcome_rewards(rewards, mask), mask, gamma, lam)[0]


def _of_group(method: Callable[[np.ndarray, np.ndarray], np.ndarray]) -> Callable[..., np.ndarray]:
    def advantages(rewards: np.ndarray, group_ids: np.ndarray, mask: np.ndarray, gamma: float = 1.0, lam: float = 1.0) -> np.ndarray:
        return _tokens(method(rewards, group_ids), mask, gamma, lam)

    advantages.__doc__ = f"{method.__doc__} On the last token, then discounted back by ``gae``."
    return advantages


def batch(rewards: np.ndarray, group_ids: np.ndarray, mask: np.ndarray, gamma: float = 1.0, lam: float = 1.0) -> np.ndarray:
    """The paper's: ``gae`` of the outcome, then (A - mean)/(std + ε) over all trained tokens of the batch (arXiv 2505.24298, table 3)."""
    del group_ids
    return normalise(_tokens(rewards, mask, gamma, lam), mask)


ADVANTAGES: dict[str, Callable[..., np.ndarray]] = {
    "batch": batch,
    "grpo": _of_group(grpo),
    "dr_grpo": _of_group(dr_grpo),
    "rloo": _of_group(rloo),
    "lite_ppo": _of_group(lite_ppo),
}
"""By ``algorithm.advantage``. All take (scaled rewards [n], group ids [n], mask [n, t], gamma, lam) and give float64 [n, t]."""
