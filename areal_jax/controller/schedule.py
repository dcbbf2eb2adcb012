"""Consumption: which groups a training step takes (earliest deadline first).

Admission alone does not bound the age of what is trained: with B = 1, η = 2, groups 1 to 3 admitted at version 0 and group 4 at version 1, a
fast group 4 may take step 1, and then 2 and 3 both reach their last step, 2, with one place. So a step is taken only if what it leaves stays feasible.

Symbols: step i takes B groups; group g must be trained by step v(g) + η, its deadline; c_k groups have a deadline ≤ i + k.

Invariants:
* What a chosen batch leaves is feasible: for every k ≥ 1, at most k·B of the remaining groups have a deadline ≤ i + k; none has a deadline ≤ i.
  Equivalently the batch holds at least c_k − k·B groups with a deadline ≤ i + k, for every k ≥ 0.
* Ready groups are taken oldest first, by (v(g), group id). No other choice of B ready groups could be feasible when this one is not.
* If admission held equation 3, a batch of the oldest B is always feasible once all groups are ready: waiting ends.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from areal_jax.controller.answers import StalenessError
from areal_jax.types import TrainingBatch


@dataclasses.dataclass(frozen=True)
class Candidate:
    """One outstanding group: its id, v(g), and whether all its samples are finished and rewarded."""

    group_id: int
    version: int
    ready: bool


@dataclasses.dataclass(frozen=True)
class Plan:
    """What step i may do.

    Attributes:
      batch: ids of the oldest ready groups, at most B.
      due: max(0, max_k(c_k − k·B)), groups that must be in this step.
      missing: how many of ``late`` have to be ready, or gone, before the batch leaves a feasible rest; 0: it does now.
      late: the unready groups among which the missing ones are, oldest first.
    """

    batch: tuple[int, ...]
    due: int
    missing: int
    late: tuple[int, ...]


def plan_step(candidates: Sequence[Candidate], *, step: int, groups_per_step: int, max_staleness: int | None) -> Plan:
    """Chooses the groups of a step and says whether the staleness bound allows them.

    Args:
      candidates: all outstanding groups, ready or not, in any order.
      step: i, the step about to be trained (the trainer's version).
      groups_per_step: B.
      max_staleness: η; None: no deadlines, nothing is ever due.

    Returns:
      The plan. The step can be trained if ``len(batch) == B`` and ``missing == 0``.
    """
    ordered = sorted(candidates, key=lambda c: (c.version, c.group_id))
    chosen = [c for c in ordered if c.ready][:groups_per_step]
    batch = tuple(c.group_id for c in chosen)
    if max_staleness is None:
        return Plan(batch, 0, 0, ())
    due, first_broken = 0, None
    for k in sorted({max(0, c.version + max_staleness - step) for c in ordered}):
        newest = step + k - max_staleness
        needed = sum(c.version <= newest for c in ordered) - k * groups_per_step
        due = max(due, needed)
        missing = needed - sum(c.version <= newest for c in chosen)
        if missing > 0 and first_broken is None:
            first_broken = missing, tuple(c.group_id for c in ordered if c.version <= newest and not c.ready)
    missing, late = first_broken or (0, ())
    return Plan(batch, due, missing, late)


def check_feasible(plan: Plan, *, step: int, groups_per_step: int) -> None:
    """Raises StalenessError if more groups are due than can ever be ready in the step, so that waiting for them would not end."""
    if plan.missing > len(plan.late):
        raise StalenessError(
            f"at most {groups_per_step} groups may be due in a step; {plan.due} are at step {step}, and no wait can help; "
            "this is a defect of the scheduler: resume from the last checkpoint and report this"
        )


def check_age(batch: TrainingBatch, max_staleness: int) -> None:
    """Raises StalenessError if a token of the batch is older than η at the batch's step."""
    for group in batch.groups:
        if batch.step - group.version > max_staleness:
            raise StalenessError(
                f"no token is trained more than η = {max_staleness} versions old; group {group.group_id} has one of version {group.version} at step "
                f"{batch.step}; this is a defect of the scheduler: resume from the last checkpoint and report this"
            )
