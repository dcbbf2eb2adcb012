"""How the losses of tokens become one number.

Invariants:
* The loss of a minibatch is Σ weight·loss over its tokens ÷ Σ share over its samples: both are known before anything is packed, so that neither
  micro-batches nor devices enter into it.
* A sample without tokens has no share but in 'constant'.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

Lengths = np.ndarray


def _token(lengths: Lengths, ids: np.ndarray, longest: int) -> tuple[np.ndarray, np.ndarray]:
    """Mean over all tokens (DAPO, arXiv 2503.14476, equation 12)."""
    del ids, longest
    return np.ones(len(lengths)), lengths


def _sequence(lengths: Lengths, ids: np.ndarray, longest: int) -> tuple[np.ndarray, np.ndarray]:
    """Mean over samples of each one's token mean (GRPO, arXiv 2402.03300, equation 3)."""
    del ids, longest
    return 1.0 / np.maximum(lengths, 1.0), (lengths > 0).astype(np.float64)


def _prompt(lengths: Lengths, ids: np.ndarray, longest: int) -> tuple[np.ndarray, np.ndarray]:
    """Mean over groups of each one's token mean (ScaleRL, arXiv 2510.13786)."""
    del longest
    group = np.unique(ids, return_inverse=True)[1]
    tokens, filled = np.bincount(group, lengths)[group], np.bincount(group, lengths > 0)[group]
    return 1.0 / np.maximum(tokens, 1.0), (lengths > 0) / np.maximum(filled, 1.0)


def _constant(lengths: Lengths, ids: np.ndarray, longest: int) -> tuple[np.ndarray, np.ndarray]:
    """Sum over tokens ÷ (samples · longest response), so that no length enters (Dr. GRPO, arXiv 2503.20783)."""
    del ids
    return np.ones(len(lengths)), np.full(len(lengths), float(longest))


AGGREGATIONS: dict[str, Callable[[Lengths, np.ndarray, int], tuple[np.ndarray, np.ndarray]]] = {
    "token": _token,
    "sequence": _sequence,
    "prompt": _prompt,
    "constant": _constant,
}
"""By ``algorithm.aggregation``."""


def loss_weights(name: str, lengths: np.ndarray, group_ids: np.ndarray, longest: int) -> tuple[np.ndarray, np.ndarray]:
    """What each sample's tokens weigh in the loss, and what the sample adds to its denominator.

    Args:
      name: of ``AGGREGATIONS``.
      lengths: [n], trained tokens of each sample.
      group_ids: [n]; a group's samples are all here.
      longest: limit of a response, in tokens.

    Returns:
      (weights, shares), float64 [n] each.
    """
    return AGGREGATIONS[name](np.asarray(lengths, np.float64), np.asarray(group_ids), longest)
