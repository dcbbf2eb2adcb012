"""Supervised learning: fine-tuning on rows of your own, or the warm-up that reinforcement learning starts from.

  python launch/sft.py --config=configs/sft.py --config.model.path=DIRECTORY --config.sft.data=conversations.jsonl --workdir=runs/tuned
  python launch/sft.py --config=configs/sft.py:dpo --config.model.path=DIRECTORY --config.sft.data=preferences.parquet
  python launch/train.py --config=configs/math.py --config.model.path=runs/tuned/policy --config.task.path=rows.jsonl    # goes on from there

  python launch/sft.py --config=configs/math.py --workdir=runs/warm                                # the task's demonstrations
  python launch/train.py --config=configs/math.py --workdir=runs/warm                               # goes on with reinforcement learning there
  python launch/train.py --config=configs/math.py --config.sft.path=runs/warm/warmup --workdir=runs/rl   # or elsewhere, as often as wanted

Before and after, the held-out loss is measured (fine-tuning), or the held-out accuracy (warm-up). The same command with the same --workdir goes on after a
stop; the policy is exported to WORKDIR/policy. Keys are listed in areal_jax/config_fields.py, section sft.
"""

import pathlib
import time
from typing import Any

from areal_jax.config import Config, ConfigError, load, run_main
from areal_jax.workdir import open_workdir


def main(argv: list[str]) -> int:
    config, workdir, _ = load(argv)
    if config.sft.data:
        return fine_tune(config, workdir)
    if not config.sft.steps and not config.sft.path:
        raise ConfigError("'sft.steps' must be at least 1 for a warm-up; got 0; set --config.sft.steps=N, or --config.sft.data=FILE to learn rows of your own")
    if any((workdir / "checkpoints").glob("*")):
        raise ConfigError(f"'{workdir}' holds a training run, whose policy a warm-up would replace; choose another by --workdir=DIR")
    open_workdir(workdir, config)
    return warm_up_alone(config, workdir)


def fine_tune(config: Config, workdir: pathlib.Path) -> int:
    """Learns the rows of ``sft.data``."""
    open_workdir(workdir, config)

    from areal_jax.assembly import load_examples, make_policy, make_tuner, save_policy, start_devices
    from areal_jax.cluster.signals import StopSignal
    from areal_jax.telemetry.live import LiveView
    from areal_jax.telemetry.tuning import TuningMetrics, summary_of
    from areal_jax.trainer.tuning import Tuning

    started = time.monotonic()
    with (
        StopSignal() as stop,
        LiveView(config.telemetry.live, 0) as live,
        TuningMetrics(workdir, config.sft.objective, config.telemetry.tensorboard) as metrics,
    ):
        live.stage("rows", 0)
        tokenizer, data = load_examples(config)
        for line in data.report():
            live.message(line)
        meshes = start_devices(config)
        model, params = make_policy(config, tokenizer, meshes.everyone)
        live.stage("compiling", 0)
        config, trainer = make_tuner(config, model, meshes.everyone, params, data)
        del params  # the trainer has its own, which its steps overwrite
        corpus = trainer.corpus
        live.message(
            f"{meshes.everyone.size} × {meshes.everyone.devices.flat[0].platform}; {len(data.train)} examples with {corpus.trained_tokens} learnt tokens in "
            f"{len(corpus.bins)} rows of {data.capacity} ({100 * corpus.efficiency:.1f} % full), {len(data.heldout) or 'none'} held out; "
            f"{config.sft.steps} steps; files in {workdir}"
        )
        tuning = Tuning(config, trainer, workdir / "checkpoints", data.fingerprint)
        try:
            if tuning.resumed is not None:
                live.message(f"resumed at step {tuning.resumed}")
            metrics.rewind(-1 if tuning.resumed is None else tuning.resumed)
            live.stage("training", config.sft.steps)
            finished = tuning.run(
                lambda row: live.update_metrics(metrics.write(row), step=row["step"]),
                lambda row: live.update_metrics(metrics.write_eval(row)),
                lambda: stop.requested,
            )
        finally:
            tuning.close()
        if not finished:
            live.message(f"{stop.reason}: stopped after step {trainer.version}; the same command with --workdir={workdir} goes on from there")
            return stop.exit_code
        save_policy(config, workdir / "policy", model, trainer.policy, tokenizer)
        live.summary(
            {
                **summary_of(metrics.evaluations()),
                "time": f"{time.monotonic() - started:.0f} s",
                "policy": str(workdir / "policy"),
                "metrics": f"{workdir}/metrics.jsonl, eval.jsonl; tensorboard --logdir {workdir}/tensorboard",
            }
        )
    return 0


def warm_up_alone(config: Config, workdir: pathlib.Path) -> int:
    """Learns the task's demonstrations."""
    from areal_jax.assembly import evaluation_alone, load_problems, make_policy, save_policy, start_devices
    from areal_jax.cluster.signals import StopSignal
    from areal_jax.data.task import demonstrations
    from areal_jax.telemetry.live import LiveView
    from areal_jax.telemetry.metrics import MetricsWriter
    from areal_jax.trainer.warmup import Interrupted, warm_up

    started = time.monotonic()
    with StopSignal() as stop, LiveView(config.telemetry.live, config.sft.steps) as live, MetricsWriter(workdir, config.telemetry.tensorboard) as metrics:
        live.stage("problems", 0)
        tokenizer, task, config = load_problems(config)
        for line in task.report():
            live.message(line)
        meshes = start_devices(config)
        live.message(f"{meshes.describe()}; {len(task.train)} training and {len(task.heldout)} held-out problems; files in {workdir}")
        model, params = make_policy(config, tokenizer, meshes.everyone)
        metrics.rewind(-1)  # evaluations of an earlier try

        def show(row: dict[str, Any]) -> None:
            live.update_metrics(metrics.write_eval(row))

        with evaluation_alone(config, tokenizer, task, model, meshes, show, lambda: stop.requested) as evaluate:
            live.stage("evaluation", 0)
            before = evaluate(params, 0)
            live.stage("warm-up")
            try:
                params = warm_up(
                    config,
                    model,
                    meshes.everyone,
                    params,
                    lambda: demonstrations(config, task, tokenizer),
                    workdir / "warmup",
                    on_row=lambda row: live.update_metrics(metrics.write_warmup(row), step=row["step"]),
                    on_resume=metrics.rewind_warmup,
                    stop_requested=lambda: stop.requested,
                )
            except Interrupted as interrupted:
                live.message(str(interrupted))
                return stop.exit_code
            live.stage("evaluation", 0)
            after = evaluate(params, config.sft.steps)
            if before is None or after is None:
                live.message(f"{stop.reason}: stopped in an evaluation; the same command with --workdir={workdir} repeats it")
                return stop.exit_code
        save_policy(config, workdir / "policy", model, params, tokenizer)
        live.summary(
            {
                "held-out accuracy before": f"{before['eval/accuracy']:.3f} ± {before['eval/confidence95']:.3f} ({before['eval/n']} problems)",
                "held-out accuracy after": f"{after['eval/accuracy']:.3f} ± {after['eval/confidence95']:.3f} ({after['eval/n']} problems)",
                "time": f"{time.monotonic() - started:.0f} s",
                "policy": str(workdir / "policy"),
                "warm-up": f"{workdir}/warmup (for --config.sft.path)",
                "metrics": f"{workdir}/warmup.jsonl, eval.jsonl; tensorboard --logdir {workdir}/tensorboard",
            }
        )
    return 0


if __name__ == "__main__":
    run_main(main)
