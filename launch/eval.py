"""Evaluates an exported policy on the configuration's held-out problems.

  python launch/eval.py --config=configs/math.py --config.model.path=runs/math/policy
  python launch/eval.py --config=configs/math.py --config.model.path=runs/math/policy --config.eval.samples=8 --config.eval.temperature=0.7
  python launch/eval.py --config=configs/math.py --config.model.path=DIR --config.task.path=my_rows.jsonl --config.task.eval_path=held_out.jsonl

It prints the accuracy with its 95 % interval, over all problems and by kind, and writes eval.jsonl in its own --workdir. Problems are held out by
seed and task: take the same configuration as the training.
"""

from areal_jax.config import ConfigError, load, run_main
from areal_jax.workdir import open_workdir


def main(argv: list[str]) -> int:
    config, workdir, _ = load(argv)
    if not config.model.path:
        raise ConfigError("'model.path' must name the policy to evaluate, as in --config.model.path=runs/math/policy")
    open_workdir(workdir, config)

    from areal_jax.assembly import evaluation_alone, load_problems, make_policy, start_devices
    from areal_jax.cluster.signals import StopSignal
    from areal_jax.telemetry.live import LiveView
    from areal_jax.telemetry.metrics import MetricsWriter

    with StopSignal() as stop, LiveView(config.telemetry.live, 0) as live, MetricsWriter(workdir, config.telemetry.tensorboard) as metrics:
        live.stage("problems", 0)
        tokenizer, task, config = load_problems(config)
        for line in task.report():
            live.message(line)
        meshes = start_devices(config)
        model, params = make_policy(config, tokenizer, meshes.sampler, config.model.sampler_dtype)
        live.stage("evaluation", 0)
        with evaluation_alone(config, tokenizer, task, model, meshes, metrics.write_eval, lambda: stop.requested) as evaluate:
            row = evaluate(params, 0)
        if row is None:
            return stop.exit_code
        kinds = {name.removeprefix("eval/"): f"{value:.3f}" for name, value in row.items() if name.startswith("eval/accuracy/")}
        live.summary(
            {
                "held-out accuracy": f"{row['eval/accuracy']:.3f} ± {row['eval/confidence95']:.3f} (95 %)",
                **kinds,
                "problems": f"{row['eval/n']} held out, {row['eval/k']} samples each, temperature {config.eval.temperature:g}",
                "response length": f"{row['eval/response_length']:.1f} tokens, {100 * row['eval/truncated_ratio']:.1f} % cut off at the limit",
                "policy": config.model.path,
                "file": f"{workdir}/eval.jsonl",
            },
            title="evaluation",
        )
    return 0


if __name__ == "__main__":
    run_main(main)
