"""``launch/benchmark.py training``: what asynchrony brings, by the same training, synchronous and asynchronous, in turn, from one warm-up.

Invariants:
* Both sides train the same number of samples on the same devices.
* A side's time is that of its training steps, from the first request to the last update; start-up, compilation and evaluation are left out.
"""

from __future__ import annotations

import json
import pathlib
import statistics
import subprocess
import sys

from areal_jax.benchmarks.loads import whole_number
from areal_jax.config import ConfigError, load

PROGRAM = pathlib.Path(__file__).resolve().parents[2] / "launch" / "train.py"


def training_seconds(workdir: pathlib.Path) -> tuple[float, float]:
    """(seconds of all training steps, mean reward of the last 10) of a finished run."""
    rows = [json.loads(line) for line in (workdir / "metrics.jsonl").read_text().splitlines()]
    return sum(row["time/step"] for row in rows), statistics.fmean(row["reward/mean"] for row in rows[-10:])


def main(argv: list[str]) -> int:
    """Prints each run, the medians and their ratio."""
    config, workdir, flags = load(argv, flags=("warmup", "repeats", "steps"))
    if "warmup" not in flags:
        raise ConfigError("'--warmup' must be the warmup directory of a run; make one by: python launch/sft.py --config=configs/math.py")
    if not config.rollout.max_staleness:
        raise ConfigError(f"'rollout.max_staleness' of the asynchronous side must be at least 1; got {config.rollout.max_staleness}")
    repeats, steps = (whole_number(name, flags.get(name, default)) for name, default in (("repeats", "3"), ("steps", "40")))
    sides = {"asynchronous": config.rollout.max_staleness, "synchronous": 0}
    joined = " ".join(argv).replace(" --", "\0--").replace(" ", "=").split("\0")  # --name VALUE → --name=VALUE
    passed_on = [a for a in joined if a.startswith(("--config=", "--config."))]
    seconds: dict[str, list[float]] = {side: [] for side in sides}
    for repeat in range(repeats):
        for side, staleness in sides.items():
            here = workdir / f"{side}-{repeat}"
            command = [
                sys.executable,
                str(PROGRAM),
                *passed_on,
                f"--workdir={here}",
                f"--config.sft.path={flags['warmup']}",
                f"--config.rollout.max_staleness={staleness}",
                f"--config.trainer.steps={steps}",
                "--config.eval.every_steps=0",
                "--config.eval.problems=64",
                "--config.checkpoint.every_steps=0",
                "--config.telemetry.live=off",
            ]
            subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
            spent, reward = training_seconds(here)
            seconds[side].append(spent)
            print(f"{side} (η = {staleness}) run {repeat + 1}: {spent:.1f} s for {steps} steps, reward at the end {reward:.3f}", flush=True)
    medians = {side: statistics.median(values) for side, values in seconds.items()}
    print(f"medians: asynchronous {medians['asynchronous']:.1f} s, synchronous {medians['synchronous']:.1f} s")
    print(f"ratio asynchronous / synchronous: {medians['asynchronous'] / medians['synchronous']:.3f}")
    return 0
