"""``launch/experiment.py staleness``: what staleness costs, by loss: the same training under every bound η, in virtual time.

Invariants:
* Every flag and the configuration of every cell is checked before anything is run.
* A finished cell is one file; the same command goes on with those that are missing, whatever ended it before.
* What is reported is all that the directory holds: a study may grow by further η, losses and seeds under the same settings.
"""

from __future__ import annotations

import json
import pathlib
import time
from collections.abc import Mapping, Sequence
from typing import Any

from areal_jax.benchmarks import flags
from areal_jax.benchmarks.loads import whole_number
from areal_jax.config import Config, ConfigError, validate
from areal_jax.config_fields import FIELDS
from areal_jax.experiments import plots
from areal_jax.experiments.grid import Grid, Job, available_cores
from areal_jax.experiments.report import report
from areal_jax.experiments.results import load_cells
from areal_jax.experiments.study import SHORT, WARMUP_SECTIONS, Cell, cell_config, overridden, settings, study_config, warmup_config
from areal_jax.workdir import open_workdir

DEFAULTS = {
    "etas": "0,1,2,4,8,16",
    "losses": "decoupled_ppo,ppo",
    "seeds": "5",
    "steps": "",
    "learning-rate": "",
    "minibatches": "",
    "train-ticks": "32",
    "workers": "",
    "jobs": "",
    "out": "runs/staleness",
    "warmups": "",
    "plots": "on",
}


def main(argv: list[str]) -> int:
    """Runs the cells that are missing and reports."""
    from areal_jax.cluster.signals import StopSignal

    own = [argument for argument in argv if not argument.startswith("--config.")]
    values = flags.parse(own, DEFAULTS)
    overrides = [_override(argument) for argument in argv if argument.startswith("--config.")]
    overrides += [(key, values[flag]) for flag, key in SHORT.items() if values[flag]]
    base = overridden(study_config(), overrides)
    cells, ticks, cores = wanted_cells(values), flags.whole(values, "train-ticks"), chosen_cores(values["workers"])
    most = flags.whole(values, "jobs") if values["jobs"] else None
    [drawn] = flags.chosen(values, "plots", ("on", "off"))
    if drawn == "on":
        plots.require()
    out = pathlib.Path(values["out"])
    warmups = pathlib.Path(values["warmups"] or out / "warmups")
    jobs = make_jobs(base, cells, overrides, ticks, out, warmups)
    open_workdir(out, validate(base.copy_and_resolve_references()))
    for directory in ("cells", "logs"):
        (out / directory).mkdir(exist_ok=True)
    warmups.mkdir(parents=True, exist_ok=True)
    common = settings(base, ticks)
    done = load_cells(out / "cells", common)
    missing = [job for job in jobs if not job.result.exists()][:most]
    print(f"{len(cells)} cells, {sum(cell in done for cell in cells)} of them finished; {len(missing)} jobs to run, {len(cores)} at once", flush=True)
    with StopSignal(promise="stopping; finished cells are kept, and the same command goes on") as stop:
        grid = Grid(missing, cores, out / "logs", Progress(len(missing)), lambda job, cause: print(f"FAILED {job.name}: {cause}", flush=True))
        finished = grid.run(stop.wait)
    results = load_cells(out / "cells", common)
    if results:
        report(results, out, drawn == "on")
    if not finished:
        return stop.exit_code
    return 1 if grid.failed else 0


def _override(argument: str) -> tuple[str, str]:
    name, equals, value = argument.removeprefix("--config.").partition("=")
    if not equals:
        raise ConfigError(f"'{argument}' needs a value, as in {argument}=VALUE")
    return name, value


