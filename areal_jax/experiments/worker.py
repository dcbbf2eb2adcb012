"""The process of one job of a study: a seed's warm-up, or a cell. Started by ``experiments.grid``, which writes the job to its standard input.

Invariants:
* It computes on one core, which is chosen before JAX is imported, and on the CPU alone.
* It ends within a step of the program that started it, and leaves its result whole or not at all.
"""

from __future__ import annotations

import json
import os
import pathlib
import sys
from collections.abc import Callable
from typing import Any

FINISHED, STOPPED = 0, 75
"""Exit codes."""


def main() -> int:
    job = json.load(sys.stdin)
    if job["core"] is not None and hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {job["core"]})
    parent = os.getppid()
    return {"warm-up": warm_up_job, "cell": cell_job}[job["kind"]](job, lambda: os.getppid() != parent)


def cell_job(job: dict[str, Any], stop_requested: Callable[[], bool]) -> int:
    """Runs a cell and writes its file."""
    from areal_jax.experiments.cell import CellRun, StoppedError
    from areal_jax.experiments.results import save_cell
    from areal_jax.experiments.study import Cell, cell_config, overridden, settings, study_config

    base, cell = overridden(study_config(), job["overrides"]), Cell(**job["cell"])
    config = cell_config(base, cell, pathlib.Path(job["policy"]), pathlib.Path(job["compiled"]), planned=False)
    try:
        found = CellRun(config, job["train_ticks"], stop_requested, say).measure()
    except StoppedError:
        return STOPPED
    save_cell(pathlib.Path(job["result"]), cell, settings(base, job["train_ticks"]), found)
    return FINISHED


def warm_up_job(job: dict[str, Any], stop_requested: Callable[[], bool]) -> int:
    """Trains a seed's warm-up, or goes on with it, and exports its policy."""
    from areal_jax.assembly import make_policy, save_policy, start_devices
    from areal_jax.config import put
    from areal_jax.experiments.study import overridden, study_config, warmup_config
    from areal_jax.experiments.task import load_study_task, study_demonstrations
    from areal_jax.models.tokenizer import embedded_tokenizer
    from areal_jax.trainer.warmup import Interrupted, warm_up
    from areal_jax.workdir import open_workdir

    config = warmup_config(overridden(study_config(), job["overrides"]), job["seed"])
    directory = pathlib.Path(job["directory"])
    open_workdir(directory, config)
    put(config, "cluster.compilation_cache", job["compiled"])
    tokenizer = embedded_tokenizer()
    task = load_study_task(config, tokenizer)
    meshes = start_devices(config)
    model, params = make_policy(config, tokenizer, meshes.everyone)
    try:
        params = warm_up(
            config,
            model,
            meshes.everyone,
            params,
            lambda: study_demonstrations(config, task, tokenizer),
            directory / "warmup",
            on_row=lambda row: say(f"step {row['step']}: loss {row['loss/supervised']:.3f}, {row['time/step']:.2f} s a step"),
            stop_requested=stop_requested,
        )
    except Interrupted:
        return STOPPED
    unfinished = directory / "unfinished"
    save_policy(config, unfinished, model, params, tokenizer)
    unfinished.rename(directory / "policy")
    return FINISHED


def say(text: str) -> None:
    """A line of the job's log."""
    print(text, flush=True)


if __name__ == "__main__":
    sys.exit(main())
