"""The files of a study's cells: one JSON file each.

Invariants:
* A file is written under another name and renamed: it is whole or not there.
* A file holds the settings it was made with; with others it is refused, never mixed.
"""

from __future__ import annotations

import dataclasses
import json
import os
import pathlib
from collections.abc import Mapping
from typing import Any

from areal_jax.config import ConfigError
from areal_jax.experiments.study import Cell, difference


@dataclasses.dataclass(frozen=True)
class CellResult:
    """A cell and what ``cell.CellRun.measure`` found of it."""

    cell: Cell
    settings: Mapping[str, Any]
    found: Mapping[str, Any]

    @property
    def before(self) -> float:
        """Held-out accuracy of the warm-up's policy."""
        return self.found["evaluations"][0]["accuracy"]

    @property
    def final(self) -> float:
        """Held-out accuracy of the last weights."""
        return self.found["evaluations"][-1]["accuracy"]

    @property
    def late(self) -> float:
        """Mean held-out accuracy of the evaluations in the last quarter of the steps, the last one included."""
        rows = self.found["evaluations"]
        end = rows[-1]["step"]
        values = [row["accuracy"] for row in rows if row["step"] > 0.75 * end] or [rows[-1]["accuracy"]]
        return sum(values) / len(values)

    @property
    def overall(self) -> float:
        """Mean held-out accuracy of all evaluations after the first: how fast it was learnt."""
        values = [row["accuracy"] for row in self.found["evaluations"][1:]]
        return sum(values) / len(values)

    def steps_mean(self, *names: str, late: bool = False) -> float | None:
        """Mean over the steps (``late``: of their second half) of the sum of metrics; None where none was measured."""
        rows = self.found["steps"][len(self.found["steps"]) // 2 if late else 0 :]
        values = [sum(row[name] for name in names) for row in rows if all(row[name] is not None for name in names)]
        return sum(values) / len(values) if values else None

    def steps_max(self, name: str) -> float | None:
        """Greatest value of a metric over the steps."""
        return max((row[name] for row in self.found["steps"] if row[name] is not None), default=None)


def save_cell(file: pathlib.Path, cell: Cell, settings: Mapping[str, Any], found: Mapping[str, Any]) -> None:
    """Writes a cell's file, whole or not at all."""
    fresh = file.with_name(f".{file.name}.{os.getpid()}")
    with open(fresh, "w") as stream:
        json.dump({"cell": dataclasses.asdict(cell), "settings": dict(settings), **found}, stream, allow_nan=False)
        stream.write("\n")
        stream.flush()
        os.fsync(stream.fileno())
    os.replace(fresh, file)


def load_cells(directory: pathlib.Path, settings: Mapping[str, Any] | None = None) -> dict[Cell, CellResult]:
    """The finished cells of a directory.

    Args:
      directory: of the cells' files.
      settings: what all of them must have been made with; None: those of the first.

    Raises:
      ConfigError: a file is not a cell's, or was made with other settings.
    """
    results: dict[Cell, CellResult] = {}
    for file in sorted(directory.glob("*.json")):
        try:
            content = json.loads(file.read_text())
            cell = Cell(**content.pop("cell"))
            own: Mapping[str, Any] = content.pop("settings")
            found = {name: content[name] for name in ("evaluations", "steps", "staleness_tokens", "diverged")} | content
        except (ValueError, KeyError, TypeError) as error:
            raise ConfigError(f"'{file}' must be a cell's file as this program writes it: {error!r}; remove it, and its cell is run again") from error
        settings = own if settings is None else settings
        unlike = difference(settings, own)
        if unlike:
            raise ConfigError(f"'{file}' was made with {unlike}; results of unlike settings are not mixed: take the same flags, or another --out")
        results[cell] = CellResult(cell, own, found)
    return results
