"""The schedule in virtual time, with the real controller between stand-ins whose lengths are known."""

import numpy as np
import pytest
from scripted_sampler import CountingLearner, Pusher, ScriptedSampler, prompts

from areal_jax.controller.controller import Controller
from areal_jax.experiments.virtual_time import VirtualClock, VirtualRun, ages

B, G = 4, 2


def uneven(group, sample):
    return 3 + (7 * group + 13 * sample) % 23


def make(eta, *, steps=40, train_ticks=30, slots=16, length=uneven, on_overdue="wait", verify=lambda response, answer, metadata: {"correct": 1.0}):
    sampler, learner, clock = ScriptedSampler(slots, 4, length), CountingLearner(), VirtualClock()
    controller = Controller(
        groups_per_step=B,
        group_size=G,
        max_new_tokens=32,
        max_staleness=eta,
        on_overdue=on_overdue,
        max_concurrent_groups=None,
        journal=lambda event: None,
        clock=clock,
        total_steps=steps,
    )
    run = VirtualRun(controller, clock, prompts(), lambda tokens: str(len(tokens)), verify, learner, Pusher(), slots=slots, train_ticks=train_ticks)
    sampler.on_progress, sampler.on_weights = run.on_progress, run.on_weights
    run.attach(sampler)
    return run, list(run.steps(steps))


@pytest.mark.parametrize("eta", [0, 1, 2, 4, 8, 16])
def test_staleness_fills_the_bound_and_never_passes_it(eta):
    run, done = make(eta, steps=60)
    assert [d.batch.step for d in done] == list(range(60)) and run.controller.version == 60
    assert max(int(ages(d.batch).max()) for d in done) == eta
    assert all(d.batch.step - g.version == eta for d in done[2 * eta + 4 :] for g in d.batch.groups), "every batch is the stalest that η allows"
    late = np.concatenate([ages(d.batch) for d in done[2 * eta + 4 :]])
    assert eta - 0.6 <= late.mean() <= eta, "only a spliced end of a trajectory is younger"
    assert all(len(d.batch.groups) == B for d in done), "the same number of samples under every bound"


def test_without_staleness_the_algorithm_is_the_synchronous_one():
    run, done = make(0)
    assert all((ages(d.batch) == 0).all() for d in done)
    assert [[g.group_id for g in d.batch.groups] for d in done] == [list(range(B * i, B * i + B)) for i in range(40)]
    longest = [max(uneven(g, k) for g in range(B * i, B * i + B) for k in range(G)) for i in range(40)]
    assert done[-1].tick == sum(longest) + 40 * 30, "generation and training take turns"
    assert run.sampler.rounds == sorted(run.sampler.rounds)


def test_training_and_generation_overlap_where_staleness_is_allowed():
    synchronous, asynchronous = make(0)[1], make(4)[1]
    assert asynchronous[-1].tick < synchronous[-1].tick
    assert asynchronous[-1].tick - asynchronous[0].tick == 39 * 30, "the trainer never waits: a step follows a step"


def test_long_samples_are_spliced_of_several_versions():
    _, done = make(4, length=lambda group, sample: 31 if (group, sample) == (10, 1) else 3, train_ticks=8)
    spliced = next(t for d in done for g in d.batch.groups for t in g.trajectories if t.length == 31)
    assert len(set(spliced.versions.tolist())) >= 3 and (np.diff(spliced.versions) >= 0).all()


def test_the_same_tokens_give_the_same_run():
    runs = [[(d.tick, [g.group_id for g in d.batch.groups], ages(d.batch).tolist()) for d in make(3)[1]] for _ in range(2)]
    assert runs[0] == runs[1]


def test_rewards_are_the_verifiers_and_the_ledger_closes():
    seen = []

    def verify(response, answer, metadata):
        seen.append((response, answer))
        return {"correct": float(int(answer) % 2)}

    run, done = make(2, verify=verify)
    assert all(t.reward == g.group_id % 2 for d in done for g in d.batch.groups for t in g.trajectories)
    assert len(seen) == 40 * B * G and all(int(response) in (uneven(int(answer), 0), uneven(int(answer), 1)) for response, answer in seen)
    run.controller.check()
    assert run.controller.ledger().trained == sum(uneven(g, k) for g in range(40 * B) for k in range(G))


def test_overdue_groups_may_be_dropped_by_name():
    run, done = make(1, on_overdue="drop", length=lambda group, sample: 32 if group % 7 == 0 else 3, train_ticks=6)
    dropped = run.controller.dropped_tokens()
    assert set(dropped) == {"stale"} and dropped["stale"] > 0
    assert len(done) == 40 and max(int(ages(d.batch).max()) for d in done) <= 1


def test_a_training_step_takes_time():
    with pytest.raises(ValueError, match="at least 1 tick; got 0"):
        make(1, train_ticks=0)


def test_a_batch_that_cannot_come_is_an_error_and_not_a_wait(monkeypatch):
    monkeypatch.setattr(ScriptedSampler, "submit", lambda self, requests: None)
    with pytest.raises(RuntimeError, match=r"at step 0 nothing is left to generate.*waiting for 4 groups"):
        make(0)
