"""Checks answers in processes of their own, in parallel and under a hard time limit.

Invariants:
* Every submitted check is answered by exactly one ``on_result``, whatever the verifier does: raise, hang, exit, crash, eat
  memory, print or return too much. (After ``close`` there are no more answers.)
* The time limit counts from when a worker takes the check, never the time it queued; the process of an overdue check is killed.
* A slow check holds up one worker and no more; a dead worker is replaced, and checks that were only waiting are given to the next.
* Processes are spawned, never forked, and none is left after ``close`` or after the death of the program.

Lifecycle of a check: submitted → queued → taken by a worker → ok | error | timeout | died.
Spawned processes import the program's main module again: keep JAX out of its top level.
"""

from __future__ import annotations

import collections
import dataclasses
import itertools
import multiprocessing
import signal
import threading
import time
from collections.abc import Callable, Hashable, Mapping
from concurrent.futures import CancelledError, Future, TimeoutError
from concurrent.futures.process import BrokenProcessPool
from typing import Any

import numpy as np
from pebble import ProcessExpired, ProcessPool

from areal_jax.rewards import worker

BUILT_IN_VERIFIER = "areal_jax.rewards.verify:verify"
LATENCIES_KEPT = 4096
MAX_ATTEMPTS = 3


class RewardError(RuntimeError):
    """The service itself cannot do its work; the text says what to do."""


@dataclasses.dataclass(frozen=True)
class RewardResult:
    """The answer to one check.

    Attributes:
      key: the caller's name of the check.
      reward: the component ``correct``; None where the check failed.
      components: all components, by name.
      failure: None, 'error' (raised, or returned no reward), 'timeout' (killed at the limit) or 'died' (the process ended).
      cause: the traceback or what happened, for the failures.
      latency_s: seconds in the worker; for a timeout the limit, for a death (whose beginning nobody saw) those since ``submit``, at most the limit.
      turnaround_s: seconds since ``submit``, queue included.
    """

    key: Hashable
    reward: float | None
    components: Mapping[str, float]
    failure: str | None
    cause: str
    latency_s: float
    turnaround_s: float


@dataclasses.dataclass
class _Check:
    key: Hashable
    arguments: tuple[str, str, Mapping[str, Any], float]
    submitted: float
    attempts: int = 0


