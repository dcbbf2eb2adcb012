"""The metrics of a run: ``metrics.jsonl``, ``eval.jsonl``, ``warmup.jsonl`` and the same as TensorBoard scalars.

Invariants:
* A row has every key of its table, every time: a count that did not happen is 0, a value that was not measured (or is not finite) is null.
* A name that the table (``metrics_table.py``) does not have is an error, so a renamed metric cannot vanish in silence.
* A row is with the operating system when ``write`` returns; after ``rewind`` no row is of a step that will be done again.
"""

from __future__ import annotations

import difflib
import math
import os
import pathlib
import re
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np
from tensorboardX import SummaryWriter

from areal_jax.telemetry.lines import LineFile, read_lines
from areal_jax.telemetry.metrics_table import COUNT, EVALUATION, FAMILIES, NAME, TRAINING, WARMUP, Metric

NONFINITE = "metrics/nonfinite"
_WORD = re.compile(r"[A-Za-z0-9_.+-]+")


class MetricError(ValueError):
    """A row that the table does not allow."""


def metric_of(name: str, table: Mapping[str, Metric] = TRAINING) -> Metric:
    """What a name stands for.

    Raises:
      MetricError: no such metric; the text names the nearest one.
    """
    if name in table:
        return table[name]
    for prefix, metric in FAMILIES.items():
        if name.startswith(prefix) and any(known.startswith(prefix.rstrip("/")) for known in table) and _WORD.fullmatch(name[len(prefix) :]):
            return metric
    near = difflib.get_close_matches(name, table, n=1)
    raise MetricError(f"unknown metric '{name}'" + (f"; did you mean '{near[0]}'?" if near else "") + " Metrics stand in telemetry/metrics_table.py")


def _number(name: str, value: Any) -> float | int | None:
    """A Python number or None of any scalar."""
    if value is None:
        return None
    array = np.asarray(value)
    if array.size != 1 or not (np.issubdtype(array.dtype, np.number) or array.dtype == bool) or np.iscomplexobj(array):
        raise MetricError(f"metric '{name}' must be one number; got {value!r}")
    return array.reshape(()).item() * 1


class Board:
    """TensorBoard event files of one directory, made at the first row."""

    def __init__(self, directory: pathlib.Path):
        self._directory = directory
        self._purge_step: int | None = None
        self._writer: SummaryWriter | None = None

    def add(self, full: Mapping[str, Any]) -> None:
        """Every value of a completed row that is there, under its own name."""
        if self._writer is None:
            suffix = f".{os.getpid()}.{len(list(self._directory.glob('events.*'))):04d}"  # the name has whole seconds: a quick restart would overwrite
            self._writer = SummaryWriter(str(self._directory), flush_secs=10, purge_step=self._purge_step, filename_suffix=suffix)
        for name, value in full.items():
            if value is not None and name not in ("step", "time", "stage"):
                self._writer.add_scalar(name, value, full["step"], walltime=full["time"])

    def rewind(self, step: int) -> None:
        """Makes TensorBoard hide what was written of later steps."""
        self.close()
        self._purge_step = step + 1

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()
            self._writer = None


class MetricsFile:
    """One file of rows that have the keys of one table."""

    def __init__(self, path: pathlib.Path, table: Mapping[str, Metric], clock: Callable[[], float]):
        self._table, self._clock = dict(table), clock
        self._file = LineFile(path)
        self._note_members(read_lines(path))

    def _note_members(self, rows: Iterable[Mapping[str, Any]]) -> None:
        for row in rows:
            for name in row.keys() - self._table.keys():
                self._table[name] = metric_of(name, self._table)

    def declare(self, names: Iterable[str]) -> None:
        """Puts members of the open families into every row from the first."""
        self._note_members([dict.fromkeys(names)])

    def complete(self, row: Mapping[str, Any]) -> dict[str, Any]:
        """The row with every key of the table, in the table's order.

        Raises:
          MetricError: an unknown name, a value that is not one number, or no ``step``.
        """
        self._note_members([row])
        row = {"time": self._clock(), **row}
        full: dict[str, Any] = {}
        nonfinite = 0
        for name, metric in self._table.items():
            if metric.kind == NAME and name not in row:
                raise MetricError(f"every row must have '{name}' ({metric.doc}); got {', '.join(row)}")
            value = row[name] if name == "stage" else _number(name, row.get(name))
            if isinstance(value, float) and not math.isfinite(value):
                nonfinite, value = nonfinite + 1, None
            full[name] = 0 if value is None and metric.kind == COUNT and name not in row else value
        if nonfinite:
            full[NONFINITE] = nonfinite
        return full

    def write(self, row: Mapping[str, Any]) -> dict[str, Any]:
        """Appends the completed row and returns it."""
        full = self.complete(row)
        self._file.append(full)
        self._file.flush()
        return full

    def rewind(self, step: int) -> None:
        """Drops the rows of later steps, all or none."""
        self._file.keep(lambda row: row["step"] <= step)

    def sync(self) -> None:
        self._file.sync()

    def close(self) -> None:
        self._file.close()


