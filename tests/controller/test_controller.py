"""The controller's protocol: what it answers, refuses, saves and writes down."""

from __future__ import annotations

import json
import random
from typing import Any

import numpy as np
import pytest
from controller_world import Setup, World, random_event

from areal_jax.controller import Controller, ControllerError, LedgerError, Waiting
from areal_jax.types import Prompt, TrainingBatch, Trajectory

PROMPT_TOKENS = np.array([5, 6], np.int32)


def make(journal: list[dict] | None = None, **changes: Any) -> Controller:
    arguments = {
        "groups_per_step": 1,
        "group_size": 2,
        "max_new_tokens": 64,
        "max_staleness": 2,
        "on_overdue": "wait",
        "max_concurrent_groups": None,
        "journal": [].append if journal is None else journal.append,
        "clock": lambda: 1.5,
        "total_steps": None,
    }
    return Controller(**{**arguments, **changes})


def prompt(index: int, problem_id: str = "p", text: str = "1+1=") -> Prompt:
    return Prompt(index, problem_id, text, PROMPT_TOKENS, "2")


def finish(controller: Controller, group: int, sample: int, versions: list[int], tokens: list[int] | None = None, logprobs: Any = None) -> None:
    for version in sorted(set(versions)):
        controller.tokens_generated(group, sample, versions.count(version), version)
    n = len(versions)
    ids = np.array(tokens if tokens is not None else range(n), np.int32)
    behaviour = np.zeros(n, np.float32) if logprobs is None else logprobs
    controller.sample_finished(Trajectory(group, sample, PROMPT_TOKENS, ids, behaviour, np.array(versions, np.int32), False))


def complete(controller: Controller, group: int, version: int, rewards: tuple[float, ...] = (1.0, 0.0), length: int = 3) -> None:
    for sample, reward in enumerate(rewards):
        finish(controller, group, sample, [version] * length)
        controller.sample_rewarded(group, sample, reward, {"correct": reward}, 0.01)


def step(controller: Controller, push: bool = True) -> TrainingBatch:
    batch = controller.next_batch()
    assert isinstance(batch, TrainingBatch)
    controller.batch_trained(batch)
    if push:
        controller.weights_active(controller.version)
    return batch


def test_equal_prompts_stay_two_groups():
    """Two records with one id and one text: each is its own group with its own rewards."""
    controller = make(groups_per_step=2, max_staleness=0)
    for index in range(2):
        controller.admit(prompt(index))
    complete(controller, 0, 0, (1.0, 1.0))
    complete(controller, 1, 0, (0.0, 0.0))
    batch = step(controller)
    assert [[t.reward for t in g.trajectories] for g in batch.groups] == [[1.0, 1.0], [0.0, 0.0]]
    assert [g.group_id for g in batch.groups] == [0, 1]


def test_token_ids_and_log_probs_travel_unchanged_through_a_resume():
    rng = np.random.default_rng(0)
    controller = make()
    controller.admit(prompt(0))
    tokens = [255, 254, 255, 0, 7]
    logprobs = -rng.exponential(size=5).astype(np.float32)
    logprobs[0] = np.float32(-1e-38)
    finish(controller, 0, 0, [0] * 5, tokens, logprobs)
    controller.tokens_generated(0, 1, 3, 0)
    part = np.array([9, 8, 7]), -rng.exponential(size=3).astype(np.float32), np.zeros(3, np.int32)
    snapshot = json.loads(json.dumps(controller.snapshot({(0, 1): part})))
    resumed = Controller.restore(snapshot, **arguments_of(controller))
    (request,) = resumed.pending_requests()
    assert request.key == (0, 1) and request.tokens.tolist() == [9, 8, 7]
    assert request.behaviour_logprobs.tobytes() == part[1].tobytes()
    ((saved_prompt, trajectory),) = resumed.unrewarded()
    assert saved_prompt.text == "1+1=" and trajectory.tokens.tolist() == tokens
    assert trajectory.behaviour_logprobs.tobytes() == logprobs.tobytes()


