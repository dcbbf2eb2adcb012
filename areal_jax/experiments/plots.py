"""The study's plots: accuracy against η in text and as PNG, learning curves as PNG.

Invariants:
* Points are means over seeds, bars and bands 95 % t-intervals; of one seed there is neither.
* matplotlib is asked for by ``require`` before anything is run, and imported only to draw.
"""

from __future__ import annotations

import importlib.util
import pathlib
from collections.abc import Mapping
from typing import Any

from areal_jax.config import ConfigError
from areal_jax.experiments.intervals import Measure, axes, by_seed, interval
from areal_jax.experiments.results import CellResult
from areal_jax.experiments.study import Cell

MARKS = "odxs^v*+"
HEIGHT, COLUMN = 16, 4
"""Of the text plot: lines of its field, characters of a point."""


def require() -> None:
    """Refuses where matplotlib is not installed.

    Raises:
      ConfigError: says how to install it.
    """
    if importlib.util.find_spec("matplotlib") is None:
        raise ConfigError("the plots need matplotlib, which is not installed; pip install 'areal_jax[plots]', or set --plots=off")


def text_plot(results: Mapping[Cell, CellResult], measure: Measure, title: str) -> str:
    """Accuracy against η: a mark at the mean, a bar over the interval, a column for each loss at each η."""
    losses, etas = axes(results)
    points = {(loss, eta): interval([measure(r) for r in cells.values()]) for loss in losses for eta in etas if (cells := by_seed(results, loss, eta))}
    low, high = min(p.low for p in points.values()), max(p.high for p in points.values())
    low, high = (low - 0.05, high + 0.05) if high - low < 0.02 else (low, high)
    field = [[" "] * (len(etas) * (len(losses) + 1) * COLUMN) for _ in range(HEIGHT)]

    def height(value: float) -> int:
        return round((high - value) / (high - low) * (HEIGHT - 1))

    for i, eta in enumerate(etas):
        for k, loss in enumerate(losses):
            if (loss, eta) in points:
                p, column = points[loss, eta], (i * (len(losses) + 1) + k) * COLUMN + 1
                for line in range(height(p.high), height(p.low) + 1):
                    field[line][column] = "|"
                field[height(p.mean)][column] = MARKS[k % len(MARKS)]
    width = (len(losses) + 1) * COLUMN
    values = [high - (high - low) * line / (HEIGHT - 1) for line in range(HEIGHT)]
    rows = [f"{value:6.3f} ┤{''.join(line).rstrip()}" for value, line in zip(values, field, strict=True)]
    rows.append(f"{'':6} └{'─' * (width * len(etas))}")
    rows.append(f"{'η':>6}  " + "".join(f" {eta:<{width - 1}}" for eta in etas))
    legend = ", ".join(f"{MARKS[k % len(MARKS)]} {loss}" for k, loss in enumerate(losses))
    return "\n".join([f"{title} ({legend}; | is the 95 % interval)", *rows])


def draw_accuracy(results: Mapping[Cell, CellResult], measures: Mapping[str, Measure], file: pathlib.Path) -> None:
    """Accuracy against η with error bars, a panel for each measure, a line for each loss."""
    figure, panels, pyplot = _figure(len(measures))
    losses, etas = axes(results)
    for panel, (title, measure) in zip(panels, measures.items(), strict=True):
        for k, loss in enumerate(losses):
            known = [(i, interval([measure(r) for r in cells.values()])) for i, eta in enumerate(etas) if (cells := by_seed(results, loss, eta))]
            places = [i + 0.06 * (k - (len(losses) - 1) / 2) for i, _ in known]
            panel.errorbar(places, [p.mean for _, p in known], [p.half or 0.0 for _, p in known], marker="o", capsize=3, label=loss)
        panel.set_xticks(range(len(etas)), [str(eta) for eta in etas])
        panel.set(xlabel="η, bound on staleness (steps)", title=title)
        panel.grid(alpha=0.3)
    panels[0].set_ylabel("held-out accuracy")
    panels[0].legend()
    _save(figure, file, pyplot)


def draw_curves(results: Mapping[Cell, CellResult], file: pathlib.Path) -> None:
    """Held-out accuracy against the step, a panel for each loss, a line and a band for each η."""
    losses, etas = axes(results)
    figure, panels, pyplot = _figure(len(losses))
    for panel, loss in zip(panels, losses, strict=True):
        for k, eta in enumerate(etas):
            cells = list(by_seed(results, loss, eta).values())
            if not cells:
                continue
            curves = [{row["step"]: row["accuracy"] for row in r.found["evaluations"]} for r in cells]
            steps = sorted(set.intersection(*(set(curve) for curve in curves)))
            points = [interval([curve[step] for curve in curves]) for step in steps]
            colour = pyplot.get_cmap("viridis")(k / max(1, len(etas) - 1) * 0.9)
            panel.plot(steps, [p.mean for p in points], color=colour, label=f"η = {eta}")
            if len(cells) > 1:
                panel.fill_between(steps, [p.low for p in points], [p.high for p in points], color=colour, alpha=0.12, linewidth=0)
        panel.set(xlabel="training step", title=loss)
        panel.grid(alpha=0.3)
    panels[0].set_ylabel("held-out accuracy")
    panels[-1].legend(loc="lower right")
    _save(figure, file, pyplot)


def _figure(count: int) -> tuple[Any, list[Any], Any]:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, panels = pyplot.subplots(1, count, figsize=(5.2 * count, 4.0), sharey=True, squeeze=False)
    return figure, list(panels[0]), pyplot


def _save(figure: Any, file: pathlib.Path, pyplot: Any) -> None:
    figure.tight_layout()
    figure.savefig(file, dpi=130)
    pyplot.close(figure)
