"""What is made of the proximal policy's log-probs beside the losses: an approximation that needs no forward pass, and M2PO's filter.

Invariant: constants go in and come out; nothing here carries a gradient.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np


def log_linear(behaviour: Any, current: Any, versions: Any, current_version: Any, proximal_version: Any) -> Any:
    """log π_prox between log π_behav and log π by a token's age (A-3PO, arXiv 2512.06547).

    log π_prox ≈ log π_behav + α·(log π - log π_behav), α = (v_prox - v)/(v_current - v) within 0 and 1. A step that makes version i + 1 out of i has
    v_prox = i and v_current = i + 1: a token of the trainer's own version has its π_behav as π_prox, one that is a step old the geometric middle.

    Args:
      behaviour, current: log-probs, of any one shape.
      versions: of the policy that sampled each token; below 0: unknown, α = 0.
      current_version, proximal_version: see above.

    Returns:
      Log-probs of that shape.
    """
    known = (versions >= 0) & (versions < current_version)
    share = (proximal_version - versions) / jnp.where(known, current_version - versions, 1)
    return behaviour + jnp.where(known, jnp.clip(share, 0.0, 1.0), 0.0) * (current - behaviour)


def second_moment_filter(behaviour: np.ndarray, proximal: np.ndarray, threshold: float) -> np.ndarray:
    """M2PO's trust region (arXiv 2510.01161): drops the largest (log π_prox/π_behav)² until the mean of the rest is below a threshold.

    The paper takes π of the moment; here π_prox, so that one filter serves all minibatches of a step. On the host, in float64.

    Args:
      behaviour, proximal: log-probs [n] of all trained tokens of a step.
      threshold: of the mean second moment.

    Returns:
      bool [n], True for what is kept: at least one, the least off, where there is any.
    """
    moments = np.square(np.asarray(behaviour, np.float64) - np.asarray(proximal, np.float64))
    order = np.argsort(moments, kind="stable")
    means = np.cumsum(moments[order]) / np.arange(1, len(moments) + 1)
    kept = np.zeros(len(moments), bool)
    kept[order[: max(1, int(np.count_nonzero(means < threshold)))]] = True
    return kept
