"""Rows of JSONL and Parquet files, one at a time.

Invariants:
* A row is a ``Record`` or a ``BadRow``; both name the file and the line (of a Parquet file: the row), counted from 1. Blank lines are neither.
* Files of a directory come in the order of their names, so that the same directory gives the same rows.
* A file that is something else (compressed, a Git LFS pointer, one JSON list, no Parquet) is refused as a whole.
"""

from __future__ import annotations

import dataclasses
import importlib
import importlib.util
import json
import os
import pathlib
from collections.abc import Iterator
from typing import Any

from areal_jax.data.rows import BadRow, RowsError, refuse_other_formats

SUFFIXES = (".jsonl", ".parquet")
PARQUET_BATCH = 1024
"""Rows of a Parquet file that are read together."""


class Refused(ValueError):
    """Why one row is refused: the rule, the value, the remedy."""


@dataclasses.dataclass(frozen=True)
class Record:
    """One row. ``line`` counts from 1."""

    file: str
    line: int
    row: dict[str, Any]

    @property
    def where(self) -> str:
        return f"{self.file}:{self.line}"


def data_files(path: str | os.PathLike[str]) -> list[pathlib.Path]:
    """The files that ``path`` names: itself, or those with one of ``SUFFIXES`` in a directory, by name.

    Raises:
      RowsError: it is not there, is of another type, or is a directory without such files.
    """
    place = pathlib.Path(path)
    if place.is_dir():
        files = sorted(file for file in place.iterdir() if file.suffix in SUFFIXES and file.is_file())
        if not files:
            raise RowsError(f"a directory of rows must hold *.jsonl or *.parquet files; '{place}' holds none; name another, or the file itself")
        return files
    if not place.is_file():
        raise RowsError(f"the rows must be in a readable file or directory; '{place}' is not there")
    if place.suffix not in SUFFIXES:
        raise RowsError(f"a file of rows must end in .jsonl or .parquet; got '{place}'; convert it, or rename it if it is one of them")
    return [place]


def read_records(path: str | os.PathLike[str]) -> Iterator[Record | BadRow]:
    """All rows of a file, or of a directory's files.

    Raises:
      RowsError: a file cannot be read, or is no JSONL or Parquet.
    """
    for file in data_files(path):
        yield from _parquet(file) if file.suffix == ".parquet" else _jsonl(file)


def _jsonl(file: pathlib.Path) -> Iterator[Record | BadRow]:
    try:
        with open(file, "rb") as stream:
            refuse_other_formats(file, stream.read(4096))
            stream.seek(0)
            for number, raw in enumerate(stream, 1):
                line = raw.removeprefix(b"\xef\xbb\xbf") if number == 1 else raw
                if line.strip():
                    yield _record(str(file), number, line)
    except OSError as error:
        raise RowsError(f"the rows must be in a readable file; '{file}': {error.strerror}") from error


def _record(file: str, number: int, raw: bytes) -> Record | BadRow:
    try:
        row = json.loads(raw.decode("utf-8"))
    except UnicodeDecodeError as error:
        return BadRow(file, number, f"a row must be UTF-8 text; byte {raw[error.start]:#04x} at position {error.start} is not")
    except (ValueError, RecursionError) as error:
        return BadRow(file, number, f"a row must be JSON: {error}")
    if not isinstance(row, dict):
        return BadRow(file, number, f"a row must be a JSON object; got {type(row).__name__}")
    return Record(file, number, row)


def _parquet(file: pathlib.Path) -> Iterator[Record]:
    if importlib.util.find_spec("pyarrow") is None:
        raise RowsError(f"'{file}' is a Parquet file, which needs pyarrow; pip install 'areal_jax[parquet]', or convert the file to JSONL")
    arrow, parquet = importlib.import_module("pyarrow"), importlib.import_module("pyarrow.parquet")
    number = 0
    try:
        with parquet.ParquetFile(file) as opened:
            for batch in opened.iter_batches(batch_size=PARQUET_BATCH):
                for row in batch.to_pylist():
                    number += 1
                    yield Record(str(file), number, row)
    except (OSError, arrow.ArrowException) as error:
        raise RowsError(f"'{file}' must be a whole Parquet file; row {number + 1} cannot be read: {error}; fetch it again") from error
