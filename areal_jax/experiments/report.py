"""What comes out of a study: its table, its verdicts and its plots, printed and written beside the cells.

Files in the study's directory: ``table.csv``, ``table.md``, ``verdicts.txt``, ``accuracy.txt``, and with matplotlib ``accuracy.png`` and ``curves.png``.
Invariant: each is written anew from the cells' files alone.
"""

from __future__ import annotations

import pathlib
from collections.abc import Mapping

from areal_jax.benchmarks import flags
from areal_jax.config import ConfigError
from areal_jax.experiments import plots
from areal_jax.experiments.intervals import Measure, verdicts
from areal_jax.experiments.results import CellResult, load_cells
from areal_jax.experiments.study import Cell
from areal_jax.experiments.tables import as_csv, lines, markdown, show

MEASURES: dict[str, Measure] = {"final": lambda r: r.final, "late": lambda r: r.late, "overall": lambda r: r.overall}
TITLES = {"final": "last weights", "late": "mean over the last quarter of the steps", "overall": "mean over all steps"}


def report(results: Mapping[Cell, CellResult], out: pathlib.Path, draw: bool) -> None:
    """Prints and writes everything."""
    found = lines(results)
    show(found)
    said = [f"{TITLES[name]}: {line}" for name, measure in MEASURES.items() for line in verdicts(results, measure)]
    said += [f"{cell} diverged: {r.found['diverged']}" for cell, r in sorted(results.items()) if r.found["diverged"]]
    picture = text_plots(results)
    print("\n".join([picture, "", *said]), flush=True)
    for name, text in (("table.csv", as_csv(found)), ("table.md", markdown(found)), ("verdicts.txt", "\n".join(said) + "\n"), ("accuracy.txt", picture + "\n")):
        (out / name).write_text(text)
    if draw:
        plots.draw_accuracy(results, {TITLES[name]: measure for name, measure in MEASURES.items()}, out / "accuracy.png")
        plots.draw_curves(results, out / "curves.png")


def text_plots(results: Mapping[Cell, CellResult]) -> str:
    """Accuracy against η, late and overall."""
    return "\n\n".join(plots.text_plot(results, MEASURES[name], f"held-out accuracy, {TITLES[name]}") for name in ("late", "overall"))


def main(argv: list[str]) -> int:
    """``launch/experiment.py report --out=DIR``: the report of a directory, finished or not."""
    values = flags.parse(argv, {"out": "runs/staleness", "plots": "on"})
    [drawn] = flags.chosen(values, "plots", ("on", "off"))
    if drawn == "on":
        plots.require()
    out = pathlib.Path(values["out"])
    results = load_cells(out / "cells")
    if not results:
        raise ConfigError(f"'--out' must be the directory of a study with a finished cell; '{out}' has none")
    report(results, out, drawn == "on")
    return 0
