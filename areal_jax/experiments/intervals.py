"""Means over seeds with their 95 % t-intervals, and what they say of the bound on staleness.

Invariants:
* An interval is of the mean over seeds: mean ± t(0.975, n − 1)·s/√n; of one seed there is none.
* Differences are taken seed by seed: both runs start from the same policy and see the same prompts.
"""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Callable, Mapping, Sequence

from scipy.special import stdtrit

from areal_jax.experiments.results import CellResult
from areal_jax.experiments.study import Cell

BASELINE = "decoupled_ppo"
"""The loss that the others are set against."""
BOUND = 8
"""Greatest η for which the original reports no loss (arXiv 2505.24298, Table 2)."""


@dataclasses.dataclass(frozen=True)
class Interval:
    """Attributes:
    mean: over ``n`` seeds.
    half: half the width of the 95 % t-interval; None for one seed.
    n: seeds.
    """

    mean: float
    half: float | None
    n: int

    @property
    def low(self) -> float:
        return self.mean - (self.half or 0.0)

    @property
    def high(self) -> float:
        return self.mean + (self.half or 0.0)

    def __str__(self) -> str:
        return f"{self.mean:.3f}" + ("" if self.half is None else f" ± {self.half:.3f}")

    def signed(self) -> str:
        """As a difference."""
        return f"{self.mean:+.3f}" + ("" if self.half is None else f" ± {self.half:.3f}")

    def place(self, value: float) -> str:
        """Where a value lies: 'within', 'above' or 'below'."""
        return "below" if value < self.low else "above" if value > self.high else "within"


def interval(values: Sequence[float]) -> Interval:
    """Mean and 95 % t-interval."""
    n = len(values)
    half = None if n < 2 else float(stdtrit(n - 1, 0.975)) * statistics.stdev(values) / math.sqrt(n)
    return Interval(statistics.fmean(values), half, n)


Measure = Callable[[CellResult], float]


def by_seed(results: Mapping[Cell, CellResult], loss: str, eta: int) -> dict[int, CellResult]:
    """The cells of a loss and an η, by seed."""
    return {cell.seed: results[cell] for cell in sorted(results) if (cell.loss, cell.eta) == (loss, eta)}


def axes(results: Mapping[Cell, CellResult]) -> tuple[list[str], list[int]]:
    """(losses, the baseline first; η values, rising) that have a cell."""
    losses = sorted({cell.loss for cell in results}, key=lambda loss: (loss != BASELINE, loss))
    return losses, sorted({cell.eta for cell in results})


def paired(first: Mapping[int, CellResult], second: Mapping[int, CellResult], measure: Measure) -> Interval | None:
    """``first`` minus ``second`` over the seeds that both have; None if there is none."""
    common = sorted(first.keys() & second.keys())
    return interval([measure(first[seed]) - measure(second[seed]) for seed in common]) if common else None


def verdicts(results: Mapping[Cell, CellResult], measure: Measure) -> list[str]:
    """What the cells say, a sentence each: whether the baseline holds to η ≤ ``BOUND``, and where each loss falls behind."""
    losses, etas = axes(results)
    lines = []
    for loss in losses:
        synchronous = by_seed(results, loss, 0)
        if not synchronous:
            lines.append(f"{loss}: no run at η = 0, so nothing to compare with")
            continue
        at_zero = interval([measure(result) for result in synchronous.values()])
        if loss == BASELINE:
            lines.append(_within(results, at_zero, [eta for eta in etas if 0 < eta <= BOUND], measure))
        lines.append(_behind(loss, "its own η = 0", [(eta, paired(by_seed(results, loss, eta), synchronous, measure)) for eta in etas if eta]))
        if loss != BASELINE:
            against = [(eta, paired(by_seed(results, loss, eta), by_seed(results, BASELINE, eta), measure)) for eta in etas]
            lines.append(_behind(loss, f"{BASELINE} at the same η", against))
    return lines


def _within(results: Mapping[Cell, CellResult], at_zero: Interval, etas: Sequence[int], measure: Measure) -> str:
    if at_zero.half is None or not etas:
        return f"{BASELINE} at η ≤ {BOUND} lies within the interval of η = 0: undecided, as there is " + ("one seed" if etas else f"no η from 1 to {BOUND}")
    means = {eta: interval([measure(r) for r in by_seed(results, BASELINE, eta).values()]).mean for eta in etas if by_seed(results, BASELINE, eta)}
    places = {eta: at_zero.place(mean) for eta, mean in means.items()}
    outside = "; ".join(f"η = {eta} lies {place} it with {means[eta]:.3f}" for eta, place in places.items() if place != "within")
    return f"{BASELINE} at η ≤ {BOUND} lies within the interval of η = 0 ({at_zero}): " + (f"no: {outside}" if outside else "yes")


def _behind(loss: str, whom: str, differences: Sequence[tuple[int, Interval | None]]) -> str:
    known = [(eta, d) for eta, d in differences if d is not None and d.half is not None]
    if not known:
        return f"{loss} against {whom}: undecided, as there are not two seeds"
    behind = [f"η = {eta} ({d.signed()})" for eta, d in known if d.high < 0]
    shown = ", ".join(f"{eta}: {d.signed()}" for eta, d in known)
    return f"{loss} falls behind {whom} at " + (", ".join(behind) if behind else f"no η (differences by η, seed by seed: {shown})")
