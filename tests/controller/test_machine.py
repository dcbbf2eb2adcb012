"""The controller's invariants over schedules that hypothesis invents, and proof that the same machine catches broken controllers."""

from __future__ import annotations

import contextlib
import dataclasses
import random

import pytest
from controller_world import Setup, World, random_event
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule, run_state_machine_as_test

from areal_jax.controller import Controller, ControllerError, LedgerError
from areal_jax.controller.groups import Group
from areal_jax.types import TrainingBatch

PICK = st.integers(0, 10**6)


class Machine(RuleBasedStateMachine):
    controller_class: type[Controller] = Controller

    @initialize(
        setup=st.builds(
            Setup,
            groups_per_step=st.integers(1, 4),
            group_size=st.integers(1, 3),
            max_staleness=st.sampled_from([0, 1, 2, 4, None]),
            on_overdue=st.sampled_from(["wait", "wait", "drop", "keep"]),
            max_concurrent_groups=st.sampled_from([None, None, 4]),
            total_steps=st.sampled_from([None, None, 3]),
            refills_per_step=st.sampled_from([0, 0, 2, 9]),
        )
    )
    def start(self, setup: Setup) -> None:
        if setup.group_size < 2:
            setup = dataclasses.replace(setup, refills_per_step=0)
        self.world = World(setup, self.controller_class)

    @rule(count=st.sampled_from([1, 2, 20]))
    def admit(self, count: int) -> None:
        self.world.admit(count)

    @precondition(lambda self: self.world.unfinished())
    @rule(pick=PICK, count=st.integers(1, 3))
    def generate(self, pick: int, count: int) -> None:
        keys = self.world.unfinished()
        self.world.generate(*keys[pick % len(keys)], count)

    @precondition(lambda self: self.world.unfinished())
    @rule(pick=PICK)
    def finish(self, pick: int) -> None:
        keys = self.world.unfinished()
        self.world.finish(*keys[pick % len(keys)])

    @precondition(lambda self: self.world.unrewarded())
    @rule(pick=PICK)
    def reward(self, pick: int) -> None:
        keys = self.world.unrewarded()
        self.world.reward(*keys[pick % len(keys)])

    @precondition(lambda self: self.world.live)
    @rule(pick=PICK)
    def complete(self, pick: int) -> None:
        groups = sorted(self.world.live, reverse=True)
        self.world.complete(groups[pick % len(groups)])

    @precondition(lambda self: self.world.live)
    @rule(pick=PICK)
    def drop(self, pick: int) -> None:
        groups = list(self.world.live)
        self.world.drop(groups[pick % len(groups)])

    @precondition(lambda self: self.world.dropped)
    @rule(pick=PICK)
    def late_event(self, pick: int) -> None:
        groups = list(self.world.dropped)
        self.world.generate(groups[pick % len(groups)], 0, 2)

    @rule(pick=PICK)
    def push(self, pick: int) -> None:
        self.world.push(self.world.version - pick % (self.world.version - self.world.active + 1))

    @precondition(lambda self: not self.world.done)
    @rule()
    def train(self) -> None:
        self.world.train()

    @precondition(lambda self: not self.world.done)
    @rule(young=st.booleans())
    def lap(self, young: bool) -> None:
        """Admits what is allowed, finishes the youngest or the oldest groups, and trains and pushes if the controller lets it."""
        world = self.world
        world.admit(20)
        for group in sorted(world.live, reverse=young):
            if len(world.ready()) < world.setup.groups_per_step:
                world.complete(group)
        world.train()
        world.push(world.version)

    @rule(lose=st.sets(PICK, max_size=2))
    def restart(self, lose: set[int]) -> None:
        keys = self.world.unfinished()
        self.world.restart({keys[pick % len(keys)] for pick in lose} if keys else set())

    @rule()
    def drain(self) -> None:
        self.world.drain()


QUICK = {"deadline": None, "derandomize": True, "database": None, "suppress_health_check": list(HealthCheck)}


def random_run(setup: Setup, seed: int, controller_class: type[Controller] = Controller) -> World:
    world, rng = World(setup, controller_class), random.Random(f"{setup} {seed}")
    for _ in range(250):
        random_event(world, rng)
    world.drain()
    return world


