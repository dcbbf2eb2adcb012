"""The schedule against brute force over all batches, and the example of its derivation."""

from __future__ import annotations

import itertools
import random

import pytest

from areal_jax.controller import Candidate, plan_step


def feasible(left: list[Candidate], step: int, groups_per_step: int, eta: int) -> bool:
    """Whether groups that all become ready fit into the steps after this one: fill them in the order of their deadlines."""
    places = itertools.chain.from_iterable(itertools.repeat(i, groups_per_step) for i in itertools.count(step + 1))
    return all(place <= c.version + eta for c, place in zip(sorted(left, key=lambda c: c.version), places, strict=False))


@pytest.mark.parametrize("eta", [0, 1, 2, 3])
@pytest.mark.parametrize("groups_per_step", [1, 2, 3])
def test_a_step_is_taken_exactly_when_some_batch_leaves_a_feasible_rest(groups_per_step: int, eta: int):
    rng, taken, refused = random.Random(groups_per_step * 10 + eta), 0, 0
    while taken + refused < 200:
        step = rng.randint(eta, eta + 3)
        outstanding = [Candidate(g, rng.randint(step - eta, step), rng.random() < 0.6) for g in range(rng.randint(1, min(8, (eta + 1) * groups_per_step)))]
        if not feasible(outstanding, step - 1, groups_per_step, eta):
            continue  # admission and the steps before exclude it
        plan = plan_step(outstanding, step=step, groups_per_step=groups_per_step, max_staleness=eta)
        ready = sorted((c for c in outstanding if c.ready), key=lambda c: (c.version, c.group_id))
        assert list(plan.batch) == [c.group_id for c in ready[:groups_per_step]], "oldest first"
        if len(ready) < groups_per_step:
            continue
        exists = any(
            feasible([c for c in outstanding if c not in batch], step, groups_per_step, eta) for batch in itertools.combinations(ready, groups_per_step)
        )
        assert (plan.missing == 0) == exists
        taken, refused = taken + exists, refused + (not exists)
        if plan.missing:
            assert len(plan.late) >= plan.missing
            assert all(not c.ready for c in outstanding if c.group_id in plan.late)
    assert taken > 20 and (refused > 10 or eta == 0)


def test_due_is_the_number_that_must_be_in_the_step():
    """Derived by hand: B = 2, η = 2, step 2: three groups of version 1 (deadline 3) have two places in step 3, so one is due now."""
    outstanding = [Candidate(0, 1, True), Candidate(1, 1, False), Candidate(2, 1, False), Candidate(3, 2, True), Candidate(4, 2, True)]
    plan = plan_step(outstanding, step=2, groups_per_step=2, max_staleness=2)
    assert (plan.batch, plan.due, plan.missing, plan.late) == ((0, 3), 1, 0, ())


def test_the_hole_of_admission_alone():
    """B = 1, η = 2: in step 1 the fast group 4 may not overtake 2 and 3, both of version 0, which have one place after it."""
    outstanding = [Candidate(2, 0, False), Candidate(3, 0, False), Candidate(4, 1, True)]
    plan = plan_step(outstanding, step=1, groups_per_step=1, max_staleness=2)
    assert (plan.batch, plan.due, plan.missing, plan.late) == ((4,), 1, 1, (2, 3))
    assert plan_step(outstanding, step=1, groups_per_step=1, max_staleness=None).missing == 0


def test_synchronous_means_every_group_is_due():
    outstanding = [Candidate(g, 5, g != 2) for g in range(4)]
    plan = plan_step(outstanding, step=5, groups_per_step=4, max_staleness=0)
    assert (plan.due, plan.missing, plan.late) == (4, 1, (2,))
