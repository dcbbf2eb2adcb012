"""What launch/sft.py, launch/train.py and launch/eval.py leave behind, each run once."""

import json

import numpy as np
from launch_programs import check_history, rows, run, saved

from areal_jax.models.checkpoint import load_policy
from areal_jax.models.tokenizer import load_tokenizer
from areal_jax.telemetry.metrics_table import EVALUATION, TRAINING

ETA, STEPS = 4, 8


def test_warm_up_alone(warm):
    assert saved(warm / "warmup") == [12] and rows(warm / "warmup.jsonl")[-1]["step"] == 12
    printed = (warm.parent / "sft.txt").read_text()
    assert "accuracy before" in printed and "accuracy after" in printed and "(16 problems)" in printed
    assert load_policy(warm / "policy")[0].layers == 1


def test_metrics(finished):
    _, metrics = check_history(finished, STEPS)
    for row in metrics:
        assert TRAINING.keys() <= row.keys()
        assert row["staleness/coverage"] == 1.0 and row["staleness/max"] <= ETA and row["compile/steady_state"] == 0
        assert row["engine_gap/max"] is None or row["engine_gap/max"] <= 1e-4
        assert 1 <= row["trajectory_spans/mean"] <= row["trajectory_spans/max"] <= ETA + 1
        assert row["metrics/nonfinite"] == 0 and 0 < row["packing/efficiency"] <= 1 and row["buffer/capacity"] == (ETA + 1) * 4
    assert metrics[0]["engine_gap/max"] is not None and max(r["staleness/max"] for r in metrics) > 0, "the run is asynchronous"
    assert any(r["reward/std"] > 0 for r in metrics) and any(r["grad_norm"] > 0 for r in metrics)


def test_other_files(finished):
    assert json.loads((finished / "config.json").read_text())["trainer"]["steps"] == STEPS
    evaluations = rows(finished / "eval.jsonl")
    assert all(EVALUATION.keys() <= row.keys() for row in evaluations)
    assert [evaluations[0]["step"], evaluations[-1]["step"]] == [0, STEPS] and evaluations[0]["eval/n"] == 16
    assert all(row["eval/n"] == 8 and row["eval/version"] == row["step"] for row in evaluations[1:-1])
    assert saved(finished / "checkpoints") == [6, 8]
    assert any(file.stat().st_size > 1000 for file in (finished / "tensorboard").glob("events.*"))
    trace = json.loads((finished / "trace.json").read_text())
    lanes = {event["args"]["name"] for event in trace if event["name"] == "thread_name"}
    assert {"trainer", "sampler/0", "rewards/0", "weights", "evaluation"} <= lanes
    spans = [event for event in trace if event["ph"] == "X"]
    assert all(event["dur"] >= 0 for event in spans) and sum(event["name"] == "train step" for event in spans) == STEPS


def test_exported_policy_is_evaluated(finished, cache, tmp_path):
    """The same policy under the same seed gives the same answers, whichever program asks."""
    model, params = load_policy(finished / "policy")
    assert (model.layers, model.hidden_size) == (1, 32) and load_tokenizer(finished / "policy").eos_ids == model.eos_ids
    assert all(np.isfinite(leaf).all() for block in params.values() for leaf in _leaves(block))
    printed, _ = run("eval", tmp_path / "eval", cache, f"model.path={finished / 'policy'}")
    (row,) = rows(tmp_path / "eval" / "eval.jsonl")
    assert row["eval/n"] == 16 and f"{row['eval/accuracy']:.3f} ± {row['eval/confidence95']:.3f}" in printed
    assert abs(row["eval/response_length"] - rows(finished / "eval.jsonl")[-1]["eval/response_length"]) < 1e-6, "the same draws as in training"


def _leaves(tree):
    return [leaf for value in tree.values() for leaf in _leaves(value)] if isinstance(tree, dict) else [np.asarray(tree)]
