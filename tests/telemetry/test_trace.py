"""The trace is JSON that viewers load: after close, after a kill, after a resume."""

import itertools
import json
import signal
import subprocess
import sys
import threading
import time

import pytest

from areal_jax.telemetry.trace import Trace, read_trace


def spans(events):
    return [event for event in events if event["ph"] == "X"]


def lane_names(events):
    return {event["tid"]: event["args"]["name"] for event in events if event["name"] == "thread_name"}


def test_closed_trace_is_json_with_lanes_and_times(tmp_path):
    path = tmp_path / "trace.json"
    before = time.time()
    now = time.monotonic()
    with Trace(path) as trace:
        trace.span("trainer", "step", now, now + 0.5, version=3)
        with trace.measure("sampler/0", "decode"):
            pass
        trace.instant("weights", "publish", now, version=3)
        trace.counter("buffer", 4, now)
    events = json.loads(path.read_text())
    step, decode = spans(events)
    assert step["dur"] == pytest.approx(5e5, abs=2) and step["args"] == {"version": 3}
    assert abs(step["ts"] / 1e6 - before) < 1
    names = lane_names(events)
    assert names[step["tid"]] == "trainer" and names[decode["tid"]] == "sampler/0" and len(set(names.values())) == 3
    assert [e["args"] for e in events if e["ph"] == "C"] == [{"value": 4}]
    assert all("pid" in e and "tid" in e and "name" in e for e in events)


def test_empty_trace_is_json(tmp_path):
    Trace(tmp_path / "trace.json").close()
    assert len(json.loads((tmp_path / "trace.json").read_text())) == 1


def test_resume_three_times_keeps_all_events_and_lanes(tmp_path):
    path = tmp_path / "trace.json"
    for part in range(4):
        with Trace(path) as trace:
            trace.span("trainer", f"part {part}", time.monotonic(), time.monotonic())
            trace.span("weights", f"push {part}", time.monotonic(), time.monotonic())
        events = json.loads(path.read_text())
        assert [e["name"] for e in spans(events)] == [f"{what} {n}" for n in range(part + 1) for what in ("part", "push")]
        assert sorted(lane_names(events).values()) == ["trainer", "weights"]
        starts = [e["ts"] for e in spans(events)]
        assert starts == sorted(starts)


@pytest.mark.parametrize("torn", ["", '{"ph":"X","na', '{"ph":"X","pid":1,"tid":1,"name":"last","ts":5,"dur":1}', "\x00\x00"])
def test_torn_trace_is_read_and_continued(tmp_path, torn):
    path = tmp_path / "trace.json"
    trace = Trace(path)
    trace.span("trainer", "first", 0.0, 1.0)
    trace.flush()
    text = path.read_text()
    assert not text.rstrip().endswith("]")
    assert json.loads(text.rstrip().rstrip(",") + "]"), "viewers close the array themselves"
    with open(path, "a") as stream:
        stream.write(torn)
    expected = ["first", "last"] if "last" in torn else ["first"]
    assert [e["name"] for e in spans(read_trace(path))] == expected
    with Trace(path) as resumed:
        resumed.span("trainer", "second", 1.0, 2.0)
    assert [e["name"] for e in spans(json.loads(path.read_text()))] == [*expected, "second"]
    assert len(lane_names(read_trace(path))) == 1


def test_killed_process_leaves_a_readable_trace(tmp_path):
    path = tmp_path / "trace.json"
    program = (
        "import os, signal, threading, time\nfrom areal_jax.telemetry.trace import Trace\n"
        f"t = Trace({str(path)!r})\n"
        "def work(n):\n  while True: t.span(f'sampler/{n}', 'x' * 40, 0.0, 1.0); t.flush()\n"
        "[threading.Thread(target=work, args=(n,), daemon=True).start() for n in range(3)]\ntime.sleep(.3)\nos.kill(os.getpid(), signal.SIGKILL)"
    )
    assert subprocess.run([sys.executable, "-c", program], timeout=60).returncode == -signal.SIGKILL
    found = len(spans(read_trace(path)))
    assert found > 10
    Trace(path).close()
    assert len(spans(json.loads(path.read_text()))) == found


def test_overlapping_checks_lie_beside_each_other(tmp_path):
    intervals = [(0.0, 2.0), (1.0, 3.0), (2.0, 4.0), (0.5, 5.0), (4.5, 6.0), (3.5, 7.0)]
    with Trace(tmp_path / "trace.json") as trace:
        for start, end in intervals:
            trace.span("rewards", "check", start, end)
    events = read_trace(tmp_path / "trace.json")
    by_lane = {}
    for event in spans(events):
        by_lane.setdefault(event["tid"], []).append((event["ts"], event["ts"] + event["dur"]))
    assert sum(map(len, by_lane.values())) == len(intervals) and 1 < len(by_lane) < len(intervals)
    for pieces in by_lane.values():
        pieces.sort()
        assert all(a[1] <= b[0] for a, b in itertools.pairwise(pieces))
    assert set(lane_names(events).values()) == {f"rewards/{n}" for n in range(len(by_lane))}


def test_threads_lose_nothing(tmp_path):
    with Trace(tmp_path / "trace.json") as trace:

        def work(number):
            for n in range(200):
                trace.span(f"sampler/{number}", str(n), float(n), n + 0.5)

        threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert len(spans(json.loads((tmp_path / "trace.json").read_text()))) == 800


def test_without_a_path_nothing_is_written(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with Trace(None) as trace:
        trace.span("trainer", "step", 0.0, 1.0)
        trace.instant("trainer", "x")
        trace.counter("x", 1)
        with trace.measure("trainer", "y"):
            pass
    assert not list(tmp_path.iterdir())


def test_another_file_is_not_overwritten(tmp_path):
    path = tmp_path / "trace.json"
    path.write_text('{"mine": 1}')
    with pytest.raises(ValueError, match="no trace"):
        Trace(path)
    assert path.read_text() == '{"mine": 1}'
