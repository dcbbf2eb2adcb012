"""Intervals against the t distribution's published quantiles, and verdicts on results that are known to be so."""

import numpy as np
import pytest
from scripted_sampler import result

from areal_jax.experiments.intervals import interval, paired, verdicts
from areal_jax.experiments.results import CellResult
from areal_jax.experiments.study import Cell

QUANTILES = {2: 12.7062, 3: 4.3027, 5: 2.7764, 10: 2.2622, 31: 2.0423}
"""t(0.975, n − 1) by n."""
NOISE = (0.0, 0.02, -0.02, 0.01, -0.01)


def study(means):
    """Five seeds of cells with these late accuracies by (loss, η)."""
    cells = {Cell(loss, eta, seed): mean + NOISE[seed] for (loss, eta), mean in means.items() for seed in range(5)}
    return {cell: CellResult(cell, {}, result([0.3, 0.5, value, value])) for cell, value in cells.items()}


def late(r):
    return r.late


@pytest.mark.parametrize("n", QUANTILES)
def test_intervals_are_students(n):
    values = np.random.default_rng(n).normal(size=n)
    found = interval(values.tolist())
    assert found.mean == pytest.approx(values.mean()) and found.n == n
    assert found.half == pytest.approx(QUANTILES[n] * values.std(ddof=1) / np.sqrt(n), rel=1e-4)


def test_one_seed_has_no_interval():
    assert interval([0.5]).half is None and str(interval([0.5])) == "0.500" and interval([0.5]).place(0.5) == "within"


def test_the_baseline_holds_where_its_means_lie_within():
    found = study({("decoupled_ppo", 0): 0.80, ("decoupled_ppo", 4): 0.81, ("decoupled_ppo", 8): 0.805, ("decoupled_ppo", 16): 0.5})
    lines = verdicts(found, late)
    assert lines[0].startswith("decoupled_ppo at η ≤ 8 lies within the interval of η = 0 (0.800 ± 0.020): yes")
    assert lines[1].startswith("decoupled_ppo falls behind its own η = 0 at η = 16 (-0.300 ± 0.000)")


def test_the_baseline_does_not_hold_where_one_lies_outside():
    lines = verdicts(study({("decoupled_ppo", 0): 0.80, ("decoupled_ppo", 4): 0.83, ("decoupled_ppo", 8): 0.7}), late)
    assert lines[0].endswith("no: η = 4 lies above it with 0.830; η = 8 lies below it with 0.700")


def test_other_losses_are_set_against_themselves_and_the_baseline():
    means = {("decoupled_ppo", 0): 0.80, ("decoupled_ppo", 4): 0.80, ("ppo", 0): 0.80, ("ppo", 4): 0.60}
    lines = verdicts(study(means), late)
    assert "ppo falls behind its own η = 0 at η = 4 (-0.200 ± 0.000)" in lines
    assert "ppo falls behind decoupled_ppo at the same η at η = 4 (-0.200 ± 0.000)" in lines


def test_where_nothing_falls_behind_the_differences_are_shown():
    lines = verdicts(study({("decoupled_ppo", 0): 0.80, ("ppo", 0): 0.80, ("ppo", 4): 0.81}), late)
    assert "ppo falls behind its own η = 0 at no η (differences by η, seed by seed: 4: +0.010 ± 0.000)" in lines


@pytest.mark.parametrize(
    ("means", "words"),
    [({("ppo", 4): 0.8}, "no run at η = 0"), ({("decoupled_ppo", 0): 0.8}, "undecided, as there is no η from 1 to 8")],
    ids=["nothing to compare", "nothing in reach"],
)
def test_what_cannot_be_said_is_not_said(means, words):
    assert words in verdicts(study(means), late)[0]


def test_differences_are_taken_over_common_seeds():
    found = study({("ppo", 0): 0.5, ("ppo", 4): 0.6})
    first = {cell.seed: r for cell, r in found.items() if cell.eta == 4 and cell.seed < 3}
    second = {cell.seed: r for cell, r in found.items() if cell.eta == 0 and cell.seed > 0}
    assert paired(first, second, late).n == 2 and paired(first, {}, late) is None


def test_late_and_overall_are_means_of_evaluations():
    r = CellResult(Cell("ppo", 0, 0), {}, result([0.1, 0.2, 0.4, 0.6, 0.8]))
    assert (r.before, r.final, r.late, r.overall) == (0.1, 0.8, 0.8, pytest.approx(0.5))
