"""``trace.json``: who did what when, for Perfetto (https://ui.perfetto.dev) or chrome://tracing.

Invariants:
* After ``close`` the file is valid JSON. A killed process leaves an array without its closing bracket, which both viewers take, and which a resumed run
  continues: it opens the file again, cuts off a torn event and appends.
* Times are given as ``time.monotonic()`` seconds and stored as microseconds since 1970, so the parts of a resumed run lie after each other.
* Spans of one lane nest. In the lanes of ``CONCURRENT``, where they overlap, each span takes the first sub-lane that is free.
"""

from __future__ import annotations

import contextlib
import json
import os
import pathlib
import threading
import time
from collections.abc import Iterator
from typing import Any

from areal_jax.telemetry.lines import plain

CONCURRENT = ("rewards", "generations")
LANES = ("trainer", "sampler", "weights", "rewards", "evaluation", "generations")
"""Order of the lanes from the top, by the part of the name before '/'."""

_PROCESS = 1
_FLUSH_SECONDS = 1.0


class Trace:
    """Writer of one trace; thread-safe. ``Trace(None)`` writes nothing."""

    def __init__(self, path: str | os.PathLike | None):
        """Opens (or makes) the trace, the end of an earlier process's part repaired.

        Raises:
          OSError: it cannot be written.
          ValueError: the file is there and is no trace.
        """
        self._lock = threading.Lock()
        self._lanes: dict[str, int] = {}
        self._free_at: dict[str, list[float]] = {}
        self._pending: list[bytes] = []
        self._flushed_at = time.monotonic()
        self._to_epoch = time.time() - time.monotonic()
        self._stream = None
        if path is not None:
            self._open(pathlib.Path(path))

    def _open(self, path: pathlib.Path) -> None:
        content = path.read_bytes() if path.exists() else b""
        events, whole = _whole_events(content)
        self._lanes = {event["args"]["name"]: event["tid"] for event in events if event.get("name") == "thread_name"}
        if content and not whole:
            raise ValueError(f"{path} is there but is no trace of this program; move it away or take another --workdir")
        self._stream = open(path, "r+b" if content else "wb")  # noqa: SIM115 (closed by close)
        self._stream.truncate(whole)
        self._stream.seek(0, os.SEEK_END)
        if not whole:
            self._stream.write(b"[\n")
            self._add({"ph": "M", "pid": _PROCESS, "tid": 0, "name": "process_name", "args": {"name": "areal_jax"}})
        elif not content[:whole].rstrip().endswith((b",", b"[")):
            self._stream.truncate(self._stream.seek(len(content[:whole].rstrip())))
            self._stream.write(b",\n")
        self._flush()

    def span(self, lane: str, name: str, start: float, end: float, **args: Any) -> None:
        """One piece of work in a lane ('trainer', 'sampler/0', 'weights', 'rewards', 'evaluation', 'generations', or a new one).

        Args:
          start, end: ``time.monotonic()`` seconds; an end before its start counts as no length.
          args: JSON-able facts that the viewer shows on a click.
        """
        if self._stream is None:
            return
        begin, finish = self._micros(start), self._micros(end)
        with self._lock:
            tid = self._lane(self._sub_lane(lane, start, end) if lane in CONCURRENT else lane)
            self._add({"ph": "X", "pid": _PROCESS, "tid": tid, "name": name, "ts": begin, "dur": max(0, finish - begin), **_args(args)})

    @contextlib.contextmanager
    def measure(self, lane: str, name: str, **args: Any) -> Iterator[None]:
        """The span of a ``with`` block, written also when the block raises."""
        start = time.monotonic()
        try:
            yield
        finally:
            self.span(lane, name, start, time.monotonic(), **args)

    def instant(self, lane: str, name: str, at: float | None = None, **args: Any) -> None:
        """One moment in a lane; ``at`` in ``time.monotonic()`` seconds, now by default."""
        if self._stream is None:
            return
        moment = self._micros(time.monotonic() if at is None else at)
        with self._lock:
            self._add({"ph": "i", "s": "t", "pid": _PROCESS, "tid": self._lane(lane), "name": name, "ts": moment, **_args(args)})

    def counter(self, name: str, value: float, at: float | None = None) -> None:
        """A value over time, drawn as a curve of its own."""
        if self._stream is None:
            return
        moment = self._micros(time.monotonic() if at is None else at)
        with self._lock:
            self._add({"ph": "C", "pid": _PROCESS, "tid": 0, "name": name, "ts": moment, "args": {"value": value}})

    def flush(self) -> None:
        """Hands all events to the operating system; happens by itself about once a second."""
        with self._lock:
            if self._stream is not None:
                self._flush()

    def close(self) -> None:
        """Completes the JSON array and closes; a second call does nothing, later events are dropped."""
        with self._lock:
            if self._stream is None:
                return
            self._flush()
            end = self._stream.seek(-2, os.SEEK_END)
            self._stream.truncate(end)
            self._stream.write(b"\n]\n")
            self._stream.close()
            self._stream = None

    def __enter__(self) -> Trace:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _micros(self, moment: float) -> int:
        return round((moment + self._to_epoch) * 1e6)

    def _lane(self, lane: str) -> int:
        if lane not in self._lanes:
            group = lane.split("/")[0]
            order = LANES.index(group) if group in LANES else len(LANES)
            tid = self._lanes[lane] = 1 + max(self._lanes.values(), default=0)
            self._add({"ph": "M", "pid": _PROCESS, "tid": tid, "name": "thread_name", "args": {"name": lane}})
            self._add({"ph": "M", "pid": _PROCESS, "tid": tid, "name": "thread_sort_index", "args": {"sort_index": order * 1000 + tid}})
        return self._lanes[lane]

    def _sub_lane(self, lane: str, start: float, end: float) -> str:
        free_at = self._free_at.setdefault(lane, [])
        number = next((n for n, free in enumerate(free_at) if free <= start), len(free_at))
        if number == len(free_at):
            free_at.append(end)
        free_at[number] = end
        return f"{lane}/{number}"

    def _add(self, event: dict[str, Any]) -> None:
        self._pending.append(json.dumps(event, separators=(",", ":"), default=plain).encode() + b",\n")
        if time.monotonic() - self._flushed_at > _FLUSH_SECONDS:
            self._flush()

    def _flush(self) -> None:
        """One write of whole events, so that a killed process does not leave half of one."""
        if self._stream is not None:
            self._stream.write(b"".join(self._pending))
            self._stream.flush()
        self._pending.clear()
        self._flushed_at = time.monotonic()


def read_trace(path: str | os.PathLike) -> list[dict[str, Any]]:
    """The events of a trace, whether it was closed or its process died."""
    return _whole_events(pathlib.Path(path).read_bytes())[0]


def _whole_events(content: bytes) -> tuple[list[dict[str, Any]], int]:
    """The complete events at the beginning of a trace, and the bytes they take."""
    events: list[dict[str, Any]] = []
    whole = 0
    for line in content.splitlines(keepends=True):
        text = line.strip().rstrip(b",")
        if whole or text != b"[":
            try:
                event = json.loads(text)
            except ValueError:
                break  # the closing bracket, or what a dying process left
            if not whole or not isinstance(event, dict):
                break
            events.append(event)
        whole += len(line)
    return events, whole


def _args(args: dict[str, Any]) -> dict[str, Any]:
    return {"args": args} if args else {}
