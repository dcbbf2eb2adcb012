"""The reward service against verifiers that raise, hang, die, flood and lie."""

import collections
import os
import pathlib
import signal
import subprocess
import sys
import textwrap
import threading
import time

import psutil
import pytest

from areal_jax.rewards.service import RewardError, RewardService

ACT = "faulty_verifiers:act"
LIMIT_S = 1.0
HERE = str(pathlib.Path(__file__).parent)


class Collector:
    """Keeps results by key, with the time they came; a key answered twice stays visible."""

    def __init__(self):
        self.results = collections.defaultdict(list)
        self.times = {}

    def __call__(self, result):
        self.times[result.key] = time.monotonic()
        self.results[result.key].append(result)

    def only(self, key):
        assert len(self.results[key]) == 1, f"{key} was answered {len(self.results[key])} times"
        return self.results[key][0]


@pytest.fixture(scope="module")
def shared():
    """One service for the cases that need no pool of their own; a failing check must leave it whole for the next."""
    collector = Collector()
    with RewardService(2, LIMIT_S, ACT, collector) as service:
        service.warm_up(60)
        yield service, collector


FAULTS = {
    "raise 7": ("error", "ValueError: cannot judge 7"),
    "raise_long": ("error", "xxxx"),
    "interrupt": ("error", "KeyboardInterrupt"),
    "sys_exit": ("error", "SystemExit"),
    "return_none": ("error", "mapping with 'correct'"),
    "return_nan": ("error", "finite number"),
    "return_text": ("error", "could not convert"),
    "return_many": ("error", "at most"),
    "memory": ("error", "MemoryError"),
    "unheard_of": ("error", "AssertionError"),
    "hang": ("timeout", "reward.timeout_s"),
    "hang_locked": ("timeout", "reward.timeout_s"),
    "hang_ignoring": ("timeout", "reward.timeout_s"),
    "exit 3": ("died", "code 3"),
    "crash": ("died", "code -11"),
}


@pytest.mark.parametrize("response", FAULTS)
def test_each_fault_is_answered_once_with_its_kind_and_cause(shared, response):
    service, collector = shared
    failure, cause = FAULTS[response]
    service.submit(response, response, "1", {})
    service.submit(f"{response}/after", "ok", "1", {})
    assert service.wait(20)
    result = collector.only(response)
    assert (result.failure, result.reward, result.components) == (failure, None, {})
    assert cause in result.cause and len(result.cause) < 10_000
    assert collector.only(f"{response}/after").reward == 1.0


def test_exit_with_success_code_is_a_failure_too(shared):
    service, collector = shared
    service.submit("exit0", "exit 0", "1", {})
    assert service.wait(20)
    assert collector.only("exit0").reward is None and collector.only("exit0").failure in ("died", "timeout")


def test_what_a_verifier_prints_goes_nowhere(shared, capfd):
    service, collector = shared
    service.submit("print", "print", "1", {})
    assert service.wait(20)
    assert collector.only("print").reward == 1.0
    out, err = capfd.readouterr()
    assert "xxxx" not in out + err


def test_long_response_passes(shared):
    service, collector = shared
    service.submit("long", "ok " + "x" * 5_000_000, "1", {})
    assert service.wait(20)
    assert collector.only("long").reward == 1.0


def test_workers_are_out_of_reach_of_the_terminals_signals(shared):
    service, collector = shared
    service.submit("process", "process", "1", {})
    assert service.wait(20)
    components = collector.only("process").components
    assert components["group"] == components["pid"] != os.getpgid(0)


def test_queue_time_does_not_count_against_the_limit():
    collector = Collector()
    with RewardService(1, LIMIT_S, ACT, collector) as service:
        for i in range(5):
            service.submit(i, "sleep 0.4", "1", {})
        assert service.wait(30)
    assert [collector.only(i).failure for i in range(5)] == [None] * 5
    assert collector.only(4).turnaround_s > LIMIT_S  # it did wait longer than the limit
    assert 0.4 <= collector.only(4).latency_s < LIMIT_S


def test_a_failures_latency_is_its_own_time_not_that_in_the_queue():
    collector = Collector()
    with RewardService(1, LIMIT_S, ACT, collector) as service:
        for i in range(4):
            service.submit(i, "sleep 0.4", "1", {})
        service.submit("bad", "raise late", "1", {})
        assert service.wait(30)
    bad = collector.only("bad")
    assert bad.failure == "error" and bad.turnaround_s > LIMIT_S
    assert 0.0 <= bad.latency_s < 0.4


def test_fast_answers_are_not_starved_by_slow_ones():
    collector = Collector()
    with RewardService(2, 3.0, ACT, collector) as service:
        service.warm_up(60)
        service.submit("slow", "hang", "1", {})
        for i in range(100):
            service.submit(i, "ok", "1", {})
        assert service.wait(30)
    assert collector.only("slow").failure == "timeout"
    assert max(collector.times[i] for i in range(100)) < collector.times["slow"]
    assert all(collector.only(i).reward == 1.0 for i in range(100))


