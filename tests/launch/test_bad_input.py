"""A configuration that must not run ends at once: exit code 2, one message, no traceback, no JAX."""

import json
import subprocess

import pytest
from launch_programs import command, environment, run

WITHOUT_JAX = {
    "unknown key (system-044)": (["trainer.leraning_rate=1e-4"], ["trainer.leraning_rate", "trainer.learning_rate"]),
    "group of one (system-008)": (["rollout.group_size=1", "algorithm.advantage=grpo"], ["rollout.group_size", "algorithm.advantage"]),
    "missing file": (["task.path=nowhere.jsonl"], ["task.path", "nowhere.jsonl"]),
    "no divisor": (["trainer.groups_per_step=3"], ["trainer.groups_per_step", "trainer.minibatches"]),
}
WITH_JAX = {
    "rows on devices (system-033)": (
        ["cluster.host_devices=5", "cluster.sampler_devices=1", "cluster.trainer_devices=4", "trainer.micro_batch_rows=3"],
        ["trainer.micro_batch_rows", "4", "got 3"],
    ),
    "too many devices": (["cluster.trainer_devices=7"], ["cluster.trainer_devices", "7", "cluster.host_devices"]),
}


def refusal(workdir, *overrides):
    printed, error = run("train", workdir, *overrides, code=2)
    assert error.startswith("error: ") and error.count("\n") == 1 and "Traceback" not in error + printed
    return error


@pytest.mark.parametrize("name", WITHOUT_JAX)
def test_refused_before_jax(name, tmp_path):
    overrides, parts = WITHOUT_JAX[name]
    program = command("train", tmp_path / "run", *overrides)
    done = subprocess.run([program[0], "-X", "importtime", *program[1:]], env=environment(), capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    imported = {line.rsplit("|", 1)[-1].strip() for line in done.stderr.splitlines() if line.startswith("import time:")}
    assert "ml_collections" in imported and not imported & {"jax", "jaxlib", "orbax", "grain"}
    (error,) = [line for line in done.stderr.splitlines() if not line.startswith("import time:")]
    assert error.startswith("error: ") and all(part in error for part in parts), error
    assert not (tmp_path / "run").exists()


def test_unwritable_workdir(tmp_path):
    (tmp_path / "file").write_text("")
    assert "must be writable" in refusal(tmp_path / "file" / "run")


@pytest.mark.parametrize("name", WITH_JAX)
def test_refused_with_the_devices(name, tmp_path):
    overrides, parts = WITH_JAX[name]
    error = refusal(tmp_path / "run", *overrides)
    assert all(part in error for part in parts), error


def test_broken_row_may_end_the_run(tmp_path):
    data = tmp_path / "rows.jsonl"
    data.write_text(json.dumps({"question": "1 + 1?", "answer": "#### 2"}) + "\n" + '{"question": \n')
    assert f"{data}:2" in refusal(tmp_path / "run", f"task.path={data}", "task.on_bad_row=error")


def test_other_programs_refuse_too(tmp_path):
    _, error = run("eval", tmp_path / "eval", code=2)
    assert "model.path" in error
    _, error = run("sft", tmp_path / "sft", "sft.steps=0", code=2)
    assert "sft.steps" in error
    (tmp_path / "rl" / "checkpoints" / "3").mkdir(parents=True)
    _, error = run("sft", tmp_path / "rl", code=2)
    assert "holds a training run" in error
