"""The event journal: what happened, in order, enough to repeat a run.

Invariants:
* Append-only; the order of the lines is the order of the ``append`` calls.
* A checkpoint holds ``sync()``'s mark; a resumed run rewinds to it, so that the journal tells one history without a seam.
* Numbers come back as they were written: floats by their shortest exact form, NaN and infinities as Python's JSON reads them.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from typing import Any

from areal_jax.telemetry.lines import LineFile, read_lines


class Journal:
    """``events.jsonl`` of one run; thread-safe."""

    def __init__(self, path: str | os.PathLike):
        """Opens (or makes) the journal and cuts off a torn last line.

        Raises:
          OSError: it cannot be written.
        """
        self._file = LineFile(path)
        self.path = self._file.path

    @property
    def mark(self) -> int:
        """Bytes of all events so far. A mark for a checkpoint comes from ``sync``, which also makes it true on the disk."""
        return self._file.size

    def append(self, event: Mapping[str, Any]) -> None:
        """Adds one event, a mapping of JSON values, NumPy numbers and arrays."""
        self._file.append(event)

    def flush(self) -> None:
        """The events outlive the process (cheap: once a step)."""
        self._file.flush()

    def sync(self) -> int:
        """The events outlive the machine (once a checkpoint). Returns the mark to save with the checkpoint."""
        return self._file.sync()

    def rewind(self, mark: int) -> None:
        """Drops what came after a checkpoint.

        Raises:
          ValueError: the journal is shorter than the mark, or the mark was taken of another file.
        """
        self._file.cut(mark)

    def close(self) -> None:
        self._file.close()

    def __enter__(self) -> Journal:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def read_journal(path: str | os.PathLike) -> Iterator[dict[str, Any]]:
    """The events of a journal, oldest first; a torn last line (a process that died) is left out."""
    return read_lines(path)
