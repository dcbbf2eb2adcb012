"""A world around a controller: it plays sampler, rewards and trainer, keeps its own books and compares them after each event."""

from __future__ import annotations

import dataclasses
import json
import random

import numpy as np

from areal_jax.controller import Controller, Waiting
from areal_jax.types import GenerationRequest, Prompt, Trajectory


@dataclasses.dataclass(frozen=True)
class Setup:
    groups_per_step: int = 2
    group_size: int = 2
    max_staleness: int | None = 1
    on_overdue: str = "wait"
    max_concurrent_groups: int | None = None
    total_steps: int | None = None
    refills_per_step: int = 0


@dataclasses.dataclass
class ModelSample:
    tokens: list[int] = dataclasses.field(default_factory=list)
    logprobs: list[np.float32] = dataclasses.field(default_factory=list)
    versions: list[int] = dataclasses.field(default_factory=list)
    finished: bool = False
    reward: float | None = None
    saved: int = 0
    """Tokens that the last restart brought back: a later loss goes back to them."""

    def cut(self) -> int:
        """Loses the tokens after the saved ones; says how many."""
        lost = len(self.tokens) - self.saved
        self.tokens, self.logprobs, self.versions = self.tokens[: self.saved], self.logprobs[: self.saved], self.versions[: self.saved]
        return lost