class RewardService:
    """A pool of verifier processes.

    Args:
      workers: number of processes.
      timeout_s: hard limit of one check, in seconds.
      verifier: 'package.module:function'; the function takes (response, answer, metadata) and returns a mapping of names
        to numbers in which ``correct`` is the reward. It is imported in the workers only.
      on_result: called once for every check, from a thread of the service; it must not block.
      memory_bytes: how much the data of a worker may grow beyond its imports; None: unlimited. Linux only.

    Raises:
      ValueError: a number is out of range.
    """

    def __init__(
        self,
        workers: int,
        timeout_s: float,
        verifier: str = BUILT_IN_VERIFIER,
        on_result: Callable[[RewardResult], None] | None = None,
        memory_bytes: int | None = 1 << 30,
    ):
        if workers < 1 or timeout_s <= 0:
            raise ValueError(f"'reward.workers' must be at least 1 and 'reward.timeout_s' greater than 0; got {workers} and {timeout_s}")
        self.workers, self.timeout_s, self.verifier, self.memory_bytes = workers, timeout_s, verifier, memory_bytes
        self._on_result = on_result
        self._lock = threading.RLock()
        self._numbers = itertools.count()
        self._pending: dict[int, _Check] = {}
        self._counts = {"submitted": 0, "done": 0, "timeouts": 0, "errors": 0, "died": 0, "pools_replaced": 0}
        self._latencies: collections.deque[float] = collections.deque(maxlen=LATENCIES_KEPT)
        self._consecutive_failures, self._last_cause = 0, ""
        self._callback_error: BaseException | None = None
        self._idle = threading.Condition(self._lock)
        self._closing = threading.Event()
        self._pool = self._new_pool()
        self._guard = threading.Thread(target=self._watch, name="reward-guard", daemon=True)
        self._guard.start()

    @property
    def consecutive_failures(self) -> int:
        """Failures since the last check that gave a reward."""
        return self._consecutive_failures

    @property
    def last_cause(self) -> str:
        """Cause of the latest failure; '' if there was none."""
        return self._last_cause

    @property
    def pending(self) -> int:
        """Checks that are not answered yet."""
        with self._lock:
            return len(self._pending)

    def counts(self) -> dict[str, float]:
        """Counters since the start (submitted, done, timeouts, errors, died, pools_replaced), pending, and the latency of the
        last checks in seconds (latency_p50_s, latency_p99_s; 0 before the first)."""
        with self._lock:
            latencies = np.asarray(self._latencies or [0.0])
            p50, p99 = np.percentile(latencies, [50, 99])
            return {**self._counts, "pending": len(self._pending), "latency_p50_s": float(p50), "latency_p99_s": float(p99)}

    def submit(self, key: Hashable, response: str, answer: str, metadata: Mapping[str, Any]) -> None:
        """Queues a check; ``on_result`` answers it.

        Args:
          key: names the check in its result.
          response: what the policy generated, without the prompt.
          answer: the reference answer.
          metadata: facts that the verifier needs; picklable.

        Raises:
          RewardError: the service is closed, or an earlier ``on_result`` raised.
        """
        with self._lock:
            self._raise_callback_error()
            if self._closing.is_set():
                raise RewardError("the reward service is closed; submit before close()")
            number = next(self._numbers)
            self._pending[number] = _Check(key, (response, answer, dict(metadata), self.timeout_s), time.monotonic())
            self._counts["submitted"] += 1
        self._schedule(number)

    def warm_up(self, timeout_s: float = 60.0) -> None:
        """Waits until every worker has loaded the verifier.

        Raises:
          RewardError: the verifier cannot be loaded, or the workers are not ready in time.
        """
        deadline = time.monotonic() + timeout_s
        seen: set[int] = set()
        while len(seen) < self.workers:
            try:
                futures = [self._pool.schedule(worker.ready, args=(0.05,)) for _ in range(self.workers)]
                for future in futures:
                    process, problem = future.result(timeout=max(0.01, deadline - time.monotonic()))
                    if problem:
                        raise RewardError(f"the verifier '{self.verifier}' cannot be loaded; correct its name or module:\n{problem}")
                    seen.add(process)
            except TimeoutError as error:
                raise RewardError(f"{len(seen)} of {self.workers} reward workers were ready after {timeout_s:g} s; take fewer 'reward.workers'") from error
            except (ProcessExpired, BrokenProcessPool, CancelledError) as error:
                raise RewardError(f"a reward worker died while it started: {error}") from error

    def wait(self, timeout_s: float) -> bool:
        """Waits until no check is pending; whether that came true in time."""
        with self._idle:
            done = self._idle.wait_for(lambda: not self._pending or self._callback_error is not None, timeout_s)
            self._raise_callback_error()
            return done

    def close(self, timeout_s: float = 10.0) -> None:
        """Ends the workers; checks that are pending stay unanswered.

        Raises:
          RewardError: the workers did not end in time.
        """
        self._closing.set()
        self._guard.join(timeout_s)
        ending = threading.Thread(target=self._end, args=(self._pool,), name="reward-close", daemon=True)
        ending.start()
        ending.join(timeout_s)
        if ending.is_alive() or self._guard.is_alive():
            raise RewardError(f"the reward workers did not end within {timeout_s:g} s")

    def __enter__(self) -> RewardService:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # ── the pool and its replacement ──

    def _new_pool(self) -> ProcessPool:
        return ProcessPool(
            max_workers=self.workers,
            initializer=worker.start,
            initargs=(self.verifier, self.memory_bytes),
            context=multiprocessing.get_context("spawn"),  # pyright: ignore[reportArgumentType]
        )

    @staticmethod
    def _end(pool: ProcessPool) -> None:
        pool.stop()
        pool.join()

    def _schedule(self, number: int) -> None:
        with self._lock:
            check = self._pending.get(number)
            if check is None:
                return
            try:
                future = self._pool.schedule(worker.check, args=check.arguments, timeout=self.timeout_s)
            except RuntimeError:
                return  # the pool broke a moment ago: the guard replaces it and schedules everything that is pending
            check.attempts += 1
        # Outside the lock: a future that is done already calls back right here, and the callback takes the caller's own locks.
        future.add_done_callback(lambda done: self._finished(number, done))

    def _watch(self) -> None:
        while not self._closing.wait(0.2):
            with self._lock:
                if self._pool.active or self._closing.is_set():
                    continue
                broken, self._pool = self._pool, self._new_pool()
                self._counts["pools_replaced"] += 1
                waiting = {number: check.attempts for number, check in self._pending.items()}
            self._end(broken)
            for number, attempts in waiting.items():
                if attempts < MAX_ATTEMPTS:
                    self._schedule(number)
                else:
                    self._answer(number, None, {}, "died", f"the reward workers ended {attempts} times while this check waited", None)

    # ── results ──

    def _finished(self, number: int, future: Future) -> None:
        if future.cancelled():
            return
        error = future.exception()
        if error is None:
            components, latency = future.result()
            self._answer(number, components["correct"], components, None, "", latency)
        elif isinstance(error, BrokenProcessPool):
            return  # not this check's doing: the guard replaces the pool and schedules it again
        elif isinstance(error, TimeoutError):
            self._answer(number, None, {}, "timeout", f"the check took longer than 'reward.timeout_s' = {self.timeout_s:g} s", self.timeout_s)
        elif isinstance(error, ProcessExpired):
            if error.exitcode == -signal.SIGALRM:
                self._answer(number, None, {}, "timeout", f"the check took longer than 'reward.timeout_s' = {self.timeout_s:g} s", self.timeout_s)
            else:
                self._answer(number, None, {}, "died", f"the worker process ended with code {error.exitcode} during the check", None)
        elif isinstance(error, worker.VerifierError):
            self._answer(number, None, {}, "error", error.cause, error.seconds)
        else:  # the answer did not come through the pipe
            self._answer(number, None, {}, "error", str(error) or repr(error), None)

    def _answer(self, number: int, reward: float | None, components: Mapping[str, float], failure: str | None, cause: str, latency: float | None) -> None:
        with self._lock:
            check = self._pending.pop(number, None)
            if check is None or self._closing.is_set():
                return
            turnaround = time.monotonic() - check.submitted
            latency = min(self.timeout_s, turnaround) if latency is None else latency
            self._latencies.append(latency)
            self._counts["done"] += 1
            if failure is None:
                self._consecutive_failures = 0
            else:
                self._counts[{"timeout": "timeouts", "error": "errors", "died": "died"}[failure]] += 1
                self._consecutive_failures += 1
                self._last_cause = cause
        try:
            if self._on_result is not None:
                self._on_result(RewardResult(check.key, reward, components, failure, cause, latency, turnaround))
        except BaseException as error:
            # Futures swallow what a callback raises; kept here so that the next submit, wait or close tells it.
            self._callback_error = error
        finally:
            with self._idle:
                self._idle.notify_all()

    def _raise_callback_error(self) -> None:
        if self._callback_error is not None:
            raise RewardError("on_result raised in the reward service") from self._callback_error
