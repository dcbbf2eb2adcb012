"""The journal keeps order and exact numbers, survives a kill, and rewinds to a checkpoint's mark."""

import json
import os
import signal
import subprocess
import sys
import threading

import jax.numpy as jnp
import numpy as np
import pytest

from areal_jax.telemetry.journal import Journal, read_journal
from areal_jax.telemetry.lines import LineFile


def test_events_come_back_in_order_and_exact(tmp_path):
    logprob = np.float32(-0.1)
    with Journal(tmp_path / "events.jsonl") as journal:
        journal.append({"event": "admit", "group": np.int64(3), "question": "ä + ß?"})
        journal.append({"event": "reward", "value": logprob, "tokens": np.arange(3, dtype=np.int32), "loss": jnp.float32(2.5)})
    first, second = read_journal(tmp_path / "events.jsonl")
    assert first == {"event": "admit", "group": 3, "question": "ä + ß?"}
    assert second["tokens"] == [0, 1, 2] and second["loss"] == 2.5
    assert np.float32(second["value"]).tobytes() == logprob.tobytes()


def test_value_without_json_form_is_refused_and_leaves_no_trace(tmp_path):
    with Journal(tmp_path / "events.jsonl") as journal:
        with pytest.raises(TypeError, match="object"):
            journal.append({"event": object()})
        assert journal.mark == 0
    assert list(read_journal(tmp_path / "events.jsonl")) == []


def test_rewind_to_mark_then_continue(tmp_path):
    path = tmp_path / "events.jsonl"
    with Journal(path) as journal:
        journal.append({"n": 0})
        journal.append({"n": 1})
        mark = journal.sync()
        assert mark == os.path.getsize(path) == journal.mark
        journal.append({"n": 2})
    with Journal(path) as journal:
        journal.append({"n": 3})
        journal.rewind(mark)
        assert journal.mark == mark
        journal.append({"n": 4})
    assert [event["n"] for event in read_journal(path)] == [0, 1, 4]


def test_rewind_refuses_a_mark_of_another_file(tmp_path):
    with Journal(tmp_path / "events.jsonl") as journal:
        journal.append({"n": 0})
        with pytest.raises(ValueError, match="lines are missing"):
            journal.rewind(1000)
        with pytest.raises(ValueError, match="not the file"):
            journal.rewind(3)
        journal.rewind(0)
    assert list(read_journal(tmp_path / "events.jsonl")) == []


@pytest.mark.parametrize("torn", [b'{"n": 9', b"{", b'{"n": 9}', b"x" * 200_000])
def test_torn_last_line_is_skipped_and_cut_off(tmp_path, torn):
    path = tmp_path / "events.jsonl"
    path.write_bytes(b'{"n": 0}\n' + torn)
    assert [event["n"] for event in read_journal(path)] == [0]
    with Journal(path) as journal:
        journal.append({"n": 1})
    assert [json.loads(line)["n"] for line in path.read_text().splitlines()] == [0, 1]


def test_broken_line_in_the_middle_names_file_and_line(tmp_path):
    path = tmp_path / "events.jsonl"
    path.write_text('{"n": 0}\n{"n"\n{"n": 2}\n')
    with pytest.raises(ValueError, match=r"events\.jsonl, line 2"):
        list(read_journal(path))


def test_flushed_events_outlive_kill(tmp_path):
    path = tmp_path / "events.jsonl"
    program = (
        "import os, sys, signal\nfrom areal_jax.telemetry.journal import Journal\n"
        f"j = Journal({str(path)!r})\n"
        "[j.append({'n': n}) for n in range(500)]\nj.flush()\n[j.append({'n': n}) for n in range(500, 5000)]\nos.kill(os.getpid(), signal.SIGKILL)"
    )
    assert subprocess.run([sys.executable, "-c", program], timeout=60).returncode == -signal.SIGKILL
    numbers = [event["n"] for event in read_journal(path)]
    assert len(numbers) >= 500 and numbers == list(range(len(numbers)))
    with Journal(path) as journal:
        journal.append({"n": "resumed"})
    assert [event["n"] for event in read_journal(path)] == [*numbers, "resumed"]


def test_threads_do_not_tear_lines(tmp_path):
    with LineFile(tmp_path / "lines.jsonl") as file:

        def work(name: int) -> None:
            for n in range(300):
                file.append({"name": name, "n": n, "text": "x" * 50})
                if n % 50 == 0:
                    file.flush()

        threads = [threading.Thread(target=work, args=(name,)) for name in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    events = list(read_journal(tmp_path / "lines.jsonl"))
    assert [[e["n"] for e in events if e["name"] == name] for name in range(4)] == [list(range(300))] * 4


def test_keep_replaces_the_file_in_one_piece(tmp_path, monkeypatch):
    path = tmp_path / "lines.jsonl"
    with LineFile(path) as file:
        for n in range(4):
            file.append({"n": n})

        def die(*_):
            raise KeyboardInterrupt

        monkeypatch.setattr(os, "replace", die)
        with pytest.raises(KeyboardInterrupt):
            file.keep(lambda row: row["n"] < 2)
        assert [row["n"] for row in read_journal(path)] == [0, 1, 2, 3]
        monkeypatch.undo()
        file.keep(lambda row: row["n"] < 2)
        file.append({"n": 7})
    assert [row["n"] for row in read_journal(path)] == [0, 1, 7]
