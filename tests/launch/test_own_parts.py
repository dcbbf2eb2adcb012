"""A user's rows, a user's verifier that fails, and other meshes."""

import json
import time

from launch_programs import check_history, rows, run, saved


def write_rows(path):
    """GSM8K's layout, and one broken row."""
    lines = [
        json.dumps(
            {"question": f"A box holds {a} pens. How many pens are in {b} boxes?", "answer": f"{a} times {b} is <<{a}*{b}={a * b}>>{a * b}.\n#### {a * b}"}
        )
        for a in range(2, 12)
        for b in range(2, 10)
    ]
    path.write_text("\n".join([*lines[:5], '{"question": "no answer"}', *lines[5:]]) + "\n")
    return path


def test_own_rows_failing_verifier_and_sharded_trainer(tmp_path, cache):
    """One check in ten raises: it counts as 0, is counted, and the run goes on (system-001); 2 + 2 devices, the trainer's parameters sharded."""
    workdir = tmp_path / "run"
    data = (f"task.path={write_rows(tmp_path / 'pens.jsonl')}", "rollout.page_size=8", "reward.verifier=launch_verifiers:fails_one_in_ten")
    devices = ("cluster.host_devices=4", "cluster.mesh.trainer=fsdp=2", "sft.steps=0", "eval.every_steps=0")
    printed, _ = run("train", workdir, cache, *data, *devices)
    assert "skipped 1 broken rows" in printed and "pens.jsonl:6" in printed
    assert "trainer 2 × cpu (fsdp=2), sampler 2 × cpu (data=2)" in printed
    events, metrics = check_history(workdir, 6)
    failed = [event for event in events if event["event"] == "reward" and not event["components"]]
    assert failed and all(event["reward"] == 0.0 for event in failed)
    assert sum(row["reward/errors"] for row in metrics) >= len(failed)
    assert all(event["problem"].startswith("pens.jsonl") for event in events if event["event"] == "admit")
    assert all(row["engine_gap/max"] is None or row["engine_gap/max"] <= 1e-4 for row in metrics)


def test_broken_verifier_ends_the_run(tmp_path, quick):
    cache, _, warm = quick
    workdir = tmp_path / "run"
    settings = ("reward.verifier=launch_verifiers:fails_always", "reward.max_consecutive_failures=5")
    _, error = run("train", workdir, cache, warm, *settings, code=1)
    assert "reward checks in a row failed ('reward.max_consecutive_failures')" in error and "ValueError: broken on purpose" in error
    assert len(rows(workdir / "metrics.jsonl")) < 6 and saved(workdir / "checkpoints")


def test_run_shorter_than_its_staleness(tmp_path, quick):
    """One step with η = 4 ends, saves and exports (system-035)."""
    workdir = tmp_path / "run"
    run("train", workdir, *quick, "trainer.steps=1", "rollout.max_staleness=4", "checkpoint.every_steps=0")
    ended = time.time()
    events, (row,) = check_history(workdir, 1)
    assert ended - row["time"] < 30 and saved(workdir / "checkpoints") == [1] and (workdir / "policy" / "model.safetensors").exists()
    assert sum(event["event"] == "admit" for event in events) == 4, "no group is admitted that no step will train"
