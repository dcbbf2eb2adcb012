"""Runs the jobs of a study in processes of their own, several at once, a core each.

Invariants:
* A job whose result is there is not run; one that was interrupted leaves nothing of a cell, and of a warm-up its last checkpoint.
* A job runs once what it needs is there. One that fails is named with the end of its log, and the others go on.
* No process is left behind: a stop ends those that run, and they end by themselves when this one is killed.
"""

from __future__ import annotations

import dataclasses
import json
import os
import pathlib
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from areal_jax.experiments.worker import FINISHED

POLL_S = 0.2
LOG_END = 1500
"""Characters of a failed job's log that are shown."""
END_S = 10.0
"""How long a job may take to end after it was told to."""


@dataclasses.dataclass(frozen=True)
class Job:
    """One process.

    Attributes:
      name: for people, and of its log.
      result: file or directory that it makes; the job is done when it is there.
      needs: what has to be there before.
      description: what the process is told, JSON-able.
    """

    name: str
    result: pathlib.Path
    needs: pathlib.Path | None
    description: Mapping[str, Any]


@dataclasses.dataclass
class _Running:
    job: Job
    process: subprocess.Popen
    started: float
    log: pathlib.Path


def available_cores() -> list[int]:
    """The cores that this process may use."""
    return sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else list(range(os.cpu_count() or 1))


class Grid:
    """Runs jobs.

    Args:
      jobs: in the order in which they are wanted.
      cores: one for each process at a time.
      logs: directory of their logs.
      on_done: called with (job, seconds) of each finished one.
      on_failed: called with (job, what went wrong).
      module: that a process runs; it is told its job on standard input.
    """

    def __init__(
        self,
        jobs: Sequence[Job],
        cores: Sequence[int],
        logs: pathlib.Path,
        on_done: Callable[[Job, float], None],
        on_failed: Callable[[Job, str], None],
        module: str = "areal_jax.experiments.worker",
    ):
        self._waiting = [job for job in jobs if not job.result.exists()]
        self._free, self._logs, self._on_done, self._on_failed = list(cores), logs, on_done, on_failed
        self._module = module
        self._running: dict[int, _Running] = {}
        self.failed: list[Job] = []

    def run(self, wait: Callable[[float], bool]) -> bool:
        """Runs all jobs.

        Args:
          wait: sleeps so many seconds; True when somebody asked to stop.

        Returns:
          False when it was asked to stop before the end.
        """
        try:
            while True:
                self._start()
                if not self._running:
                    break
                if wait(POLL_S):
                    return False
                self._collect()
        finally:
            self._end()
        for job in self._waiting:
            self.failed.append(job)
            self._on_failed(job, f"'{job.needs}', which it needs, was not made")
        return True

    def _start(self) -> None:
        for core in list(self._free):
            job = next((job for job in self._waiting if job.needs is None or job.needs.exists()), None)
            if job is None:
                return
            self._waiting.remove(job)
            self._free.remove(core)
            log = self._logs / f"{job.name}.log"
            with open(log, "w") as stream:
                process = subprocess.Popen(
                    [sys.executable, "-m", self._module],
                    stdin=subprocess.PIPE,
                    stdout=stream,
                    stderr=subprocess.STDOUT,
                    env=one_core_environment(),
                    process_group=0,  # Ctrl-C is this program's to answer
                )
            assert process.stdin is not None
            with process.stdin as stream:
                stream.write(json.dumps({**job.description, "core": core}).encode())
            self._running[core] = _Running(job, process, time.monotonic(), log)

    def _collect(self) -> None:
        for core, running in list(self._running.items()):
            code = running.process.poll()
            if code is None:
                continue
            del self._running[core]
            self._free.append(core)
            if code == FINISHED and running.job.result.exists():
                self._on_done(running.job, time.monotonic() - running.started)
            else:
                self.failed.append(running.job)
                self._on_failed(running.job, f"exit code {code}; the end of {running.log}:\n{running.log.read_text()[-LOG_END:]}")

    def _end(self) -> None:
        for running in self._running.values():
            running.process.terminate()
        for running in self._running.values():
            try:
                running.process.wait(END_S)
            except subprocess.TimeoutExpired:
                running.process.kill()
                running.process.wait()
        self._running.clear()


def one_core_environment() -> dict[str, str]:
    """This process's environment for a child that has one core, no accelerator, and this package on its path."""
    root = str(pathlib.Path(__file__).resolve().parents[2])
    path = os.pathsep.join(filter(None, (root, os.environ.get("PYTHONPATH", ""))))
    kept = {name: value for name, value in os.environ.items() if name not in ("XLA_FLAGS", "JAX_NUM_CPU_DEVICES")}
    threads = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
    return {**kept, **threads, "JAX_PLATFORMS": "cpu", "PYTHONPATH": path}
