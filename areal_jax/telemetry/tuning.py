"""The metrics of a fine-tuning run: ``metrics.jsonl``, ``eval.jsonl`` and the same as TensorBoard scalars.

Invariant: rows have the keys of their objective's table, every time; otherwise as ``telemetry.metrics`` has it.
"""

from __future__ import annotations

import math
import pathlib
import time
from collections.abc import Mapping
from typing import Any

from areal_jax.telemetry.lines import read_lines
from areal_jax.telemetry.metrics import Board, MetricsFile
from areal_jax.telemetry.metrics_table import TUNING, TUNING_EVALUATION


class TuningMetrics:
    """The files of one run's directory; a context manager."""

    def __init__(self, workdir: pathlib.Path, objective: str, tensorboard: bool = True):
        """Opens the files to append to.

        Args:
          workdir: the run's directory, which exists.
          objective: 'sft' or 'dpo'.
          tensorboard: also write event files.

        Raises:
          OSError: a file cannot be written.
        """
        self._evaluations = workdir / "eval.jsonl"
        self._steps = MetricsFile(workdir / "metrics.jsonl", TUNING[objective], time.time)
        self._evals = MetricsFile(self._evaluations, TUNING_EVALUATION[objective], time.time)
        self._board = Board(workdir / "tensorboard") if tensorboard else None

    def write(self, row: Mapping[str, Any]) -> dict[str, Any]:
        """One step → one line of ``metrics.jsonl``. Returns the completed row."""
        return self._write(self._steps, row)

    def write_eval(self, row: Mapping[str, Any]) -> dict[str, Any]:
        """One evaluation → one line of ``eval.jsonl``."""
        return self._write(self._evals, row)

    def _write(self, file: MetricsFile, row: Mapping[str, Any]) -> dict[str, Any]:
        full = file.write(row)
        if self._board is not None:
            self._board.add(full)
        return full

    def rewind(self, step: int) -> None:
        """Drops rows of steps after ``step``, which the resumed run will do again."""
        for file in (self._steps, self._evals, *([self._board] if self._board is not None else [])):
            file.rewind(step)

    def evaluations(self) -> list[dict[str, Any]]:
        """The rows of ``eval.jsonl``, oldest first."""
        return list(read_lines(self._evaluations))

    def close(self) -> None:
        """Closes all files; a second call does nothing."""
        for file in (self._steps, self._evals, *([self._board] if self._board is not None else [])):
            file.close()

    def __enter__(self) -> TuningMetrics:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def summary_of(evaluations: list[dict[str, Any]]) -> dict[str, str]:
    """The first and the last evaluation in words, by name; empty where nothing was held out."""

    def words(row: Mapping[str, Any]) -> str:
        if row["eval/loss"] is None:
            return "not finite"
        if "eval/margin" in row:
            return f"{row['eval/loss']:.4f} (margin {row['eval/margin']:.3f}, {100 * row['eval/correct']:.1f} % of {row['eval/n']} pairs in order)"
        perplexity = math.exp(min(row["eval/loss"], 700.0))
        return f"{row['eval/loss']:.4f} (perplexity {perplexity:.3f}, {row['eval/tokens']} tokens)"

    return {f"held-out loss {when}": words(row) for when, row in zip(("before", "after"), evaluations[:1] + evaluations[-1:], strict=False)}