class World:
    """Every method is one event that a real run can bring, and ends with ``audit``. Assertions are the properties under test."""

    def __init__(self, setup: Setup, controller_class: type[Controller] = Controller):
        self.setup, self.controller_class = setup, controller_class
        self.journal: list[dict] = []
        self.arguments = {**dataclasses.asdict(setup), "max_new_tokens": 64, "journal": self.journal.append, "clock": lambda: 0.0}
        self.controller = controller_class(**self.arguments)
        self.version = self.active = self.next_index = self.next_token = 0
        self.live: dict[int, list[ModelSample]] = {}
        self.admitted_version: dict[int, int] = {}
        self.dropped: dict[int, list[ModelSample]] = {}
        self.trained: list[int] = []
        self.batches: list[list[int]] = []
        self.generated = self.trained_tokens = self.dropped_tokens = 0
        self.restarts = self.refilled = self.uniform_dropped = 0
        self.kept: set[int] = set()
        """Groups of equal rewards that came when no refill was left."""

    # What the model says

    def submitted(self) -> int:
        return len(self.trained) + len(self.live)

    def ready(self) -> list[int]:
        complete = [g for g, samples in self.live.items() if all(s.reward is not None for s in samples)]
        return sorted(complete, key=lambda g: (min(v for s in self.live[g] for v in s.versions), g))

    def unfinished(self) -> list[tuple[int, int]]:
        return [(g, i) for g, samples in self.live.items() for i, s in enumerate(samples) if not s.finished]

    def unrewarded(self) -> list[tuple[int, int]]:
        return [(g, i) for g, samples in self.live.items() for i, s in enumerate(samples) if s.finished and s.reward is None]

    def admissible(self) -> int:
        """Equation 3, one submission after another."""
        s, count = self.setup, 0
        running = len({g for g, _ in self.unfinished()})
        concurrent = s.max_concurrent_groups or (s.groups_per_step if s.max_staleness is None else 10**9)
        while running + count < concurrent:
            submitted = self.submitted() + count + 1
            if s.max_staleness is not None and (submitted - 1) // s.groups_per_step > self.active + s.max_staleness:
                break
            if s.total_steps is not None and submitted > s.total_steps * s.groups_per_step:
                break
            count += 1
        return count

    @property
    def done(self) -> bool:
        return self.setup.total_steps is not None and self.version >= self.setup.total_steps

    # Events

    def admit(self, count: int) -> None:
        for _ in range(min(count, self.controller.capacity())):
            index = self.next_index
            self.next_index += 1
            prompt = Prompt(index, "same id", "same text", np.array([7, 8], np.int32), "42", {"task": "t"})
            requests = self.controller.admit(prompt)
            assert [r.key for r in requests] == [(index, i) for i in range(self.setup.group_size)]
            self.live[index] = [ModelSample() for _ in requests]
            self.admitted_version[index] = self.active
        self.audit()

    def generate(self, group: int, index: int, count: int) -> None:
        sample = (self.live.get(group) or self.dropped[group])[index]
        for _ in range(count):
            sample.tokens.append(self.next_token)
            sample.logprobs.append(np.float32(-1.0) / np.float32(self.next_token + 3))
            sample.versions.append(self.active)
            self.next_token += 1
        self.generated += count
        self.dropped_tokens += count * (group in self.dropped)
        self.controller.tokens_generated(group, index, count, self.active)
        self.audit()

    def finish(self, group: int, index: int) -> None:
        if group in self.live and not self.live[group][index].tokens:
            self.generate(group, index, 1)
        sample = (self.live.get(group) or self.dropped[group])[index]
        sample.finished = True
        arrays = np.array(sample.tokens, np.int32), np.array(sample.logprobs, np.float32), np.array(sample.versions, np.int32)
        self.controller.sample_finished(Trajectory(group, index, np.array([7, 8], np.int32), *arrays, truncated=False))
        self.audit()

    def reward(self, group: int, index: int) -> None:
        reward = 1.0 if group % 3 == 0 else float((group + index) % 2)
        if group in self.live:
            self.live[group][index].reward = reward
        self.controller.sample_rewarded(group, index, reward, {"correct": reward}, 0.1)
        if group in self.live and self.uniform(group):
            if self.refilled < self.setup.refills_per_step:
                self.refilled += 1
                self.uniform_dropped += 1
                self.forget(group)
            else:
                self.kept.add(group)
        self.audit()

    def uniform(self, group: int) -> bool:
        rewards = {s.reward for s in self.live[group]}
        return len(rewards) == 1 and None not in rewards

    def complete(self, group: int) -> None:
        for index, sample in enumerate(self.live[group]):
            if not sample.finished:
                self.generate(group, index, 1 + (group + index) % 3)
                self.finish(group, index)
            if sample.reward is None:
                self.reward(group, index)

    def drop(self, group: int) -> None:
        running = [(group, i) for i, s in enumerate(self.live[group]) if not s.finished]
        assert self.controller.drop_group(group, "reward_error") == running
        assert self.controller.drop_group(group, "reward_error") == [], "a second drop must change nothing"
        self.forget(group)
        self.audit()

    def forget(self, group: int) -> None:
        self.dropped[group] = self.live.pop(group)
        self.dropped_tokens += sum(len(s.tokens) for s in self.dropped[group])

    def push(self, version: int) -> None:
        self.active = version
        self.controller.weights_active(version)
        self.audit()

    def train(self) -> bool:
        answer = self.controller.next_batch()
        cancelled = set(self.controller.take_cancelled())
        assert not self.controller.take_cancelled(), "cancelled samples are told once"
        for group in [g for g in self.live if not self.controller.is_live(g)]:
            assert self.setup.on_overdue == "drop", f"group {group} was dropped without leave"
            running = {(group, i) for i, s in enumerate(self.live[group]) if not s.finished}
            assert group not in self.ready(), f"group {group} was ready and was dropped"
            assert running <= cancelled, "a dropped sample goes on generating"
            cancelled -= running
            self.forget(group)
        assert not cancelled, f"samples {cancelled} are cancelled and their group was not dropped"
        ready = self.ready()
        if isinstance(answer, Waiting):
            self.check_waiting(answer, ready)
            return False
        ids = [g.group_id for g in answer.groups]
        assert answer.step == self.version and len(ids) == self.setup.groups_per_step
        assert not set(ids) & set(self.trained), f"groups {sorted(set(ids) & set(self.trained))} are trained twice"
        for group in answer.groups:
            samples = self.live[group.group_id]
            assert group.group_id in self.kept or not self.uniform(group.group_id), "a group of equal rewards is trained"
            assert [t.sample_index for t in group.trajectories] == list(range(self.setup.group_size)), "a group must be whole"
            for got, want in zip(group.trajectories, samples, strict=True):
                assert got.tokens.tolist() == want.tokens and got.versions.tolist() == want.versions
                assert got.behaviour_logprobs.dtype == np.float32 and got.behaviour_logprobs.tolist() == [float(x) for x in want.logprobs]
                assert got.reward == want.reward
                if self.setup.max_staleness is not None and self.setup.on_overdue != "keep":
                    age = self.version - min(want.versions)
                    assert age <= self.setup.max_staleness, f"group {group.group_id} is trained at age {age}"
        assert ids == ready[: len(ids)], f"oldest first: trained {ids}, ready were {ready}"
        self.controller.batch_trained(answer)
        self.version += 1
        self.refilled = 0
        self.trained += ids
        self.batches.append(ids)
        for group in ids:
            self.trained_tokens += sum(len(s.tokens) for s in self.live.pop(group))
        self.audit()
        return True

    def check_waiting(self, answer: Waiting, ready: list[int]) -> None:
        assert answer.missing > 0 and answer.describe()
        assert answer.kind == ("batch" if len(ready) < self.setup.groups_per_step else "due")
        assert answer.kind == "batch" or (self.setup.on_overdue == "wait" and self.setup.max_staleness is not None)
        assert answer.kind == "batch" or len(answer.group_ids) >= answer.missing
        for group in answer.group_ids:
            samples = self.live[group]
            tokens = tuple(i for i, s in enumerate(samples) if not s.finished)
            rewards = tuple(i for i, s in enumerate(samples) if s.finished and s.reward is None)
            assert (tokens or rewards) and dict(answer.lacks[group]) == {"tokens": tokens, "reward": rewards}

    def restart(self, lose: set[tuple[int, int]]) -> None:
        """Kill and resume; the partial tokens of ``lose`` were not saved."""
        self.restarts += 1
        partials = {}
        for group, index in self.unfinished():
            sample = self.live[group][index]
            if (group, index) not in lose:
                partials[group, index] = np.array(sample.tokens), np.array(sample.logprobs, np.float32), np.array(sample.versions)
        snapshot = json.loads(json.dumps(self.controller.snapshot(partials)))
        self.controller = self.controller_class.restore(snapshot, **self.arguments)
        for group, index in self.unfinished():
            sample = self.live[group][index]
            if (group, index) in lose:
                self.dropped_tokens += sample.cut()
            sample.saved = len(sample.tokens)
        if not lose:
            assert json.loads(json.dumps(self.controller.snapshot({}))) == snapshot
        pending: dict[tuple[int, int], GenerationRequest] = {r.key: r for r in self.controller.pending_requests()}
        assert set(pending) == set(self.unfinished())
        for (group, index), request in pending.items():
            sample = self.live[group][index]
            assert request.tokens.tolist() == sample.tokens and request.versions.tolist() == sample.versions
            assert request.behaviour_logprobs.dtype == np.float32 and request.behaviour_logprobs.tolist() == [float(x) for x in sample.logprobs]
        unrewarded = self.controller.unrewarded()
        assert sorted((t.group_id, t.sample_index) for _, t in unrewarded) == sorted(self.unrewarded())
        assert all(prompt.index == trajectory.group_id and prompt.metadata == {"task": "t"} for prompt, trajectory in unrewarded)
        self.dropped.clear()
        self.audit()

    def drain(self) -> None:
        """No deadlock: with everything admitted finished and the weights pushed, a batch comes."""
        if self.done:
            return
        self.push(self.version)
        for _ in range(self.setup.groups_per_step + self.setup.refills_per_step + 1):
            self.admit(10**6)
            for group in list(self.live):
                self.complete(group)
        assert self.train(), "everything is finished and no batch comes"

    def audit(self) -> None:
        balance = self.controller.ledger()
        assert balance.residual == 0, f"{balance.residual} tokens are lost"
        in_flight = sum(len(s.tokens) for samples in self.live.values() for s in samples if not s.finished)
        buffered = sum(len(s.tokens) for samples in self.live.values() for s in samples if s.finished)
        want = (self.generated, self.trained_tokens, self.dropped_tokens, buffered, in_flight)
        assert dataclasses.astuple(balance) == want, f"ledger {balance}, the model has {want}"
        assert self.controller.version == self.version and self.controller.submitted == self.submitted()
        assert self.controller.capacity() == self.admissible(), "equation 3"
        setup, counts = self.setup, self.controller.counts()
        assert counts["buffer/depth"] == len(self.ready()) and counts["groups/in_flight"] == len(self.live) - len(self.ready())
        assert counts.get("drop/zero_std", 0) == self.uniform_dropped
        if setup.max_staleness is not None:
            assert len(self.live) <= (setup.max_staleness + 1) * setup.groups_per_step, "admission burst"
            if setup.on_overdue != "keep":
                assert 0 <= counts["groups/due"] <= setup.groups_per_step, "infeasible: more due than fit"


def random_event(world: World, rng: random.Random) -> None:
    """One event of a random run in which young groups tend to finish first."""
    roll = rng.random()
    live, unfinished = list(world.live), world.unfinished()
    if roll < 0.3:
        world.admit(rng.randint(1, 4))
    elif roll < 0.42 and unfinished:
        world.generate(*rng.choice(unfinished), rng.randint(1, 3))
    elif roll < 0.5 and unfinished:
        world.finish(*rng.choice(unfinished))
    elif roll < 0.54 and world.unrewarded():
        world.reward(*rng.choice(world.unrewarded()))
    elif roll < 0.72 and live:
        world.complete(rng.choice(live[-3:] if rng.random() < 0.8 else live))
    elif roll < 0.74 and live:
        world.drop(rng.choice(live))
    elif roll < 0.75 and world.dropped:
        group = rng.choice(list(world.dropped))
        world.generate(group, 0, 2)
        world.finish(group, 0)
    elif roll < 0.84:
        world.push(rng.randint(world.active, world.version))
    elif roll < 0.86:
        world.restart({key for key in unfinished if rng.random() < 0.3})
    elif roll < 0.87:
        world.drain()
    elif not world.done:
        world.train()
