"""The study's table, a row for each loss and η: in the terminal, as CSV and as Markdown.

Invariant: the three hold the same numbers; means are over seeds, ± is the half of a 95 % t-interval.
"""

from __future__ import annotations

import csv
import io
import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from areal_jax.experiments.intervals import Interval, axes, by_seed, interval
from areal_jax.experiments.results import CellResult
from areal_jax.experiments.study import Cell

WIDTH = 150


def _clipped(result: CellResult) -> float | None:
    return result.steps_mean("clip_ratio/low", "clip_ratio/high")


COLUMNS: dict[str, Callable[[CellResult], float | None]] = {
    "before": lambda r: r.before,
    "final": lambda r: r.final,
    "late": lambda r: r.late,
    "overall": lambda r: r.overall,
    "reward": lambda r: r.steps_mean("reward/mean", late=True),
    "stale": lambda r: r.steps_mean("staleness/mean"),
    "stale late": lambda r: r.steps_mean("staleness/mean", late=True),
    "oldest": lambda r: r.steps_max("staleness/max"),
    "spans": lambda r: r.steps_max("trajectory_spans/max"),
    "clipped": _clipped,
    "ESS": lambda r: r.steps_mean("importance_weight/ess"),
    "w max": lambda r: r.steps_max("importance_weight/max"),
    "entropy": lambda r: r.steps_mean("entropy", late=True),
}
"""Name → value of a cell. Those of ``WITH_INTERVAL`` are shown with one; of ``GREATEST`` the greatest over seeds is shown, of others the mean."""
WITH_INTERVAL = ("final", "late", "overall")
GREATEST = ("oldest", "spans", "w max")

LEGEND = (
    "held-out accuracy: before (the warm-up), final (last weights), late (mean of the evaluations in the last quarter), overall (mean of all after the first); "
    "n: seeds; reward, entropy: training batches of the second half; stale: mean age of trained tokens, over all steps and over the second half; oldest: "
    "greatest age; spans: most versions in one trajectory; clipped: share of trained tokens; ESS, w max: of π_prox/π_behav"
)


def lines(results: Mapping[Cell, CellResult]) -> list[dict[str, Any]]:
    """A dict for each loss and η: loss, η, n (seeds), NaN (of them diverged), and each of ``COLUMNS`` as an Interval, a number or None."""
    losses, etas = axes(results)
    found = []
    for loss in losses:
        for eta in etas:
            cells = list(by_seed(results, loss, eta).values())
            if not cells:
                continue
            line: dict[str, Any] = {"loss": loss, "η": eta, "n": len(cells), "NaN": sum(r.found["diverged"] is not None for r in cells)}
            for name, measure in COLUMNS.items():
                values = [value for result in cells if (value := measure(result)) is not None]
                if not values:
                    line[name] = None
                elif name in WITH_INTERVAL:
                    line[name] = interval(values)
                else:
                    line[name] = max(values) if name in GREATEST else statistics.fmean(values)
            found.append(line)
    return found


def as_text(value: Any) -> str:
    """A cell of the table."""
    if value is None:
        return "-"
    if isinstance(value, float):
        return f"{value:.0f}" if value == int(value) else f"{value:.1f}" if abs(value) >= 10 else f"{value:.3f}" if abs(value) >= 0.01 else f"{value:.1g}"
    return str(value)


def markdown(found: Sequence[Mapping[str, Any]]) -> str:
    """The table for a README."""
    names = list(found[0])
    rows = [" | ".join(as_text(line[name]) for name in names) for line in found]
    return "\n".join([f"| {' | '.join(names)} |", f"|{'---|' * len(names)}", *(f"| {row} |" for row in rows)]) + "\n"


def as_csv(found: Sequence[Mapping[str, Any]]) -> str:
    """The table with full precision; a column with an interval is two, the mean and half the interval's width."""
    flat = []
    for line in found:
        row: dict[str, Any] = {}
        for name, value in line.items():
            if isinstance(value, Interval):
                row |= {name: value.mean, f"{name} ±": value.half}
            else:
                row[name] = value
        flat.append(row)
    stream = io.StringIO()
    writer = csv.DictWriter(stream, list(flat[0]))
    writer.writeheader()
    writer.writerows(flat)
    return stream.getvalue()


def show(found: Sequence[Mapping[str, Any]], console: Console | None = None) -> None:
    """Prints the table."""
    table = Table(title="held-out accuracy by loss and η", title_justify="left", caption=LEGEND, caption_justify="left")
    for name in found[0]:
        table.add_column(name, justify="left" if name == "loss" else "right", no_wrap=True)
    before = None
    for line in found:
        if before not in (None, line["loss"]):
            table.add_section()
        before = line["loss"]
        table.add_row(*(as_text(value) for value in line.values()))
    (console or Console(width=WIDTH, highlight=False)).print(table)