def wanted_cells(values: Mapping[str, str]) -> list[Cell]:
    """The grid of the flags, seed by seed, so that what is finished is a whole grid of fewer seeds.

    Raises:
      ConfigError: a flag names no grid.
    """
    etas = [whole_number("etas", part, 0) for part in values["etas"].split(",")]
    losses = flags.chosen(values, "losses", FIELDS["algorithm"]["loss"].choices)
    for name, parts in (("etas", etas), ("losses", losses)):
        if len(set(parts)) < len(parts):
            raise ConfigError(f"'--{name}' must name each value once; got '{values[name]}'")
    return [Cell(loss, eta, seed) for seed in range(flags.whole(values, "seeds")) for eta in etas for loss in losses]


def chosen_cores(text: str) -> list[int]:
    """A core for each worker; '' for all that there are."""
    cores = available_cores()
    count = whole_number("workers", text) if text else len(cores)
    if count > len(cores):
        raise ConfigError(f"'--workers' must be at most the {len(cores)} cores that this process may use, as each run has one; got {count}")
    return cores[:count]


def make_jobs(
    base: Config, cells: Sequence[Cell], overrides: Sequence[tuple[str, str]], train_ticks: int, out: pathlib.Path, warmups: pathlib.Path
) -> list[Job]:
    """The warm-up of each seed just before that seed's cells.

    Raises:
      ConfigError: a cell or a warm-up must not run with these settings, or the warm-up that is there was made with others.
    """
    common = {"overrides": [list(pair) for pair in overrides], "compiled": str((warmups / "compiled").absolute())}
    jobs: list[Job] = []
    for cell in cells:
        directory = (warmups / f"seed-{cell.seed}").absolute()
        policy = directory / "policy"
        if all(job.result != policy for job in jobs):
            check_warmup(directory, warmup_config(base, cell.seed))
            jobs.append(Job(f"warm-up-seed{cell.seed}", policy, None, {**common, "kind": "warm-up", "seed": cell.seed, "directory": str(directory)}))
        cell_config(base, cell, policy, warmups / "compiled", planned=True)
        file = (out / "cells" / f"{cell.name}.json").absolute()
        told = {"kind": "cell", "cell": {"loss": cell.loss, "eta": cell.eta, "seed": cell.seed}, "policy": str(policy), "result": str(file)}
        jobs.append(Job(cell.name, file, policy, {**common, **told, "train_ticks": train_ticks}))
    return jobs


def check_warmup(directory: pathlib.Path, config: Config) -> None:
    """Refuses a finished warm-up of other settings.

    Raises:
      ConfigError: naming the setting.
    """
    saved = directory / "config.json"
    if not (directory / "policy").exists() or not saved.exists():
        return
    theirs, mine = json.loads(saved.read_text()), json.loads(json.dumps(config.to_dict(), default=list))
    for section in WARMUP_SECTIONS:
        for key, value in mine[section].items():
            if theirs[section].get(key) != value:
                raise ConfigError(
                    f"'{directory}' was warmed up with '{section}.{key}' = {theirs[section].get(key)!r}, not {value!r}; take the same, or another --warmups"
                )


class Progress:
    """Prints a line for each finished job, with the time that the others may take."""

    def __init__(self, total: int):
        self.total, self.done = total, 0
        self.started = time.monotonic()

    def __call__(self, job: Job, seconds: float) -> None:
        self.done += 1
        left = (time.monotonic() - self.started) / self.done * (self.total - self.done)
        print(f"[{self.done}/{self.total}] {job.name}: {seconds:.0f} s{described(job)}; about {left / 60:.0f} min left", flush=True)


def described(job: Job) -> str:
    """What a finished cell found, in a few words; '' for a warm-up."""
    if job.result.suffix != ".json":
        return ""
    found: dict[str, Any] = json.loads(job.result.read_text())
    first, last = found["evaluations"][0]["accuracy"], found["evaluations"][-1]["accuracy"]
    tokens = {int(age): count for age, count in found["staleness_tokens"].items()}
    mean = sum(age * count for age, count in tokens.items()) / max(1, sum(tokens.values()))
    return f", held-out accuracy {first:.3f} → {last:.3f}, staleness {mean:.2f}" + (", DIVERGED" if found["diverged"] else "")
