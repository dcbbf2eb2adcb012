"""One *.safetensors file: its header, parts of its tensors, and writing one tensor at a time.

The layout is the safetensors library's ("Format" in its README): a little-endian uint64 N, N bytes of JSON, the tensors without holes. The library itself
maps the file to read it and wants all tensors at once to write it; here host memory holds a block of one tensor.

Invariants:
* Reads are positioned and exact: of a part of a tensor only that part's bytes are read, and no page of the file is mapped.
* A file whose header and size do not agree is refused before any tensor is read.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
import pathlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from ml_dtypes import bfloat16

from areal_jax.models.files import LFS_POINTER, PolicyFilesError

DTYPES = {"F32": np.dtype(np.float32), "F16": np.dtype(np.float16), "BF16": np.dtype(bfloat16)}
"""The stored types of weights that are read; others are those of quantised weights."""

HEADER_LIMIT = 100 << 20
"""Longest header, as in the library."""

BLOCK = 4 << 20
"""Bytes that are read, cast or written together."""


Part = tuple[slice, slice, np.ndarray]
"""(rows, columns, where they go)"""


@dataclasses.dataclass(frozen=True)
class StoredTensor:
    """Where a tensor lies.

    Attributes:
      file: that holds it.
      name: there.
      dtype: as stored.
      shape: as stored.
      offset: of its first byte in the file.
    """

    file: pathlib.Path
    name: str
    dtype: np.dtype
    shape: tuple[int, ...]
    offset: int


def read_header(file: pathlib.Path) -> dict[str, StoredTensor]:
    """The tensors of a file by name, none of their bytes.

    Raises:
      PolicyFilesError: it is no safetensors file, is cut off, or holds a type that is not in ``DTYPES``.
    """
    try:
        with open(file, "rb") as stream:
            size = os.fstat(stream.fileno()).st_size
            start = stream.read(len(LFS_POINTER))
            if start == LFS_POINTER:
                raise PolicyFilesError(f"'{file}' is a Git LFS pointer, not the file itself; fetch it with 'git lfs pull'")
            length = int.from_bytes(start[:8], "little")
            if size < 8 or (length <= HEADER_LIMIT and 8 + length > size):
                raise PolicyFilesError(f"'{file}' is cut off inside its header ({size} bytes); fetch it again")
            if length > HEADER_LIMIT:
                raise PolicyFilesError(f"'{file}' is not a safetensors file (its header would have {length} bytes); convert other formats, or fetch it again")
            stream.seek(8)
            text = stream.read(length)
    except OSError as error:
        raise PolicyFilesError(f"'{file}' must be readable: {error}; change its permissions or fetch it again") from error
    try:
        header = json.loads(text.decode("utf-8"), object_pairs_hook=_unique)
    except (ValueError, RecursionError) as error:
        raise PolicyFilesError(f"'{file}' must have a JSON header: {error}; fetch it again") from error
    if not isinstance(header, dict):
        raise PolicyFilesError(f"'{file}' must have a JSON object as header; it is a {type(header).__name__}; fetch it again")
    header.pop("__metadata__", None)
    entries = sorted(((name, _entry(file, name, value)) for name, value in header.items()), key=lambda item: item[1][2:])
    expected, end = 0, size - 8 - length
    for name, (_, _, begin, stop) in entries:
        if begin != expected:
            raise PolicyFilesError(f"'{file}': '{name}' must begin at byte {expected} of the data; its header says {begin}; fetch it again")
        if stop > end:
            raise PolicyFilesError(f"'{file}' is cut off: '{name}' ends at byte {stop} of the data, which has {end}; fetch it again")
        expected = stop
    if expected != end:
        raise PolicyFilesError(f"'{file}' must end with its last tensor, at byte {expected} of the data; it has {end}; fetch it again")
    return {name: StoredTensor(file, name, dtype, shape, 8 + length + begin) for name, (dtype, shape, begin, _) in entries}


def read_parts(tensor: StoredTensor, parts: Sequence[Part]) -> None:
    """Reads parts of a tensor, each into its target and cast to the target's type; those that lie side by side are read together.

    Args:
      tensor: a matrix [m, n], or a vector [m], which is taken as [m, 1].
      parts: disjoint; (rows, columns, target), slices with start and stop and a C-contiguous array [rows, columns].

    Raises:
      PolicyFilesError: the file has become shorter, or cannot be read.
    """
    runs: list[list[Part]] = []
    for part in sorted(parts, key=lambda part: (part[0].start, part[0].stop, part[1].start)):
        if runs and runs[-1][-1][0] == part[0] and runs[-1][-1][1].stop == part[1].start:
            runs[-1].append(part)
        else:
            runs.append([part])
    try:
        descriptor = os.open(tensor.file, os.O_RDONLY | getattr(os, "O_CLOEXEC", 0))
        try:
            for run in runs:
                _read_run(descriptor, tensor, run)
        finally:
            os.close(descriptor)
    except OSError as error:
        raise PolicyFilesError(f"'{tensor.file}': '{tensor.name}' cannot be read: {error}; check the disk, or fetch it again") from error


def _read_run(descriptor: int, tensor: StoredTensor, run: Sequence[Part]) -> None:
    """Parts of the same rows and of columns that follow each other, block by block."""
    (rows, columns, target), size = run[0], tensor.dtype.itemsize
    first, width, stored_width = columns.start, run[-1][1].stop - columns.start, math.prod(tensor.shape[1:])
    direct = len(run) == 1 and target.dtype == tensor.dtype
    step = max(1, BLOCK // max(1, width * size))
    buffer = np.empty((0 if direct else min(step, rows.stop - rows.start), width), tensor.dtype)
    for start in range(0, rows.stop - rows.start, step):
        stop = min(start + step, rows.stop - rows.start)
        block = target[start:stop] if direct else buffer[: stop - start]
        offset = tensor.offset + ((rows.start + start) * stored_width + first) * size
        if width == stored_width:
            _read_exactly(descriptor, tensor, block, offset)
        else:
            for index, row in enumerate(block):
                _read_exactly(descriptor, tensor, row, offset + index * stored_width * size)
        if not direct:
            for _, columns, target in run:
                target[start:stop] = block[:, columns.start - first : columns.stop - first]


def write_tensors(file: pathlib.Path, shapes: Mapping[str, tuple[int, ...]], dtype: np.dtype, arrays: Iterable[np.ndarray]) -> None:
    """Writes a file whose tensors all have one type.

    Args:
      file: replaced.
      shapes: by name, in the order of ``arrays``.
      dtype: one of ``DTYPES``.
      arrays: asked for one by one; cast to ``dtype`` block by block.
    """
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    code, offset = next(name for name, known in DTYPES.items() if known == dtype), 0
    for name, shape in shapes.items():
        stop = offset + math.prod(shape) * dtype.itemsize
        header[name] = {"dtype": code, "shape": list(shape), "data_offsets": [offset, stop]}
        offset = stop
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with open(file, "wb") as stream:
        stream.write(len(text).to_bytes(8, "little") + text)
        for (name, shape), array in zip(shapes.items(), arrays, strict=True):
            if array.shape != shape:
                raise ValueError(f"'{name}' must have the shape {shape}; got {array.shape}")
            step = max(1, BLOCK // max(1, math.prod(shape[1:]) * dtype.itemsize))
            for first in range(0, shape[0], step):
                stream.write(np.ascontiguousarray(array[first : first + step], dtype).reshape(-1).view(np.uint8).data)


def _entry(file: pathlib.Path, name: str, value: Any) -> tuple[np.dtype, tuple[int, ...], int, int]:
    """(type, shape, begin, end) of a header's line."""

    def count(number: Any) -> bool:
        return isinstance(number, int) and not isinstance(number, bool) and number >= 0

    value = value if isinstance(value, dict) else {}
    shape, offsets = (value.get(key) for key in ("shape", "data_offsets"))
    if not (isinstance(shape, list) and all(map(count, shape)) and isinstance(offsets, list) and len(offsets) == 2 and all(map(count, offsets))):
        raise PolicyFilesError(f"'{file}': '{name}' must have a shape and two data_offsets; its header says {value}; fetch it again")
    if not isinstance(value.get("dtype"), str) or value["dtype"] not in DTYPES:
        raise PolicyFilesError(
            f"'{file}': '{name}' must be stored as one of {', '.join(DTYPES)}; it is {value.get('dtype')}; take a checkpoint that is not quantised"
        )
    dtype = DTYPES[value["dtype"]]
    if offsets[1] - offsets[0] != math.prod(shape) * dtype.itemsize:
        raise PolicyFilesError(f"'{file}': '{name}' of type {value['dtype']} and shape {shape} cannot have the data_offsets {offsets}; fetch it again")
    return dtype, tuple(shape), *offsets


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    names = [name for name, _ in pairs]
    if len(set(names)) < len(names):
        raise ValueError(f"'{next(name for name in names if names.count(name) > 1)}' appears twice")
    return dict(pairs)


def _read_exactly(descriptor: int, tensor: StoredTensor, target: np.ndarray, offset: int) -> None:
    view = target.reshape(-1).view(np.uint8).data
    while view:
        count = os.preadv(descriptor, [view], offset)
        if not count:
            raise PolicyFilesError(f"'{tensor.file}' ends inside '{tensor.name}'; it became shorter while it was read; fetch it again")
        view, offset = view[count:], offset + count