def arguments_of(controller: Controller) -> dict[str, Any]:
    return {
        "groups_per_step": controller.groups_per_step,
        "group_size": controller.group_size,
        "max_new_tokens": controller.max_new_tokens,
        "max_staleness": controller.max_staleness,
        "on_overdue": controller.on_overdue,
        "max_concurrent_groups": controller.gate.max_concurrent_groups,
        "journal": lambda event: None,
        "clock": lambda: 0.0,
        "total_steps": controller.total_steps,
    }


@pytest.mark.parametrize("eta", [0, 2])
def test_no_burst_after_a_resume(eta: int):
    """Stopped at step 20 and resumed with a sampler that is faster than the trainer: no more than (η + 1)·B are ever out, none older than η."""
    world = World(Setup(groups_per_step=4, group_size=1, max_staleness=eta))
    while world.version < 20:
        world.drain()
    world.restart(set())
    for _ in range(10):
        world.push(world.version)
        world.admit(10**6)
        assert world.submitted() - len(world.trained) == (eta + 1) * 4
        for group in list(world.live):
            world.complete(group)
        assert world.train()


def trained_length(max_staleness: int, on_overdue: str) -> float:
    """Mean trained over mean generated length after 50 steps; lengths come from two clusters and the long ones take ten times longer."""
    rng, controller = random.Random(3), make(groups_per_step=4, group_size=1, max_staleness=max_staleness, on_overdue=on_overdue)
    lengths: list[int] = []
    left: dict[int, int] = {}
    versions: dict[int, int] = {}
    trained: list[int] = []
    while controller.version < 50:
        while controller.capacity():
            group = len(lengths)
            controller.admit(prompt(group))
            lengths.append(rng.choice([5, 50]))
            left[group], versions[group] = lengths[group], controller.active_version
        for group in list(left):
            left[group] -= 5
            if left[group] <= 0:
                del left[group]
                complete(controller, group, versions[group], (1.0,), lengths[group])
        if isinstance(batch := controller.next_batch(), TrainingBatch):
            controller.batch_trained(batch)
            controller.weights_active(controller.version)
            trained += [t.length for g in batch.groups for t in g.trajectories]
            left = {g: n for g, n in left.items() if controller.is_live(g)}
    return float(np.mean(trained) / np.mean(lengths))


def test_long_generations_are_trained_as_often_as_they_are_made():
    assert trained_length(4, "wait") == pytest.approx(1.0, rel=0.05)
    assert trained_length(1, "wait") == pytest.approx(1.0, rel=0.05)
    assert trained_length(1, "drop") < 0.92, "dropping what is late favours short answers; the measure must show it"


def test_a_slow_first_prompt_waits_only_when_it_is_due():
    controller = make(group_size=1, max_staleness=2)
    for index in range(3):
        controller.admit(prompt(index))
    complete(controller, 1, 0, (1.0,))
    assert [g.group_id for g in step(controller).groups] == [1]
    complete(controller, 2, 0, (1.0,))
    assert [g.group_id for g in step(controller).groups] == [2]
    for index in (3, 4):
        controller.admit(prompt(index))
        complete(controller, index, controller.active_version, (1.0,))
    answer = controller.next_batch()
    assert isinstance(answer, Waiting) and (answer.kind, answer.missing, answer.group_ids) == ("due", 1, (0,))
    assert "group 0 lacks tokens of samples [0]" in answer.describe()
    finish(controller, 0, 0, [0, 0, 1, 2])
    answer = controller.next_batch()
    assert isinstance(answer, Waiting) and answer.lacks[0] == {"tokens": (), "reward": (0,)}
    controller.sample_rewarded(0, 0, 1.0, {}, 0.0)
    batch = step(controller)
    assert [g.group_id for g in batch.groups] == [0] and batch.due == 1


def test_a_waiting_batch_may_take_another_group_of_the_same_deadline():
    """One of two groups of version 0 is due at step 0 with B = 1, η = 1; either will do, so nobody waits for the unfinished one."""
    controller = make(group_size=1, max_staleness=1)
    controller.admit(prompt(0))
    controller.admit(prompt(1))
    complete(controller, 1, 0, (1.0,))
    assert [g.group_id for g in step(controller).groups] == [1]


