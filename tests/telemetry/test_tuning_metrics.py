"""Files of a fine-tuning run: every key of the objective's table each time, and what is said at the end."""

import json

import pytest

from areal_jax.telemetry.metrics import MetricError
from areal_jax.telemetry.metrics_table import TUNING, TUNING_EVALUATION
from areal_jax.telemetry.tuning import TuningMetrics, summary_of


def lines(file):
    return [json.loads(line) for line in file.read_text().splitlines()]


@pytest.mark.parametrize("objective, name", [("sft", "loss/supervised"), ("dpo", "preference/margin")])
def test_rows_have_their_table_and_are_rewound(tmp_path, objective, name):
    for start in (1, 3):
        with TuningMetrics(tmp_path, objective) as metrics:
            metrics.rewind(start - 1)
            for step in range(start, 6 if start == 3 else 5):
                metrics.write({"step": step, "stage": "training", name: float(step)})
                metrics.write_eval({"step": step, "stage": "evaluation", "eval/loss": 1.0 / step})
            with pytest.raises(MetricError, match="unknown metric"):
                metrics.write({"step": 9, "stage": "training", "reward/mean": 1.0})
            evaluations = metrics.evaluations()
    assert [row[name] for row in lines(tmp_path / "metrics.jsonl")] == [1.0, 2.0, 3.0, 4.0, 5.0]
    assert all(row.keys() == TUNING[objective].keys() for row in lines(tmp_path / "metrics.jsonl"))
    assert all(row.keys() == TUNING_EVALUATION[objective].keys() for row in lines(tmp_path / "eval.jsonl"))
    assert [row["step"] for row in evaluations] == [1, 2, 3, 4, 5] and list((tmp_path / "tensorboard").glob("events.*"))


def test_summary_names_the_first_and_the_last():
    rows = [{"eval/loss": loss, "eval/tokens": 7} for loss in (2.0, 5.0, 1.0)]
    assert summary_of(rows) == {"held-out loss before": "2.0000 (perplexity 7.389, 7 tokens)", "held-out loss after": "1.0000 (perplexity 2.718, 7 tokens)"}
    pairs = [{"eval/loss": 0.5, "eval/margin": 0.25, "eval/correct": 0.75, "eval/n": 8}, {"eval/loss": None}]
    assert summary_of(pairs) == {"held-out loss before": "0.5000 (margin 0.250, 75.0 % of 8 pairs in order)", "held-out loss after": "not finite"}
    assert summary_of([]) == {}
