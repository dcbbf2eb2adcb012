"""An asynchronous run with every part of an algorithm that is off by default."""

import json

from launch_programs import run

PARTS = {
    "loss": "gspo",
    "decoupled": True,
    "proximal": "log_linear",
    "aggregation": "prompt",
    "advantage": "reinforce_pp_baseline",
    "kl_coefficient": 0.01,
    "entropy_coefficient": 0.01,
    "overlong_penalty": 1.0,
    "overlong_buffer": 8,
    "dynamic_sampling": True,
    "dynamic_sampling_refills": 1,
}


def test_the_parts_run_together(tmp_path, quick):
    """Groups of equal rewards are dropped by name and others take their places, the ledger closes, the reference stands where the run started."""
    overrides = [f"algorithm.{key}={value}" for key, value in PARTS.items()]
    run("train", tmp_path, *quick, *overrides, "trainer.optimizer=muon", "trainer.schedule=linear", "trainer.steps=3", "eval.every_steps=0")
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [1, 2, 3]
    assert all(row["ledger/residual"] == 0 and row["compile/steady_state"] == 0 and row["loss/policy"] is not None for row in rows)
    assert 0 < rows[-1]["drop/zero_std"] <= 3 * 4 and rows[-1]["ledger/dropped"] > 0
    assert rows[0]["reference_kl"] is not None and rows[-1]["reference_kl"] > 0
    assert rows[0]["learning_rate"] > rows[-1]["learning_rate"]
    dropped = [event for line in (tmp_path / "events.jsonl").read_text().splitlines() if (event := json.loads(line))["event"] == "drop"]
    assert len(dropped) >= rows[-1]["drop/zero_std"] and {event["reason"] for event in dropped} == {"zero_std"}
