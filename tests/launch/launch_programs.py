"""Starts the programs of launch/ as a user does, and reads what they leave."""

import json
import os
import pathlib
import signal
import subprocess
import sys
import time

import psutil

HERE = pathlib.Path(__file__).resolve().parent
ROOT = HERE.parent.parent
LIMIT_S = 150.0


def command(program, workdir, *overrides, config=HERE / "tiny.py"):
    return [sys.executable, str(ROOT / "launch" / f"{program}.py"), f"--config={config}", f"--workdir={workdir}", *(f"--config.{o}" for o in overrides)]


def environment():
    kept = {name: value for name, value in os.environ.items() if name not in ("XLA_FLAGS", "JAX_NUM_CPU_DEVICES")}
    return {**kept, "JAX_PLATFORMS": "cpu", "PYTHONPATH": os.pathsep.join(filter(None, (str(HERE), os.environ.get("PYTHONPATH", ""))))}


def run(program, workdir, *overrides, code=0, **more):
    """Runs a program to its end; returns what it printed to (stdout, stderr)."""
    done = subprocess.run(command(program, workdir, *overrides, **more), env=environment(), capture_output=True, text=True, timeout=LIMIT_S)
    assert done.returncode == code, f"exit code {done.returncode}, not {code}\n{done.stdout}\n{done.stderr}"
    return done.stdout, done.stderr


class Started:
    """A running program, and the processes it has started."""

    def __init__(self, program, workdir, *overrides):
        self.process = subprocess.Popen(command(program, workdir, *overrides), env=environment(), stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
        self.family = []

    def until(self, moment):
        """Waits, looking often, for ``moment()``."""
        end = time.monotonic() + LIMIT_S
        while not moment():
            assert self.process.poll() is None, f"ended early, with {self.process.returncode}: {self.process.stderr.read()}"
            assert time.monotonic() < end, "the moment did not come"
            time.sleep(0.002)
        self.family = psutil.Process(self.process.pid).children(recursive=True)

    def send(self, number):
        self.process.send_signal(number)

    def end(self, timeout_s):
        """The exit code; fails unless the program and all its processes are gone in time."""
        try:
            self.process.communicate(timeout=timeout_s)
        finally:
            self.process.kill()
            self.process.wait()
        _, alive = psutil.wait_procs(self.family, timeout=8.0)
        assert not alive, f"left behind: {alive}"
        return self.process.returncode

    def kill(self):
        self.send(signal.SIGKILL)
        assert self.end(10.0) == -signal.SIGKILL


def rows(file):
    """The lines of a JSONL file; a torn last one is left out."""
    return [json.loads(line) for line in file.read_text().splitlines(keepends=True) if line.endswith("\n")] if file.exists() else []


def saved(directory):
    """Steps of the whole checkpoints."""
    return sorted(int(p.name) for p in directory.glob("*") if p.name.isdigit()) if directory.exists() else []


def check_history(workdir, steps, groups_per_step=4, group_size=2):
    """The one history that the journal and the metrics of a finished run must tell, however often it was stopped.

    No group admitted, finished or trained twice, none skipped, and the ledger's trained tokens are those of the trained groups' samples.
    """
    events, metrics = rows(workdir / "events.jsonl"), rows(workdir / "metrics.jsonl")
    by = {name: [e for e in events if e["event"] == name] for name in ("admit", "finish", "reward", "drop", "batch", "trained")}
    admitted = [e["group"] for e in by["admit"]]
    trained = [g for e in by["batch"] for g in e["groups"]]
    dropped = [e["group"] for e in by["drop"]]
    assert admitted == list(range(len(admitted))), "prompts are admitted in order, each once"
    assert len(set(trained)) == len(trained) == steps * groups_per_step, "each group is trained once"
    assert sorted(trained + dropped) == admitted, "what is admitted is trained, or dropped by name"
    assert len({e["problem"] for e in by["admit"]}) == len(admitted), "no problem twice in an epoch"
    assert [e["step"] for e in by["batch"]] == list(range(steps)) and [e["version"] for e in by["trained"]] == list(range(1, steps + 1))
    lengths = {(e["group"], e["sample"]): e["length"] for e in by["finish"]}
    assert len(lengths) == len(by["finish"]), "each sample finishes once"
    assert [r["step"] for r in metrics] == list(range(1, steps + 1)), "one row a step"
    assert all(r["ledger/residual"] == 0 for r in metrics)
    assert metrics[-1]["ledger/trained"] == sum(lengths[g, i] for g in trained for i in range(group_size))
    return events, metrics