def test_one_completion_in_twenty_raises():
    """The run goes on, a counter says how many, and failures in a row are visible with their cause (system-001)."""
    collector = Collector()
    with RewardService(1, LIMIT_S, ACT, collector) as service:
        for i in range(200):
            service.submit(i, f"raise record-{i}" if i % 20 == 0 else "ok", "1", {})
        assert service.wait(30)
        counts = service.counts()
        assert (counts["submitted"], counts["done"], counts["errors"], counts["pending"]) == (200, 200, 10, 0)
        assert counts["timeouts"] == counts["died"] == 0
        assert 0 < counts["latency_p50_s"] <= counts["latency_p99_s"] < LIMIT_S
        assert service.consecutive_failures == 0 and "record-180" in service.last_cause
        for i in range(3):
            service.submit(f"bad-{i}", f"raise again-{i}", "1", {})
        assert service.wait(30)
        assert service.consecutive_failures == 3
        assert "ValueError: cannot judge again-2" in service.last_cause and "faulty_verifiers.py" in service.last_cause
    assert sum(result.failure is not None for results in collector.results.values() for result in results) == 13


@pytest.mark.parametrize("wait_for_replacement", [True, False])
def test_idle_workers_may_be_killed_from_outside(wait_for_replacement):
    collector = Collector()
    with RewardService(2, LIMIT_S, ACT, collector) as service:
        service.warm_up(60)
        service.submit("pid", "process", "1", {})
        assert service.wait(20)
        os.kill(int(collector.only("pid").components["pid"]), signal.SIGKILL)
        if wait_for_replacement:
            deadline = time.monotonic() + 10
            while not service.counts()["pools_replaced"]:
                assert time.monotonic() < deadline, "the broken pool was not replaced"
                time.sleep(0.05)
        for i in range(20):
            service.submit(i, "ok", "1", {})
        assert service.wait(30)
    assert [collector.only(i).reward for i in range(20)] == [1.0] * 20


def workers_of_this_process():
    found = []
    for child in psutil.Process().children(recursive=True):
        try:
            if "resource_tracker" not in " ".join(child.cmdline()) and child.status() != psutil.STATUS_ZOMBIE:
                found.append(child)
        except psutil.NoSuchProcess:
            continue
    return found


@pytest.mark.parametrize("response", ["hang", "hang_locked", "hang_ignoring"])
def test_close_is_quick_and_leaves_no_process(response):
    collector = Collector()
    before = set(workers_of_this_process())
    service = RewardService(1, 30.0, ACT, collector)
    service.warm_up(60)
    assert set(workers_of_this_process()) - before
    service.submit("hanging", response, "1", {})
    service.submit("behind", "ok", "1", {})
    time.sleep(0.5)
    began = time.monotonic()
    service.close(10)
    assert time.monotonic() - began < 8
    assert not set(workers_of_this_process()) - before
    assert service.pending == 2 and not collector.results
    with pytest.raises(RewardError, match="closed"):
        service.submit("late", "ok", "1", {})


def test_killing_the_program_leaves_no_worker(tmp_path):
    script = tmp_path / "program.py"
    script.write_text(
        textwrap.dedent(
            """
            import sys, time
            from areal_jax.rewards.service import RewardService

            if __name__ == "__main__":
                service = RewardService(3, 2.0, "faulty_verifiers:act")
                service.warm_up(60)
                for response in ("hang_locked", "hang_ignoring"):
                    service.submit(response, response, "1", {})
                time.sleep(0.3)
                print("ready", flush=True)
                time.sleep(60)
            """
        )
    )
    environment = {**os.environ, "PYTHONPATH": HERE + os.pathsep + os.environ.get("PYTHONPATH", "")}
    program = subprocess.Popen([sys.executable, str(script)], stdout=subprocess.PIPE, env=environment)
    try:
        assert program.stdout is not None and program.stdout.readline() == b"ready\n"
        children = psutil.Process(program.pid).children(recursive=True)
        assert len(children) >= 3
    finally:
        program.kill()
        program.wait()
    _, alive = psutil.wait_procs(children, timeout=8)
    assert not [child for child in alive if child.is_running() and child.status() != psutil.STATUS_ZOMBIE]


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("areal_jax.rewards.nowhere:verify", "nowhere"),
        ("areal_jax.rewards.verify:grade", "grade"),
        ("verify", "package.module:function"),
        ("exiting_verifier:verify", "no verifier today"),
    ],
)
def test_a_verifier_that_cannot_be_loaded_is_named_at_once(name, words):
    with RewardService(1, LIMIT_S, name) as service:
        with pytest.raises(RewardError, match="cannot be loaded") as caught:
            service.warm_up(60)
        assert name in str(caught.value) and words in str(caught.value)


def test_what_on_result_raises_is_told():
    told = threading.Event()

    def on_result(result):
        told.set()
        raise ZeroDivisionError("controller is broken")

    with RewardService(1, LIMIT_S, ACT, on_result) as service:
        service.submit(0, "ok", "1", {})
        with pytest.raises(RewardError) as caught:
            service.wait(30)
        assert told.is_set() and isinstance(caught.value.__cause__, ZeroDivisionError)


@pytest.mark.parametrize(("workers", "timeout_s"), [(0, 1.0), (1, 0.0)])
def test_ranges(workers, timeout_s):
    with pytest.raises(ValueError, match="must be at least 1"):
        RewardService(workers, timeout_s)
