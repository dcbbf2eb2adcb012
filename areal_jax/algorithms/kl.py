"""Estimators of KL(π ‖ π_ref) from one sampled token (J. Schulman, "Approximating KL Divergence", 2020).

Invariants:
* Arrays of the module ``xp`` go in and come out: jax.numpy in the loss, numpy in the reward.
* d = log π - log π_ref of the sampled token. An estimate is clipped to ±10, and has no gradient beyond.
* All three are 0 at d = 0. Under tokens of π itself k1 and k3 have the KL as mean, k2 nearly.

As a loss k1's expected gradient is 0, k2's is that of the KL, and k3's that of the KL the other way round; in the reward k1 is the unbiased one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp

BOUND = 10.0
"""Of an estimate."""
FINITE = 20.0
"""Of d, so that its exponential is finite, and so is the gradient that the bound stops."""
SERIES_BELOW = 0.05
"""Where float32's exp(-d) - 1 + d has lost its digits, four terms of its series hold them."""


def k1(d: Any, xp: Any = jnp) -> Any:
    """d."""
    del xp
    return d


def k2(d: Any, xp: Any = jnp) -> Any:
    """d²/2."""
    del xp
    return d * d / 2.0


def k3(d: Any, xp: Any = jnp) -> Any:
    """exp(-d) - 1 + d (arXiv 2402.03300, equation 4)."""
    series = d * d / 2.0 * (1.0 - d / 3.0 * (1.0 - d / 4.0 * (1.0 - d / 5.0)))
    return xp.where(xp.abs(d) < SERIES_BELOW, series, xp.expm1(-d) + d)


KL_ESTIMATORS: dict[str, Callable[..., Any]] = {"k1": k1, "k2": k2, "k3": k3}
"""By ``algorithm.kl_estimator``."""


def reference_kl(name: str, logprobs: Any, reference: Any, mask: Any, xp: Any = jnp) -> Any:
    """The estimate of each token, within ±10.

    Args:
      name: of ``KL_ESTIMATORS``.
      logprobs, reference: [rows, length], of the policy and of the reference; anything at masked positions.
      mask: [rows, length].
      xp: the arrays' module.

    Returns:
      [rows, length], 0 at masked positions.
    """
    d = xp.where(mask > 0, logprobs, 0.0) - xp.where(mask > 0, reference, 0.0)
    return xp.clip(KL_ESTIMATORS[name](xp.clip(d, -FINITE, FINITE), xp), -BOUND, BOUND)
