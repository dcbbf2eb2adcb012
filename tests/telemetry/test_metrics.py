"""Every row has every key; unknown names are refused; a resumed run has each step once, in TensorBoard too."""

import json
import math

import jax.numpy as jnp
import numpy as np
import pytest
from tensorboardX.proto.event_pb2 import Event, SessionLog

from areal_jax.telemetry.metrics import MetricError, MetricsWriter, metric_of
from areal_jax.telemetry.metrics_table import COUNT, EVALUATION, TRAINING

PUBLISHED_NAMES = """
step version time stage
reward/mean reward/std reward/correct_fraction reward/zero_std_groups reward/latency_p50_s reward/latency_p99_s reward/timeouts reward/errors
staleness/mean staleness/p95 staleness/max staleness/generating_mean staleness/buffered_mean staleness/coverage trajectory_spans/mean trajectory_spans/max
importance_weight/mean importance_weight/max importance_weight/ess importance_weight/capped_fraction engine_gap/mean engine_gap/max staleness_gap/mean
mismatch_kl/engine mismatch_kl/staleness engine_gap/rescored_mean engine_gap/rescored_max time/rescore
loss/policy loss/kl loss/value entropy approx_kl clip_ratio/low clip_ratio/high grad_norm learning_rate update/skipped_nonfinite advantage/mean advantage/std
response_length/mean response_length/p50 response_length/p90 response_length/max truncated_ratio prompt_length/mean
tokens_per_second/generated tokens_per_second/trained tokens_per_second/prefill time/step time/train time/wait_for_batch time/wait_for_due
sampler/idle_fraction sampler/slot_occupancy sampler/kv_pages_used sampler/preemptions mfu
weight_sync/transfer_s weight_sync/pause_s weight_sync/rebuild_s weight_sync/bytes sampler/version sampler/interrupts
buffer/depth buffer/capacity groups/in_flight groups/due drop/stale drop/reward_error drop/zero_std drop/empty drop/overlong_prompt drop/worker_lost retries
ledger/generated ledger/trained ledger/dropped ledger/buffered ledger/in_flight ledger/residual
packing/efficiency packing/balance packing/micro_batches compile/count compile/steady_state
memory/trainer_bytes memory/sampler_bytes memory/host_rss_bytes
"""


def rows(path):
    return [json.loads(line, parse_constant=pytest.fail) for line in path.read_text().splitlines()]


def row(step, **more):
    return {"step": step, "version": step, "stage": "training", **more}


def test_table_has_the_published_names():
    assert not set(PUBLISHED_NAMES.split()) - set(TRAINING)
    assert {f"eval/{n}" for n in ("accuracy", "n", "k", "version", "lag_steps", "truncated_ratio", "confidence95")} <= set(EVALUATION)
    assert all(metric.doc for metric in TRAINING.values())


def test_every_row_has_every_key(tmp_path):
    with MetricsWriter(tmp_path, tensorboard=False, members=["reward/format"], clock=lambda: 7.0) as writer:
        writer.write(row(1))
        writer.write(row(2, **{"reward/mean": np.float32(0.5), "drop/odd": 2, "loss/policy": jnp.float32(1.5), "buffer/depth": np.int64(3)}))
        writer.write(row(3))
    first, second, third = rows(tmp_path / "metrics.jsonl")
    assert set(first) == {*TRAINING, "reward/format"}
    assert set(second) == set(third) == {*TRAINING, "reward/format", "drop/odd"}
    assert first["time"] == 7.0 and first["stage"] == "training"
    for name, metric in TRAINING.items():
        if name not in ("step", "version", "time", "stage"):
            assert first[name] == (0 if metric.kind == COUNT else None), name
    assert (second["reward/mean"], second["drop/odd"], second["loss/policy"], second["buffer/depth"]) == (0.5, 2, 1.5, 3)
    assert third["drop/odd"] == 0 and third["reward/format"] is None


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf, np.float32(np.nan), jnp.float32(jnp.inf)])
def test_nonfinite_is_null_and_counted(tmp_path, bad):
    with MetricsWriter(tmp_path, tensorboard=False) as writer:
        writer.write(row(1, **{"loss/policy": bad, "entropy": 1.0}))
    (only,) = rows(tmp_path / "metrics.jsonl")
    assert only["loss/policy"] is None and only["entropy"] == 1.0 and only["metrics/nonfinite"] == 1


