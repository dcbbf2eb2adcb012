"""The grid of processes, with short scripts for jobs."""

import pathlib
import time

import psutil
import pytest

from areal_jax.experiments.grid import Grid, Job

HERE = pathlib.Path(__file__).resolve().parent


@pytest.fixture
def grid(tmp_path, monkeypatch):
    """Makes (grid, names of what finished, (name, cause) of what failed) from jobs as (name, needs, facts)."""
    monkeypatch.setenv("PYTHONPATH", str(HERE))

    def make(*jobs, cores=(0,)):
        done, failed = [], []
        made = [
            Job(
                name,
                tmp_path / name,
                needs and tmp_path / needs,
                {"name": name, "result": str(tmp_path / name), "order": str(tmp_path / "order"), **facts},
            )
            for name, needs, facts in jobs
        ]
        grid = Grid(made, cores, tmp_path, lambda job, seconds: done.append(job.name), lambda job, cause: failed.append((job.name, cause)), "echoing_job")
        return grid, done, failed

    return make


def wait(seconds):
    time.sleep(min(seconds, 0.02))
    return False


def test_jobs_run_in_order_once_what_they_need_is_there(grid, tmp_path):
    (tmp_path / "there").write_text("")
    running, done, failed = grid(("there", None, {}), ("cell", "warm", {}), ("warm", None, {}), ("last", "warm", {}))
    assert running.run(wait) and not failed and not running.failed
    assert (tmp_path / "order").read_text().split() == ["warm", "cell", "last"] == done
    assert (tmp_path / "cell.log").read_text() == "on core 0\n"


def test_a_failure_is_named_and_the_others_go_on(grid):
    running, done, failed = grid(("bad", None, {"fails": True}), ("after", "bad", {}), ("good", None, {}))
    assert running.run(wait) and done == ["good"] and [job.name for job in running.failed] == ["bad", "after"]
    assert "exit code 1" in failed[0][1] and "failed on purpose" in failed[0][1]
    assert "which it needs, was not made" in failed[1][1]


def test_workers_have_a_core_each_and_run_at_once(grid, tmp_path):
    running, done, _ = grid(("a", None, {"sleeps": 0.4}), ("b", None, {"sleeps": 0.4}), cores=(3, 7))
    assert running.run(wait) and sorted(done) == ["a", "b"]
    assert {(tmp_path / f"{name}.log").read_text() for name in "ab"} == {"on core 3\n", "on core 7\n"}


def test_a_stop_ends_what_runs_and_leaves_no_result(grid, tmp_path):
    running, done, failed = grid(("quick", None, {}), ("slow", None, {"sleeps": 60}), ("never", None, {}))
    before = set(psutil.Process().children(recursive=True))
    begun = time.monotonic()
    assert not running.run(lambda seconds: wait(seconds) or (tmp_path / "slow.log").exists())
    assert done == ["quick"] and not failed and time.monotonic() - begun < 15
    assert not (tmp_path / "slow").exists() and not (tmp_path / "never.log").exists()
    assert set(psutil.Process().children(recursive=True)) <= before