def test_drop_gives_the_due_group_up_by_name_and_names_what_to_cancel():
    controller = make(group_size=2, max_staleness=1, on_overdue="drop")
    controller.admit(prompt(0))
    controller.admit(prompt(1))
    controller.tokens_generated(0, 0, 4, 0)
    complete(controller, 1, 0)
    step(controller)
    controller.admit(prompt(2))
    assert isinstance(controller.next_batch(), Waiting), "nothing is dropped while no other batch is there"
    assert controller.is_live(0)
    complete(controller, 2, 1)
    assert [g.group_id for g in step(controller).groups] == [2]
    assert controller.take_cancelled() == [(0, 0), (0, 1)] and controller.take_cancelled() == []
    assert controller.counts()["drop/stale"] == 1 and controller.dropped_tokens() == {"stale": 4}
    controller.tokens_generated(0, 0, 2, 1)
    assert controller.dropped_tokens() == {"stale": 6}
    controller.check()


def test_the_groups_version_is_never_newer_than_a_token_it_may_still_get():
    """Sample 0 starts at version 1 while sample 1 has no token: whatever order the reports come in, the deadline is safe."""
    journal: list[dict] = []
    controller = make(journal, max_staleness=2)
    for index in range(3):
        controller.admit(prompt(index))
    complete(controller, 0, 0)
    step(controller)
    controller.tokens_generated(1, 0, 2, 1)
    assert not [e for e in journal if e["event"] == "start"]
    controller.tokens_generated(1, 1, 2, 0)
    controller.tokens_generated(2, 0, 1, 1)
    controller.tokens_generated(2, 1, 1, 1)
    assert [e for e in journal if e["event"] == "start"] == [{"event": "start", "time": 1.5, "group": 2, "version": 1}]


def test_admission_uses_the_samplers_version_and_not_the_trainers():
    controller = make(max_staleness=1)
    for index in range(2):
        controller.admit(prompt(index))
        complete(controller, index, 0)
    step(controller, push=False)
    assert controller.version == 1 and controller.active_version == 0
    assert controller.capacity() == 0, "what would still be generated by version 0 has no step left"
    controller.weights_active(1)
    assert controller.capacity() == 1


@pytest.mark.parametrize(
    ("event", "says"),
    [
        (lambda c: c.admit(prompt(0)), "must rise"),
        (lambda c: [c.admit(prompt(i)) for i in range(5, 9)], r"capacity\(\) > 0"),
        (lambda c: c.tokens_generated(0, 0, -1, 0), "at least 0"),
        (lambda c: c.tokens_generated(0, 0, 1, 1), "the trainer's; got 1"),
        (lambda c: c.tokens_generated(7, 0, 1, 0), "group 7 is not outstanding"),
        (lambda c: c.tokens_generated(0, 2, 1, 0), "from 0 to 1"),
        (lambda c: c.tokens_generated(1, 0, 1, 0), "report tokens before the finish"),
        (lambda c: finish(c, 1, 1, []), "finishes once"),
        (lambda c: finish(c, 0, 0, [0, 0], [1]), "1 tokens, 2 log-probs, 2 versions"),
        (lambda c: c.sample_rewarded(0, 0, 1.0, {}, 0.0), "still generating"),
        (lambda c: c.sample_rewarded(1, 0, 1.0, {}, 0.0), "rewarded once"),
        (lambda c: c.weights_active(1), "from 0 to 0; got 1"),
        (lambda c: c.batch_trained(TrainingBatch(0, (), 0)), "handed out: none"),
        (lambda c: c.restore({**c.snapshot({}), "settings": {}}, **arguments_of(c)), "keeps its settings"),
    ],
)
def test_what_cannot_be_is_refused(event: Any, says: str):
    controller = make()
    controller.admit(prompt(0))
    controller.admit(prompt(1))
    complete(controller, 1, 0)
    with pytest.raises(ControllerError, match=says):
        event(controller)


def test_a_reward_that_is_no_number_is_refused():
    controller = make()
    controller.admit(prompt(0))
    finish(controller, 0, 0, [0])
    with pytest.raises(ControllerError, match="finite"):
        controller.sample_rewarded(0, 0, float("nan"), {}, 0.0)


