"""launch/experiment.py staleness as a user runs it, on a tiny policy: killed, gone on with, reported, and refused with other settings."""

import json
import os
import pathlib
import signal
import subprocess
import sys
import time

import psutil
import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
LIMIT_S = 150.0
TINY = (
    *("model.layers=1", "model.hidden_size=32", "model.heads=2", "model.kv_heads=1", "model.head_dim=16", "model.mlp_size=64"),
    *("task.train_problems=400", "sft.steps=12", "sft.rows=4", "sft.checkpoint_every=6"),
    *("rollout.group_size=2", "rollout.max_new_tokens=40", "rollout.slots=8", "rollout.steps_per_dispatch=4", "rollout.prefill_chunk=64"),
    *(
        "trainer.groups_per_step=2",
        "trainer.minibatches=1",
        "trainer.micro_batch_rows=1",
        "eval.every_steps=3",
        "eval.problems=8",
        "eval.periodic_problems=4",
        "eval.samples=1",
    ),
)
GRID = ("--etas=0,2", "--losses=decoupled_ppo", "--seeds=1", "--workers=1", "--steps=6", "--train-ticks=30")


def command(out, *more):
    return [sys.executable, str(ROOT / "launch" / "experiment.py"), "staleness", *GRID, f"--out={out}", *(f"--config.{o}" for o in TINY), *more]


def environment():
    return {**os.environ, "PYTHONPATH": str(ROOT)}


def run(out, *more, code=0):
    done = subprocess.run(command(out, *more), env=environment(), capture_output=True, text=True, timeout=LIMIT_S)
    logs = "".join(f"{file.name}: {file.read_text()}" for file in (out / "logs").glob("*.log")) if out.exists() else ""
    assert done.returncode == code, f"exit code {done.returncode}, not {code}\n{done.stdout}\n{done.stderr}\n{logs}"
    return done.stdout + done.stderr


@pytest.fixture(scope="module")
def study(tmp_path_factory):
    """(directory of a study that was killed after its first cell and gone on with, what the second run printed, the first cell's time stamps)."""
    out = tmp_path_factory.mktemp("study")
    first, second = out / "cells" / "decoupled_ppo-eta0-seed0.json", out / "logs" / "decoupled_ppo-eta2-seed0.log"
    process = subprocess.Popen(command(out), env=environment(), stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    end = time.monotonic() + LIMIT_S
    while not (first.exists() and second.exists()):
        assert process.poll() is None, f"ended early: {process.stderr.read()}"
        assert time.monotonic() < end, "the first cell did not end"
        time.sleep(0.02)
    family = psutil.Process(process.pid).children(recursive=True)
    process.send_signal(signal.SIGKILL)
    process.wait()
    _, alive = psutil.wait_procs(family, timeout=60)
    assert family and not alive, "a cell outlives the program that started it"
    assert not second.with_suffix(".json").exists()
    stamp = first.stat().st_mtime_ns
    return out, run(out), stamp


def cell(out, eta):
    return json.loads((out / "cells" / f"decoupled_ppo-eta{eta}-seed0.json").read_text())


def test_a_killed_study_goes_on_with_what_is_missing(study):
    out, printed, stamp = study
    assert "2 cells, 1 of them finished; 1 jobs to run, 1 at once" in printed
    assert (out / "cells" / "decoupled_ppo-eta0-seed0.json").stat().st_mtime_ns == stamp, "a finished cell is not run again"
    assert "decoupled_ppo against its own η = 0: undecided" in (out / "verdicts.txt").read_text()
    assert (out / "table.csv").read_text().count("\n") == 3


def test_both_cells_train_as_much_from_the_same_policy(study):
    synchronous, asynchronous = cell(study[0], 0), cell(study[0], 2)
    assert synchronous["evaluations"][0] == asynchronous["evaluations"][0]
    for found in (synchronous, asynchronous):
        assert [row["step"] for row in found["steps"]] == [1, 2, 3, 4, 5, 6] and [row["step"] for row in found["evaluations"]] == [0, 3, 6]
        assert found["diverged"] is None and found["dropped_tokens"] == {}
        assert all(row["engine_gap/max"] is None or row["engine_gap/max"] < 1e-3 for row in found["steps"])


def test_staleness_is_none_without_and_fills_the_bound_with(study):
    assert set(cell(study[0], 0)["staleness_tokens"]) == {"0"}
    found = cell(study[0], 2)
    assert max(map(int, found["staleness_tokens"])) == 2 and max(row["trajectory_spans/max"] for row in found["steps"]) >= 2
    assert found["steps"][-1]["staleness/mean"] > 1 and found["ticks"] < cell(study[0], 0)["ticks"]


def test_other_settings_are_refused(study):
    printed = run(study[0], "--learning-rate=0.5", code=2)
    assert "was made with 'trainer.learning_rate' = 0.0003, not 0.5" in printed and len(printed.strip().splitlines()) == 1


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--eta=1",), "did you mean '--etas'"),
        (("--etas=1,1",), "each value once"),
        (("--losses=pop",), "got 'pop'"),
        (("--workers=4000",), "cores that this process may use"),
        (("--config.rollout.slots",), "needs a value"),
        (("--minibatches=4",), "multiple of 'trainer.minibatches'"),
    ],
    ids=lambda value: value[0] if isinstance(value, tuple) else "",
)
def test_mistakes_are_one_line_and_make_nothing(tmp_path, arguments, words):
    printed = run(tmp_path / "none", *arguments, code=2)
    assert words in printed and len(printed.strip().splitlines()) == 1 and not (tmp_path / "none").exists()
