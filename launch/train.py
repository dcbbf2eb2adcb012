"""Trains a policy by fully asynchronous reinforcement learning.

  python launch/train.py --config=configs/math.py
  python launch/train.py --config=configs/math.py --config.rollout.max_staleness=0 --workdir=runs/synchronous
  python launch/train.py --config=configs/math.py --config.task.path=my_rows.jsonl

Keys are listed in areal_jax/config_fields.py. The same command with the same --workdir goes on after a stop.
"""

import time

from areal_jax.config import ConfigError, load, run_main
from areal_jax.workdir import open_workdir, save_config


def main(argv: list[str]) -> int:
    config, workdir, _ = load(argv)
    if config.sft.data:
        raise ConfigError(f"'sft.data' = '{config.sft.data}' is for launch/sft.py; fine-tune there, and name its policy directory as 'model.path' here")
    open_workdir(workdir, config)

    from areal_jax.assembly import load_problems, make_policy, start_devices
    from areal_jax.cluster.signals import StopSignal
    from areal_jax.data.task import demonstrations
    from areal_jax.run import Files, Run
    from areal_jax.telemetry.live import LiveView
    from areal_jax.trainer.warmup import Interrupted, warm_up

    started = time.monotonic()
    with StopSignal() as stop, LiveView(config.telemetry.live, config.trainer.steps) as live:
        live.stage("problems", 0)
        tokenizer, task, config = load_problems(config)
        save_config(workdir, config)
        for line in task.report():
            live.message(line)
        meshes = start_devices(config)
        live.message(f"{meshes.describe()}; {len(task.train)} training and {len(task.heldout)} held-out problems; files in {workdir}")
        model, params = make_policy(config, tokenizer, meshes.everyone if config.sft.steps or config.sft.path else meshes.trainer)
        files = Files(workdir, config)
        try:
            live.stage("warm-up", config.sft.steps)
            try:
                params = warm_up(
                    config,
                    model,
                    meshes.everyone,
                    params,
                    lambda: demonstrations(config, task, tokenizer),
                    workdir / "warmup",
                    on_row=lambda row: live.update_metrics(files.metrics.write_warmup(row), step=row["step"]),
                    on_resume=files.metrics.rewind_warmup,
                    stop_requested=lambda: stop.requested,
                )
            except Interrupted as interrupted:
                live.message(str(interrupted))
                return stop.exit_code
            warmed = time.monotonic()
            live.stage("compiling", 0)
            run = Run(config, tokenizer, task, model, meshes, params, files, live, lambda: stop.requested)
            del params  # the trainer has its own, which its steps overwrite
            try:
                if run.resumed is not None:
                    live.message(f"resumed at step {run.resumed}")
                else:
                    live.stage("evaluation", 0)
                    if run.evaluate() is None:
                        live.message(f"{stop.reason}: stopped in the first evaluation; the same command with --workdir={workdir} repeats it")
                        return stop.exit_code
                    if config.checkpoint.every_steps:
                        run.loop.checkpoint()
                live.stage("training")
                finished = run.loop.run()
                run.finish_evaluation()
                if not finished:
                    live.message(f"{stop.reason}: stopped after step {run.trainer.version}; the same command with --workdir={workdir} goes on from there")
                    return stop.exit_code
                live.stage("evaluation", 0)
                files.metrics.rewind_evaluation(config.trainer.steps - 1)
                last = run.evaluate()
                if last is None:
                    live.message(f"{stop.reason}: stopped in the last evaluation; the same command with --workdir={workdir} repeats it")
                    return stop.exit_code
                run.export(workdir / "policy")
            finally:
                run.close()
        finally:
            files.close()
        before = files.first_accuracy()
        live.summary(
            {
                "held-out accuracy before RL": before,
                "held-out accuracy after RL": f"{last['eval/accuracy']:.3f} ± {last['eval/confidence95']:.3f} ({last['eval/n']} problems)",
                "time": f"warm-up {warmed - started:.0f} s, RL {time.monotonic() - warmed:.0f} s",
                "policy": str(workdir / "policy"),
                "metrics": f"{workdir}/metrics.jsonl, eval.jsonl; tensorboard --logdir {workdir}/tensorboard",
                "timeline": f"{workdir}/trace.json (open in ui.perfetto.dev)",
            }
        )
    return 0


if __name__ == "__main__":
    run_main(main)
