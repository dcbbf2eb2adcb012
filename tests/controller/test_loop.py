"""The loop and the rollout thread with stand-ins for everything that computes."""

import threading

import pytest
from loop_world import FakeRewards, FakeSampler, LoopWorld


def test_runs_to_the_end_and_saves():
    world = LoopWorld(steps=6, save_every=4)
    assert world.loop.run() is True
    assert sorted(g for batch in world.learner.batches for g in batch) == list(range(12))
    assert [row["step"] for row in world.rows] == world.sampler.published == world.after == [1, 2, 3, 4, 5, 6]
    assert [version for version, _ in world.saved] == [4, 6] and all(row["ledger/residual"] == 0 for row in world.rows)
    assert world.saved[-1][1]["prompts"] == {"next": 12} and not _rollout_threads()


def test_wait_past_its_deadline_says_what_it_waited_for():
    world = LoopWorld(sampler=FakeSampler(held=[1]), max_staleness=0, timeout_s=0.3)
    with pytest.raises(TimeoutError, match=r"no batch for step 0 after 0\.3 s \('rollout\.wait_timeout_s'\).*group 1 lacks tokens of samples \[0, 1\]"):
        world.loop.run()
    assert not _rollout_threads()


def test_wait_for_a_reward_is_named_too():
    world = LoopWorld(rewards=FakeRewards(silent=[0]), max_staleness=0, timeout_s=0.3)
    with pytest.raises(TimeoutError, match=r"group 0 lacks reward of samples \[0, 1\]"):
        world.loop.run()


def test_failure_of_the_rollout_thread_is_raised_after_a_checkpoint():
    world = LoopWorld(steps=1000, sampler=FakeSampler(fails_after=20))
    with pytest.raises(RuntimeError, match="the sampler broke on purpose"):
        world.loop.run()
    assert world.rows and world.saved[-1][0] == world.rows[-1]["step"] < 1000


def test_stop_request_ends_after_the_step_with_a_checkpoint():
    asked = threading.Event()
    world = LoopWorld(steps=1000, stop=asked.is_set)
    world.loop._on_step = lambda row: (world.rows.append(row), asked.set() if row["step"] == 3 else None)
    assert world.loop.run() is False
    assert world.saved[-1][0] == world.rows[-1]["step"] == 3 and len(world.saved) == 1


def test_stop_request_ends_a_wait():
    asked = threading.Event()
    world = LoopWorld(sampler=FakeSampler(held=range(100)), stop=asked.is_set)
    timer = threading.Timer(0.2, asked.set)
    timer.start()
    assert world.loop.run() is False
    timer.join()
    (saved,) = world.saved
    assert saved[0] == 0 and len(saved[1]["controller"]["groups"]) == 4, "what is in flight is in the checkpoint"


@pytest.mark.parametrize("eta", [0, 1])
def test_groups_of_equal_rewards_are_refilled_and_the_run_ends(eta):
    """All rewards are equal: each step drops what it may by name, and then trains."""
    world = LoopWorld(steps=4, max_staleness=eta, refills=3)
    assert world.loop.run() is True
    dropped = [e["group"] for e in world.events("drop")]
    assert all(e["reason"] == "zero_std" for e in world.events("drop")) and len(world.learner.batches) == 4
    assert len(dropped) == world.rows[-1]["drop/zero_std"] and (eta or len(dropped) == 4 * 3)
    assert not set(dropped) & {g for batch in world.learner.batches for g in batch}
    assert all(row["ledger/residual"] == 0 for row in world.rows) and world.rows[-1]["ledger/dropped"] == 6 * len(dropped)


def test_overdue_group_is_dropped_and_cancelled():
    world = LoopWorld(steps=4, sampler=FakeSampler(held=[0]), on_overdue="drop")
    assert world.loop.run() is True
    assert [(e["group"], e["reason"]) for e in world.events("drop")] == [(0, "stale")]
    assert set(world.sampler.cancelled) == {(0, 0), (0, 1)}
    assert world.rows[-1]["drop/stale"] == 1 and all(0 not in batch for batch in world.learner.batches)


def test_overdue_group_is_waited_for():
    world = LoopWorld(steps=4, sampler=FakeSampler(held=[0]), on_overdue="wait", timeout_s=0.5)
    with pytest.raises(TimeoutError, match=r"1 due groups: group 0 lacks tokens"):
        world.loop.run()
    assert len(world.rows) == 1, "one step goes before the group is due"


@pytest.mark.parametrize("on_failure", ["zero", "drop"])
def test_failed_check_is_zero_or_drops_its_group(on_failure):
    world = LoopWorld(steps=3, rewards=FakeRewards(failing=[1]), on_failure=on_failure)
    assert world.loop.run() is True
    trained = {g for batch in world.learner.batches for g in batch}
    if on_failure == "zero":
        assert 1 in trained and {e["reward"] for e in world.events("reward") if e["group"] == 1} == {0.0}
    else:
        assert 1 not in trained and [(e["group"], e["reason"]) for e in world.events("drop")] == [(1, "reward_error")]
        assert world.rows[-1]["drop/reward_error"] == 1 and len(trained) == 6, "another group takes its place"


def test_many_failures_in_a_row_end_the_run():
    world = LoopWorld(rewards=FakeRewards(failing=range(100)))
    with pytest.raises(RuntimeError, match=r"5 reward checks in a row failed(.|\n)*the verifier broke on purpose"):
        world.loop.run()
    assert world.saved


def _rollout_threads():
    return [t for t in threading.enumerate() if t.name == "rollout"]