class MetricsWriter:
    """All metrics of one run's directory; thread-safe.

    A row needs ``step``, ``stage`` (and ``version`` in training rows); ``time`` is set here when absent. TensorBoard shows training and evaluation in
    ``tensorboard``, the warm-up, whose steps count from their own beginning, in ``tensorboard/warmup``.
    """

    def __init__(self, workdir: str | pathlib.Path, tensorboard: bool = True, members: Iterable[str] = (), clock: Callable[[], float] = time.time):
        """Opens the files to append to.

        Args:
          workdir: the run's directory, which exists.
          tensorboard: also write event files.
          members: names of open families (``reward/format``, ...) that stand in every row from the first.
          clock: seconds since 1970.

        Raises:
          OSError: a file cannot be written.
        """
        workdir = pathlib.Path(workdir)
        self._lock = threading.Lock()
        self._training = MetricsFile(workdir / "metrics.jsonl", TRAINING, clock)
        self._evaluation = MetricsFile(workdir / "eval.jsonl", EVALUATION, clock)
        self._warmup = MetricsFile(workdir / "warmup.jsonl", WARMUP, clock)
        self._training.declare(members)
        self._tensorboard = tensorboard
        self._boards = {False: Board(workdir / "tensorboard"), True: Board(workdir / "tensorboard" / "warmup")}

    def write(self, row: Mapping[str, Any]) -> dict[str, Any]:
        """One training step → one line of ``metrics.jsonl``. Returns the completed row."""
        return self._write(self._training, row)

    def write_eval(self, row: Mapping[str, Any]) -> dict[str, Any]:
        """One evaluation → one line of ``eval.jsonl``; ``step`` is the version that was evaluated."""
        return self._write(self._evaluation, row)

    def write_warmup(self, row: Mapping[str, Any]) -> dict[str, Any]:
        """One row of the supervised warm-up → one line of ``warmup.jsonl``."""
        return self._write(self._warmup, row)

    def _write(self, file: MetricsFile, row: Mapping[str, Any]) -> dict[str, Any]:
        with self._lock:
            full = file.write(row)
            if self._tensorboard:
                self._boards[file is self._warmup].add(full)
            return full

    def rewind(self, step: int) -> None:
        """Drops training and evaluation rows of steps after ``step``, which the resumed run will do again."""
        with self._lock:
            self._training.rewind(step)
            self._evaluation.rewind(step)
            self._boards[False].rewind(step)

    def rewind_evaluation(self, step: int) -> None:
        """Drops evaluation rows of steps after ``step``."""
        with self._lock:
            self._evaluation.rewind(step)

    def rewind_warmup(self, step: int) -> None:
        """Drops warm-up rows of steps after ``step``."""
        with self._lock:
            self._warmup.rewind(step)
            self._boards[True].rewind(step)

    def sync(self) -> None:
        """Brings all rows to the disk."""
        for file in (self._training, self._evaluation, self._warmup):
            file.sync()

    def close(self) -> None:
        """Closes all files; a second call does nothing."""
        for file in (self._training, self._evaluation, self._warmup):
            file.close()
        for board in self._boards.values():
            board.close()

    def __enter__(self) -> MetricsWriter:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