def test_invariants_hold_over_invented_schedules():
    phases = [Phase.generate, Phase.shrink]
    run_state_machine_as_test(Machine, settings=settings(max_examples=50, stateful_step_count=40, phases=phases, **QUICK))


@pytest.mark.parametrize("eta", [0, 1, 2, 4, None])
@pytest.mark.parametrize("groups_per_step", [1, 2, 3, 4])
def test_invariants_hold_over_random_runs(groups_per_step: int, eta: int | None):
    steps = sum(random_run(Setup(groups_per_step, 2, eta, mode), seed).version for seed, mode in enumerate(["wait", "drop", "keep"]))
    assert steps > 15, "the runs must train something to mean anything"


@pytest.mark.parametrize("eta", [0, 1, 4, None])
def test_invariants_hold_with_dynamic_sampling(eta: int | None):
    """Groups of equal rewards are dropped by name, others take their places, η stays strict and a batch always comes."""
    for seed, (mode, refills) in enumerate([("wait", 3), ("drop", 3), ("wait", 50), ("keep", 3)]):
        world = random_run(Setup(2, 2, eta, mode, refills_per_step=refills), seed)
        assert world.version > 3 and world.uniform_dropped > 3
        assert world.controller.dropped_tokens()["zero_std"] > 0


@pytest.mark.parametrize("eta", [0, 2])
def test_a_policy_that_has_learnt_everything_is_trained_on_after_the_last_refill(eta: int):
    world = World(Setup(2, 2, eta, refills_per_step=4))
    world.uniform = lambda group: True
    world.reward = lambda group, index: always_right(world, group, index)
    for _ in range(3):
        world.drain()
    assert world.uniform_dropped == 3 * 4 and len(world.trained) == 3 * 2


def always_right(world: World, group: int, index: int) -> None:
    world.live[group][index].reward = 1.0
    world.controller.sample_rewarded(group, index, 1.0, {}, 0.1)
    world.kept.add(group)
    if not world.controller.is_live(group):
        world.uniform_dropped += 1
        world.forget(group)
    world.audit()


def test_dynamic_sampling_needs_samples_to_compare():
    with pytest.raises(ValueError, match=r"group_size must be at least 2; got 1"):
        World(Setup(2, 1, 1, refills_per_step=2))


def test_keep_goes_past_the_bound_and_wait_does_not():
    """The unsafe mode shows the ages that the strict modes exclude, so the bound is not held by accident."""

    def oldest(mode: str) -> int:
        ages = []
        for seed in range(6):
            ages += [e["step"] - v for e in random_run(Setup(2, 1, 1, mode), seed).journal if e["event"] == "batch" for v in e["versions"]]
        return max(ages)

    assert oldest("keep") > 1
    assert oldest("wait") == 1
    assert oldest("drop") == 1


class AdmissionOnly(Controller):
    """No earliest deadline first: equation 3 alone, as the original has it."""

    def _plan(self):
        return dataclasses.replace(super()._plan(), missing=0, late=())

    def next_batch(self):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("areal_jax.controller.controller.check_age", lambda batch, max_staleness: None)
            return super().next_batch()


class TrainsTwice(Controller):
    """Leaves the first group of a batch in the buffer."""

    def batch_trained(self, batch: TrainingBatch) -> None:
        first = batch.groups[0].group_id
        group = self._state.groups[first]
        with contextlib.suppress(LedgerError):
            super().batch_trained(batch)
        self._state.groups[first] = group


class LosesDroppedTokens(Controller):
    """Forgets to book what a dropped group had generated."""

    def drop_group(self, group_id, reason):
        before = self._state.ledger.dropped.copy()
        keys = super().drop_group(group_id, reason)
        self._state.ledger.dropped = before
        return keys


class IgnoresLateTokens(Controller):
    """Counts late tokens of a dropped group as generated and as nothing else."""

    def tokens_generated(self, group_id, sample_index, count, version):
        super().tokens_generated(group_id, sample_index, count, version)
        if group_id in self._dropped:
            self._state.ledger.dropped[self._dropped[group_id]] -= count