@pytest.mark.parametrize(
    "wrong, named",
    [
        ({"staleness/maen": 1}, "staleness/mean"),
        ({"grad_nrm": 1}, "grad_norm"),
        ({"ledger/residuals": 1}, "ledger/residual"),
        ({"drop/two words": 1}, "drop/two words"),
        ({"drop/": 1}, "drop/"),
        ({"eval/accuracy/gcd": 1}, "eval/accuracy/gcd"),
        ({"entropy": "high"}, "entropy"),
        ({"entropy": np.zeros(2)}, "entropy"),
    ],
)
def test_wrong_row_is_refused_and_not_written(tmp_path, wrong, named):
    with MetricsWriter(tmp_path, tensorboard=False) as writer:
        with pytest.raises(MetricError, match=named):
            writer.write(row(1, **wrong))
        with pytest.raises(MetricError, match="'step'"):
            writer.write({"version": 1, "stage": "training"})
        writer.write(row(1))
    assert [set(r) for r in rows(tmp_path / "metrics.jsonl")] == [set(TRAINING)]


def test_explicit_none_of_a_count_stays_null(tmp_path):
    with MetricsWriter(tmp_path, tensorboard=False) as writer:
        writer.write(row(1, **{"weight_sync/bytes": None}))
    assert rows(tmp_path / "metrics.jsonl")[0]["weight_sync/bytes"] is None


def test_members_of_families_have_a_meaning():
    assert metric_of("drop/anything").kind == COUNT
    assert metric_of("reward/scorer").kind != COUNT
    assert metric_of("eval/accuracy/gcd_long", EVALUATION).unit == "fraction"


def scalars(directory):
    """(tag, step, value) that TensorBoard shows, by the file format: length, checksum, event, checksum; a START hides later steps before it."""
    shown = []
    for path in sorted(directory.glob("events.out.tfevents.*")):
        content = path.read_bytes()
        while content:
            length = int.from_bytes(content[:8], "little")
            event = Event.FromString(content[12 : 12 + length])
            content = content[16 + length :]
            if event.session_log.status == SessionLog.START:
                shown = [scalar for scalar in shown if scalar[1] < event.step]
            shown += [(value.tag, event.step, round(value.simple_value, 5)) for value in event.summary.value]
    return shown


def test_rewind_leaves_each_step_once(tmp_path):
    with MetricsWriter(tmp_path, members=["reward/format"]) as writer:
        for step in range(1, 6):
            writer.write(row(step, **{"reward/mean": step / 10}))
            writer.write_eval({"step": step, "stage": "periodic", "eval/accuracy": 0.1, "eval/accuracy/gcd": 0.2})
        writer.write_warmup({"step": 50, "stage": "warm-up", "loss/supervised": 2.0})
    with MetricsWriter(tmp_path) as writer:
        writer.rewind(3)
        writer.write(row(4, **{"reward/mean": 0.9}))
        writer.write_eval({"step": 4, "stage": "periodic", "eval/accuracy": 0.3})
        writer.sync()
    training, evaluation = rows(tmp_path / "metrics.jsonl"), rows(tmp_path / "eval.jsonl")
    assert [(r["step"], r["reward/mean"]) for r in training] == [(1, 0.1), (2, 0.2), (3, 0.3), (4, 0.9)]
    assert [r["step"] for r in evaluation] == [1, 2, 3, 4]
    assert evaluation[-1]["eval/accuracy/gcd"] is None and "reward/format" in training[-1]
    assert [r["step"] for r in rows(tmp_path / "warmup.jsonl")] == [50]
    board = scalars(tmp_path / "tensorboard")
    assert [s for s in board if s[0] == "reward/mean"] == [("reward/mean", 1, 0.1), ("reward/mean", 2, 0.2), ("reward/mean", 3, 0.3), ("reward/mean", 4, 0.9)]
    assert ("loss/supervised", 50, 2.0) in scalars(tmp_path / "tensorboard" / "warmup")


def test_rewind_of_the_warmup_leaves_the_training_alone(tmp_path):
    with MetricsWriter(tmp_path, tensorboard=False) as writer:
        writer.write(row(9))
        for step in (1, 2, 3):
            writer.write_warmup({"step": step, "stage": "warm-up"})
        writer.rewind_warmup(1)
    assert [r["step"] for r in rows(tmp_path / "warmup.jsonl")] == [1]
    assert [r["step"] for r in rows(tmp_path / "metrics.jsonl")] == [9]


def test_unwritable_directory_is_an_error(tmp_path):
    with pytest.raises(OSError):
        MetricsWriter(tmp_path / "absent")
