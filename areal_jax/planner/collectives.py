"""What a compiled program sends over links, read from its optimised HLO text.

Invariants:
* A collective inside a loop counts as often as the loop's known trip count; a loop without one counts once and is reported in ``open_loops``.
* Bytes are what one device sends in a ring: (g - 1) / g of the whole for a gather or scatter among g devices, twice that for an all-reduce.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections import defaultdict
from collections.abc import Iterator, Sequence

import numpy as np

KINDS = ("all-gather", "all-reduce", "reduce-scatter", "all-to-all", "collective-permute", "collective-broadcast")
_SIZES = {"pred": 1, "s8": 1, "u8": 1, "bf16": 2, "f16": 2, "s16": 2, "u16": 2, "f32": 4, "s32": 4, "u32": 4, "f64": 8, "s64": 8, "u64": 8}
_OPERATION = re.compile(rf"= (?P<shape>.*?) (?P<kind>{'|'.join(KINDS)})(?P<start>-start)?\(")
_ARRAY = re.compile(r"\b([a-z]+[0-9]*)\[([0-9,]*)\]")
_COMPUTATION = re.compile(r"^(?:ENTRY )?%?([\w.\-]+) .*\{$")
_CALLED = re.compile(r"(?:calls|to_apply|body|condition|true_computation|false_computation)=%?([\w.\-]+)|branch_computations=\{([^}]*)\}")
_TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"\}')
_IOTA = re.compile(r"replica_groups=\[([0-9,]+)\]<=\[([0-9,]+)\](?:T\(([0-9,]+)\))?")
_LISTED = re.compile(r"replica_groups=\{\{([0-9,]*)\}")
_MESH = re.compile(r"replica_groups=mesh\[([^\]]*)\](?:, device_ids=\(\[([0-9,]+)\](?:T\(([0-9,]+)\))?\))? \{([^}]*)\}")
_PAIRS = re.compile(r"source_target_pairs=\{\{(\d+),(\d+)\}")


@dataclasses.dataclass(frozen=True)
class Collective:
    """One kind of communication among one kind of group.

    Attributes:
      kind: HLO's name.
      group: the devices of the first group, in the mesh's order.
      count: executions in one run of the program.
      sent: bytes that a device sends in all of them.
    """

    kind: str
    group: tuple[int, ...]
    count: int
    sent: float


@dataclasses.dataclass(frozen=True)
class Communication:
    """All of a program. ``open_loops``: loops around collectives whose trip count the compiler did not know."""

    collectives: tuple[Collective, ...]
    open_loops: int


def read_collectives(text: str) -> Communication:
    """The communication of a program.

    Args:
      text: ``Compiled.as_text()``.
    """
    computations, entry = _computations(text)
    found: dict[tuple[str, tuple[int, ...]], list[float]] = defaultdict(lambda: [0, 0.0])
    loops: set[str] = set()

    def holds(name: str) -> bool:
        return any(_OPERATION.search(line) or any(holds(called) for called in _called(line)) for line in computations.get(name, []))

    def walk(name: str, times: int) -> None:
        for line in computations.get(name, []):
            operation = _OPERATION.search(line)
            if operation:
                group = _group(line)
                sent = _sent(operation["kind"], _bytes(operation["shape"], bool(operation["start"]), operation["kind"]), len(group))
                if sent:
                    entry = found[operation["kind"], group]
                    entry[0] += times
                    entry[1] += times * sent
                continue
            trips = 1
            if " while(" in line:
                known = _TRIPS.search(line)
                trips = int(known[1]) if known else 1
                if not known and any(holds(called) for called in _called(line)):
                    loops.add(line)
            for called in _called(line):
                walk(called, times * trips)

    walk(entry, 1)
    ordered = sorted(found.items(), key=lambda item: -item[1][1])
    return Communication(tuple(Collective(kind, group, int(count), sent) for (kind, group), (count, sent) in ordered), len(loops))


def _computations(text: str) -> tuple[dict[str, list[str]], str]:
    computations: dict[str, list[str]] = {}
    name = entry = ""
    for line in text.splitlines():
        header = _COMPUTATION.match(line)
        if header:
            name = header[1]
            computations[name] = []
            entry = name if line.startswith("ENTRY") else entry
        elif name:
            computations[name].append(line)
    return computations, entry


def _called(line: str) -> Iterator[str]:
    for one, several in _CALLED.findall(line):
        yield from (part.strip().lstrip("%") for part in (one or several).split(","))


def _bytes(shape: str, started: bool, kind: str) -> float:
    """Bytes of an operation's result; of the pair (operands, results) that a started gather gives, the results."""
    sizes = [math.prod(int(d) for d in dims.split(",") if d) * _SIZES.get(dtype, 4) for dtype, dims in _ARRAY.findall(shape)]
    if started and kind != "all-reduce":
        sizes = [size for size in sizes if size > 4]
        return sum(sizes[len(sizes) // 2 :])
    return sum(sizes)


def _group(line: str) -> tuple[int, ...]:
    """The first group of devices of a collective, from any of HLO's notations."""
    iota, listed, mesh, pairs = (pattern.search(line) for pattern in (_IOTA, _LISTED, _MESH, _PAIRS))
    if iota:
        return tuple(int(i) for i in _ordered(iota[2], iota[3]).reshape(_numbers(iota[1]))[0])
    if listed:
        return tuple(_numbers(listed[1]))
    if mesh:
        return _mesh_group(dict(re.findall(r"'(\w+)'=(\d+)", mesh[1])), mesh[2], mesh[3], mesh[4])
    return (int(pairs[1]), int(pairs[2])) if pairs else ()


def _mesh_group(sizes: dict[str, str], dims: str | None, order: str | None, named: str) -> tuple[int, ...]:
    """Of a mesh notation: mesh['a'=2,'b'=4], device_ids=([4,2]T(1,0)) {'b'}, where 'b':(2)2 is the part of size 2 of b that has 2 parts before it."""
    devices = _ordered(dims or ",".join(sizes.values()), order).reshape([int(size) for size in sizes.values()])
    places = []
    parts = {name: (int(before or 1), int(size or sizes[name])) for name, before, size in re.findall(r"'(\w+)'(?::\((\d+)\)(\d+))?", named)}
    for name, size in sizes.items():
        before, part = parts.get(name, (1, 1))
        after = int(size) // (before * part)
        places.append(np.arange(part) * after)
    return tuple(int(i) for i in devices[np.ix_(*places)].ravel())


def _numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",") if part]


def _ordered(dims: str, order: str | None) -> np.ndarray:
    """The devices, counted up over ``dims`` and then transposed."""
    sizes = _numbers(dims)
    devices = np.arange(math.prod(sizes)).reshape(sizes)
    return devices.transpose(_numbers(order)) if order else devices


def _sent(kind: str, size: float, members: int) -> float:
    if members < 2:
        return 0.0
    part = (members - 1) / members
    return {"all-gather": size * part, "all-reduce": 2.0 * size * part, "reduce-scatter": size * (members - 1), "all-to-all": size * part}.get(kind, size)


def axes_of(group: Sequence[int], names: Sequence[str], sizes: Sequence[int]) -> str:
    """The mesh axes along which a group's devices lie, as 'data+fsdp'."""
    places = np.unravel_index(np.asarray(group), tuple(sizes))
    return "+".join(name for name, place in zip(names, places, strict=True) if len(set(place.tolist())) > 1) or "none"
