"""Runs that are killed, stopped and begun again tell one history without a seam (system-035, 036, 039, 042)."""

import signal
import time

import numpy as np
import pytest
from launch_programs import Started, check_history, rows, run, saved

from areal_jax.models.checkpoint import load_policy

SYNCHRONOUS = ("rollout.max_staleness=0", "trainer.steps=10", "eval.every_steps=0")
KILLED_STEPS = 40


@pytest.fixture(scope="module")
def whole(tmp_path_factory, quick):
    """A synchronous run that nobody stopped."""
    workdir = tmp_path_factory.mktemp("synchronous") / "whole"
    run("train", workdir, *quick, *SYNCHRONOUS)
    return workdir


def test_synchronous_run(whole):
    _, metrics = check_history(whole, 10)
    assert all(row["staleness/max"] == 0 and row["trajectory_spans/max"] == 1 for row in metrics)
    assert all(row["staleness_gap/mean"] is None and row["engine_gap/max"] <= 1e-4 for row in metrics)
    assert abs(metrics[0]["importance_weight/mean"] - 1) < 1e-4 and all(row["reward/std"] > 0 for row in metrics)


def test_stopped_run_ends_like_the_whole(whole, warm, tmp_path, quick):
    """SIGTERM in training: exit code 143 and a checkpoint; 10 steps are k + (10 − k), to the engine gap's tolerance (system-036)."""
    workdir = tmp_path / "stopped"
    program = Started("train", workdir, *quick, *SYNCHRONOUS)
    program.until(lambda: len(rows(workdir / "metrics.jsonl")) >= 3)
    program.send(signal.SIGTERM)
    assert program.end(30.0) == 128 + signal.SIGTERM
    done = saved(workdir / "checkpoints")[-1]
    assert 3 <= done < 10 and rows(workdir / "metrics.jsonl")[-1]["step"] == done
    run("train", workdir, *quick, *SYNCHRONOUS)
    _, metrics = check_history(workdir, 10)
    _, expected = check_history(whole, 10)
    for row, other in zip(metrics, expected, strict=True):
        for name in ("reward/mean", "response_length/mean", "prompt_length/mean", "learning_rate", "ledger/trained"):
            assert row[name] == other[name], (row["step"], name)
        for name in ("loss/policy", "entropy", "grad_norm", "advantage/mean"):
            assert row[name] == pytest.approx(other[name], abs=2e-4), (row["step"], name)
    ours, theirs = (load_policy(run_of / "policy")[1] for run_of in (workdir, whole))
    start = load_policy(warm / "policy")[1]
    assert max(np.abs(a - b).max() for a, b in zip(_leaves(start), _leaves(theirs), strict=True)) > 1e-3, "the training moved the weights"
    for a, b in zip(_leaves(ours), _leaves(theirs), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-4)


def test_killed_run_goes_on(tmp_path, quick):
    """kill -9 in the warm-up, between steps and in a save, then Ctrl-C, then to the end: always the same command."""
    cache, verifier, _ = quick
    workdir = tmp_path / "killed"
    checkpoints = workdir / "checkpoints"
    settings = (cache, verifier, "sft.steps=300", "sft.checkpoint_every=20", f"trainer.steps={KILLED_STEPS}", "eval.every_steps=10")

    def begin(moment):
        program = Started("train", workdir, *settings)
        program.until(moment)
        return program

    begin(lambda: len(saved(workdir / "warmup")) and saved(workdir / "warmup")[-1] < 300).kill()
    assert not checkpoints.exists() or not saved(checkpoints)

    begin(lambda: len(rows(workdir / "metrics.jsonl")) >= 5).kill()
    warm_steps = [row["step"] for row in rows(workdir / "warmup.jsonl")]
    assert warm_steps == sorted(set(warm_steps)) and warm_steps[-1] == 300, "the warm-up went on where it was"

    first = saved(checkpoints)
    assert first, "a checkpoint was whole before the kill"

    def saving():
        return any(p.name.split(".")[0].isdigit() and "tmp" in p.name and int(p.name.split(".")[0]) > first[-1] + 2 for p in checkpoints.glob("*tmp*"))

    begin(saving).kill()
    second = saved(checkpoints)
    assert second[-1] > first[-1]

    reached = second[-1]
    program = begin(lambda: rows(workdir / "metrics.jsonl")[-1]["step"] >= reached + 3 and saved(checkpoints)[-1] > reached)
    program.send(signal.SIGINT)
    assert program.end(30.0) == 128 + signal.SIGINT
    assert saved(checkpoints)[-1] == rows(workdir / "metrics.jsonl")[-1]["step"] < KILLED_STEPS

    run("train", workdir, *settings)
    events, metrics = check_history(workdir, KILLED_STEPS)
    assert all(row["staleness/max"] <= 4 for row in metrics), "the bound holds from the first resumed step on (system-019)"
    assert sum(event["event"] == "resume" for event in events) >= 2
    evaluated = [row["step"] for row in rows(workdir / "eval.jsonl")]
    assert evaluated == sorted(set(evaluated)) and (evaluated[0], evaluated[-1]) == (0, KILLED_STEPS)


def test_second_signal_ends_at_once(tmp_path, quick):
    """Also where the first one cannot act yet: while programs compile and reward processes start."""
    workdir = tmp_path / "twice"
    program = Started("train", workdir, *quick)
    program.until(lambda: (workdir / "checkpoints").exists())
    time.sleep(1.0)
    program.until(lambda: True)
    program.send(signal.SIGINT)
    time.sleep(0.3)
    sent = time.monotonic()
    program.send(signal.SIGINT)
    assert program.end(5.0) == 128 + signal.SIGINT and time.monotonic() - sent < 5.0


def _leaves(tree):
    return [leaf for value in tree.values() for leaf in _leaves(value)] if isinstance(tree, dict) else [np.asarray(tree)]