class ResumesWithAcceptedZero(Controller):
    """N_r starts at 0 after a resume while the version does not (AReaL issue 1388)."""

    base = 0

    @property
    def submitted(self):
        return super().submitted - self.base

    @classmethod
    def restore(cls, snapshot, **constructor):
        controller = super().restore(snapshot, **constructor)
        controller.base = controller.submitted
        return controller


class YoungestFirst(Controller):
    """Prefers what finished last admitted."""

    def _plan(self):
        plan, ready = super()._plan(), [g for g in self._state.groups.values() if g.ready]
        youngest = sorted(ready, key=lambda g: (-g.version, -g.group_id))[: self.groups_per_step]
        return dataclasses.replace(plan, batch=tuple(g.group_id for g in youngest), missing=0)


class TrainsTheQuickSample(Controller):
    """Takes a group as ready when one of its samples is."""

    def next_batch(self):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Group, "ready", property(lambda group: any(s.rewarded for s in group.samples)))
            return super().next_batch()


class TrainsHalfGroups(Controller):
    """Leaves the last sample of each group out of the batch."""

    def next_batch(self):
        batch = super().next_batch()
        if isinstance(batch, TrainingBatch):
            groups = tuple(dataclasses.replace(g, trajectories=g.trajectories[:1]) for g in batch.groups)
            return dataclasses.replace(batch, groups=groups)
        return batch


class NeverTrainsTheLast(Controller):
    """Deadlock: one group always short of a batch."""

    def _plan(self):
        plan = super()._plan()
        return dataclasses.replace(plan, batch=plan.batch[: self.groups_per_step - 1])


class StampsTheTrainersVersion(Controller):
    """Admits at the trainer's version although the sampler is behind: v(g) newer than the first token."""

    def admit(self, prompt):
        active, self._state.active_version = self._state.active_version, self._state.version
        requests = super().admit(prompt)
        self._state.active_version = active
        return requests


class RefillsWithoutEnd(Controller):
    """Drops every group of equal rewards, however many there were since the last step."""

    def sample_rewarded(self, *arguments):
        self._state.refilled = 0
        super().sample_rewarded(*arguments)


FAULTS = [
    (AdmissionOnly, "is trained at age"),
    (TrainsTwice, "lost|trained twice|ledger"),
    (LosesDroppedTokens, "tokens are lost"),
    (IgnoresLateTokens, "tokens are lost"),
    (ResumesWithAcceptedZero, None),
    (YoungestFirst, "oldest first|trained at age|infeasible"),
    (TrainsTheQuickSample, "whole|oldest first"),
    (TrainsHalfGroups, "whole"),
    (NeverTrainsTheLast, None),
    (StampsTheTrainersVersion, "have versions from"),
    (RefillsWithoutEnd, "ledger"),
]


SETUPS = [Setup(b, g, eta, "wait", refills_per_step=g - 1) for eta in (1, 2, 0) for b in (1, 2, 3) for g in (1, 2)]


@pytest.mark.parametrize(("fault", "says"), FAULTS, ids=lambda value: getattr(value, "__name__", ""))
def test_a_broken_controller_is_caught(fault: type[Controller], says: str | None):
    """The same events and checks that the right controller passes."""
    with pytest.raises((AssertionError, ControllerError, LedgerError), match=says):
        for seed, setup in enumerate(SETUPS):
            random_run(setup, seed, fault)


@pytest.mark.parametrize("fault", [AdmissionOnly, TrainsTwice, LosesDroppedTokens, ResumesWithAcceptedZero])
def test_the_machine_of_hypothesis_catches_them_too(fault: type[Controller]):
    class Broken(Machine):
        controller_class = fault

        @initialize(groups_per_step=st.integers(1, 2))
        def start(self, groups_per_step: int) -> None:
            self.world = World(Setup(groups_per_step, 1, 1), fault)

    quick = settings(max_examples=2500, stateful_step_count=30, phases=[Phase.generate], report_multiple_bugs=False, **QUICK)
    with pytest.raises((AssertionError, ControllerError, LedgerError)):
        run_state_machine_as_test(Broken, settings=quick)


def test_the_right_controller_passes_the_runs_of_the_broken_ones():
    for seed, setup in enumerate(SETUPS):
        random_run(setup, seed)