def test_versions_that_fall_are_refused():
    controller = make()
    controller.admit(prompt(0))
    controller.admit(prompt(1))
    complete(controller, 0, 0)
    step(controller)
    with pytest.raises(ControllerError, match="never fall"):
        finish(controller, 1, 0, [1, 0])


def test_a_batch_is_handed_out_and_trained_once():
    controller = make()
    controller.admit(prompt(0))
    complete(controller, 0, 0)
    batch = controller.next_batch()
    assert isinstance(batch, TrainingBatch)
    with pytest.raises(ControllerError, match="not trained yet"):
        controller.next_batch()
    with pytest.raises(ControllerError, match="being trained"):
        controller.drop_group(0, "reward_error")
    resumed = Controller.restore(controller.snapshot({}), **arguments_of(controller))
    again = resumed.next_batch()
    assert isinstance(again, TrainingBatch) and [g.group_id for g in again.groups] == [0], "what was not trained is taken again"
    controller.batch_trained(batch)
    with pytest.raises(ControllerError, match="handed out: none"):
        controller.batch_trained(batch)
    with pytest.raises(ControllerError, match="is trained"):
        controller.drop_group(0, "late")


def test_a_sampler_that_delivers_other_tokens_than_it_reported_stops_the_run():
    controller = make(group_size=1)
    controller.admit(prompt(0))
    controller.tokens_generated(0, 0, 3, 0)
    controller.sample_finished(Trajectory(0, 0, PROMPT_TOKENS, np.zeros(2, np.int32), np.zeros(2, np.float32), np.zeros(2, np.int32), False))
    with pytest.raises(LedgerError, match=r"generated 3 = trained 0 .* buffered 2 .* 1 tokens are missing; sample \(0, 0\): 3 tokens reported, 2 delivered"):
        controller.check()


def test_the_run_ends_with_nothing_left_over():
    controller = make(groups_per_step=2, max_staleness=4, total_steps=3)
    index = 0
    while controller.version < 3:
        while controller.capacity():
            controller.admit(prompt(index))
            complete(controller, index, controller.active_version)
            index += 1
        step(controller)
    assert index == 6
    assert controller.counts() == {
        "buffer/depth": 0, "buffer/capacity": 10, "groups/in_flight": 0, "groups/due": 0, "ledger/generated": 36, "ledger/trained": 36,
        "ledger/dropped": 0, "ledger/buffered": 0, "ledger/in_flight": 0, "ledger/residual": 0,
    }  # fmt: skip
    with pytest.raises(ControllerError, match="all 3 steps are done"):
        controller.next_batch()


def test_the_journal_repeats_the_batches():
    """What the journal holds, played into a fresh controller, gives the same batches in the same order."""
    world, rng = World(Setup(2, 2, 2, "drop")), random.Random(11)
    for _ in range(600):
        if rng.random() < 0.9:
            random_event(world, rng)
    events = json.loads(json.dumps([e for e in world.journal if e["event"] != "resume"]))
    assert len(world.batches) > 10
    journal: list[dict] = []
    twin = make(journal, groups_per_step=2, group_size=2, max_staleness=2, on_overdue="drop")
    for e in events:
        kind = e["event"]
        if kind == "admit":
            twin.admit(prompt(e["group"], e["problem"]))
        elif kind == "version":
            twin.weights_active(e["version"])
        elif kind == "finish":
            finish(twin, e["group"], e["sample"], [v for v, n in e["versions"] for _ in range(n)])
        elif kind == "reward":
            twin.sample_rewarded(e["group"], e["sample"], e["reward"], e["components"], e["latency_s"])
        elif kind == "drop" and e["reason"] != "stale":
            twin.drop_group(e["group"], e["reason"])
        elif kind == "batch":
            batch = twin.next_batch()
            assert isinstance(batch, TrainingBatch)
            assert [g.group_id for g in batch.groups] == e["groups"] and batch.step == e["step"]
            assert [g.version for g in batch.groups] == e["versions"]
        elif kind == "trained":
            handed_out = twin._batch
            assert handed_out is not None
            twin.batch_trained(handed_out)
    assert [e["groups"] for e in journal if e["event"] == "batch"] == world.batches
