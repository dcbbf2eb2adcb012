"""A file of JSON lines that survives its process.

Invariants:
* Lines are only ever appended, or cut off at the end (``cut``), or filtered into a new file that takes the old one's place in one rename (``keep``).
* A last line without its newline is what a dying process left: it is cut off when the file is opened and skipped when it is read.
* A broken line anywhere else is an error that names file and line.
"""

from __future__ import annotations

import json
import os
import pathlib
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np


def plain(value: Any) -> Any:
    """NumPy and JAX arrays and scalars as lists and Python numbers (for ``json.dumps(default=)``)."""
    if isinstance(value, np.generic):
        return value.item()
    if hasattr(value, "__array__"):
        return np.asarray(value).tolist()
    raise TypeError(f"a value of type {type(value).__name__} has no JSON form: {value!r}")


def read_lines(path: str | os.PathLike) -> Iterator[dict[str, Any]]:
    """The objects of a file, oldest first; an absent file has none, a torn last line is skipped.

    Raises:
      ValueError: a whole line is not JSON; the text names file and line.
    """
    if not os.path.exists(path):
        return
    with open(path, "rb") as stream:
        for number, line in enumerate(stream, 1):
            if not line.endswith(b"\n"):
                return
            try:
                yield json.loads(line)
            except ValueError as error:
                raise ValueError(f"{path}, line {number}: not a JSON line ({error}); restore the file or take another --workdir") from error


class LineFile:
    """An open file of JSON lines; every method may be called from any thread."""

    def __init__(self, path: str | os.PathLike):
        self.path = pathlib.Path(path)
        self._lock = threading.Lock()
        self._stream = open(self.path, "ab")  # noqa: SIM115 (closed by close)
        self._cut(self._whole_lines())

    def _whole_lines(self) -> int:
        """Bytes up to and with the last newline."""
        with open(self.path, "rb") as stream:
            end = stream.seek(0, os.SEEK_END)
            while end:
                start = max(0, end - 65536)
                stream.seek(start)
                found = stream.read(end - start).rfind(b"\n")
                if found >= 0:
                    return start + found + 1
                end = start
        return 0

    def _cut(self, size: int) -> None:
        self._stream.flush()
        if size != self._stream.seek(0, os.SEEK_END):
            self._stream.truncate(size)
            self._stream.seek(0, os.SEEK_END)
            os.fsync(self._stream.fileno())
        self._size = size

    @property
    def size(self) -> int:
        """Bytes of all lines appended so far, those not flushed yet included."""
        return self._size

    def append(self, value: Mapping[str, Any]) -> None:
        """Adds one object as one line. It is with the operating system after ``flush``, on the disk after ``sync``."""
        line = json.dumps(value, separators=(",", ":"), ensure_ascii=False, default=plain).encode() + b"\n"
        with self._lock:
            self._stream.write(line)
            self._size += len(line)

    def flush(self) -> None:
        """Hands all lines to the operating system: they outlive the process."""
        with self._lock:
            self._stream.flush()

    def sync(self) -> int:
        """Brings all lines to the disk: they outlive the machine.

        Returns:
          The size in bytes, a mark for ``cut``.
        """
        with self._lock:
            self._stream.flush()
            os.fsync(self._stream.fileno())
            return self._size

    def cut(self, size: int) -> None:
        """Drops every line after the first ``size`` bytes.

        Raises:
          ValueError: the file is shorter than that, or a line would be cut in two.
        """
        with self._lock:
            self._stream.flush()
            if not 0 <= size <= self._size:
                raise ValueError(f"{self.path} holds {self._size} bytes, but is to be cut at {size}: lines are missing; take another --workdir")
            with open(self.path, "rb") as stream:
                stream.seek(max(0, size - 1))
                if size and stream.read(1) != b"\n":
                    raise ValueError(f"{self.path} has no end of a line at byte {size}: it is not the file that the mark was taken of")
            self._cut(size)

    def keep(self, wanted: Callable[[dict[str, Any]], bool]) -> None:
        """Drops the lines that are not wanted; a process killed on the way leaves the old file."""
        with self._lock:
            self._stream.flush()
            rows = list(read_lines(self.path))
            kept = [row for row in rows if wanted(row)]
            if len(kept) == len(rows):
                return
            temporary = self.path.with_name(self.path.name + ".tmp")
            with open(temporary, "wb") as stream:
                for row in kept:
                    stream.write(json.dumps(row, separators=(",", ":"), ensure_ascii=False).encode() + b"\n")
                stream.flush()
                os.fsync(stream.fileno())
            os.replace(temporary, self.path)
            self._stream.close()
            self._stream = open(self.path, "ab")  # noqa: SIM115 (closed by close)
            self._size = self._stream.seek(0, os.SEEK_END)

    def close(self) -> None:
        """Flushes and closes; a second call does nothing."""
        with self._lock:
            self._stream.close()

    def __enter__(self) -> LineFile:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
