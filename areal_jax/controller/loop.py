"""The run: joins prompts, sampler, rewards, controller, trainer and weight push, and keeps the run's files.

Threads: this one trains; the rollout thread samples; the reward service answers from its own; one thread evaluates. One lock guards the
controller, the prompt stream and the sampler's records; a snapshot for a checkpoint is taken under it, between two of their changes.

    fetch ─► build ─► step ─► batch_trained ─► push ─► publish ─► metrics ─► (evaluate) ─► (checkpoint) ─┐
      ▲─────────────────────────────────────────────────────────────────────────────────────────────────┘

Invariants:
* A step ends with its weights published, its row written and, when it is due, its checkpoint begun.
* Every wait for a batch has a deadline that says what it waited for; a failure of any thread ends the run here, after a checkpoint.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from areal_jax.controller.answers import Waiting
from areal_jax.controller.controller import Controller
from areal_jax.controller.protocols import Learner, Pusher
from areal_jax.controller.rollout import Rollout
from areal_jax.types import TrainingBatch

STEADY_AFTER = 5
"""Steps after which a compilation counts as one in steady state."""


class Loop:
    """Runs training steps until the last, a stop request or a failure.

    Args:
      controller, rollout, learner, pusher: the parts.
      stream: makes the iterator of packed batches from ``fetch``; fetching is this loop's.
      changed: the run's lock and condition.
      total_steps: steps of the whole run.
      wait_timeout_s: longest wait for a batch.
      stop_requested: whether somebody asked the run to stop.
      on_step: called with the completed row of metrics after every step.
      save: called with (version, snapshot) to begin a checkpoint.
      save_every: steps between checkpoints; 0: none but at the end.
      after_step: called with the version after each step (evaluation).
      extra_metrics: more metrics of the moment (compilations, memory, rewards).
      trace: called as trace(lane, name, start, end, **arguments).
      marks: more for the snapshot, taken with it under the lock (the journal's place).
    """

    def __init__(
        self,
        controller: Controller,
        rollout: Rollout,
        learner: Learner,
        pusher: Pusher,
        stream: Callable[[Callable[[], TrainingBatch | None]], Iterator[Any]],
        *,
        changed: threading.Condition,
        total_steps: int,
        wait_timeout_s: float,
        stop_requested: Callable[[], bool],
        on_step: Callable[[dict[str, Any]], None],
        save: Callable[[int, Mapping[str, Any]], None],
        save_every: int,
        after_step: Callable[[int], None],
        extra_metrics: Callable[[int], Mapping[str, Any]],
        trace: Callable[..., None],
        marks: Callable[[], Mapping[str, Any]] = lambda: {},
    ):
        self.controller, self.rollout, self.learner, self.pusher = controller, rollout, learner, pusher
        self._stream, self._changed, self._total, self._timeout = stream, changed, total_steps, wait_timeout_s
        self._stop_requested, self._on_step, self._save, self._save_every = stop_requested, on_step, save, save_every
        self._after_step, self._extra, self._trace, self._marks = after_step, extra_metrics, trace, marks
        self._batch: TrainingBatch | None = None
        self._waited = {"batch": 0.0, "due": 0.0}
        self._saved: int | None = None
        self._whole = True
        self._totals: dict[str, float] = {}

    def run(self) -> bool:
        """Trains to the end. Returns False if it was asked to stop before.

        Raises:
          What a thread of the run raised, after a checkpoint of the last whole step; TimeoutError when a wait for a batch passed its deadline.
        """
        self._totals = self._read_totals()
        self.rollout.start()
        try:
            started = time.monotonic()
            for packed in self._stream(self._fetch):
                started = self._train(packed, started)
            if self.rollout.failure is not None:
                raise self.rollout.failure
            return self.controller.version >= self._total
        finally:
            try:
                self.rollout.stop(timeout_s=20.0)
            finally:
                if self._whole:  # else the newest checkpoint is the last whole state
                    self.checkpoint()

    def checkpoint(self) -> None:
        """Begins a checkpoint of this version, unless it has one."""
        if self._saved == self.controller.version:
            return
        start = time.monotonic()
        with self._changed:
            snapshot = {"controller": self.controller.snapshot(self.rollout.sampler.partials()), "prompts": self.rollout.prompts.get_state(), **self._marks()}
            version = self.controller.version
        self._save(version, snapshot)
        self._saved = version
        self._trace("trainer", "checkpoint", start, time.monotonic(), version=version)

    def _fetch(self) -> TrainingBatch | None:
        start, answer = time.monotonic(), None
        with self._changed:
            while True:
                if self._stop_requested() or self.rollout.failure is not None or self.controller.version >= self._total:
                    return None
                now = time.monotonic()
                answer = self.controller.next_batch()
                self.rollout.sampler.cancel(self.controller.take_cancelled())
                if isinstance(answer, TrainingBatch):
                    break
                if now - start > self._timeout:
                    raise TimeoutError(f"no batch for step {self.controller.version} after {self._timeout:g} s ('rollout.wait_timeout_s'): {answer.describe()}")
                self._changed.wait(0.05)
                self._count_wait(answer, time.monotonic() - now)
        self._batch = answer
        if self._waited["batch"] > 1e-3:
            self._trace("trainer", "wait for batch", start, time.monotonic(), step=answer.step)
        return answer

    def _count_wait(self, answer: Waiting, seconds: float) -> None:
        self._waited["batch"] += seconds
        if answer.kind == "due":
            self._waited["due"] += seconds

    def _train(self, packed: Any, started: float) -> float:
        batch = self._batch
        assert batch is not None
        begun = time.monotonic()
        self._whole = False
        metrics = self.learner.step(packed)
        self._trace("trainer", "train step", begun, time.monotonic(), step=batch.step, groups=len(batch.groups))
        with self._changed:
            self.controller.batch_trained(batch)
            self._whole = True
            version = self.controller.version
        begun = time.monotonic()
        update = self.pusher.push(self.learner.params, version)
        self._trace("weights", "push", begun, time.monotonic(), version=version, bytes=update.bytes)
        self.rollout.sampler.publish(update)
        ended = time.monotonic()
        tokens = sum(g.tokens for g in batch.groups)
        row = {
            "step": version,
            "version": version,
            "stage": "training",
            **metrics,
            **self._flow(batch, tokens, ended - started),
            "weight_sync/transfer_s": update.transfer_s,
            "weight_sync/bytes": update.bytes,
            **self._extra(version),
        }
        self._on_step(row)
        self._after_step(version)
        if self._save_every and version % self._save_every == 0:
            self.checkpoint()
        return ended

    def _read_totals(self) -> dict[str, float]:
        s = self.rollout.sampler.statistics
        names = (
            "generated_tokens",
            "prefill_tokens",
            "idle_s",
            "live_slot_steps",
            "slot_steps",
            "updates",
            "interrupts",
            "pause_s",
            "rebuild_s",
            "preemptions",
        )
        return {name: float(getattr(s, name)) for name in names}

    def _flow(self, batch: TrainingBatch, tokens: int, seconds: float) -> dict[str, Any]:
        """Speed, flow and ledger of the step that took ``seconds``."""
        with self._changed:
            totals, counts = self._read_totals(), self.controller.counts()
        since = {name: value - self._totals[name] for name, value in totals.items()}
        self._totals = totals
        waited, self._waited = self._waited, {"batch": 0.0, "due": 0.0}
        updates = since["updates"]
        return {
            **counts,
            "groups/due": batch.due,
            "time/step": seconds,
            "time/wait_for_batch": waited["batch"],
            "time/wait_for_due": waited["due"],
            "tokens_per_second/generated": since["generated_tokens"] / seconds,
            "tokens_per_second/prefill": since["prefill_tokens"] / seconds,
            "tokens_per_second/trained": tokens / seconds,
            "sampler/idle_fraction": min(1.0, since["idle_s"] / seconds),
            "sampler/slot_occupancy": since["live_slot_steps"] / since["slot_steps"] if since["slot_steps"] else None,
            "sampler/kv_pages_used": self.rollout.sampler.statistics.kv_pages_used,
            "sampler/preemptions": int(since["preemptions"]),
            "sampler/version": self.rollout.sampler.version,
            "sampler/interrupts": int(since["interrupts"]),
            "weight_sync/pause_s": since["pause_s"] / updates if updates else None,
            "weight_sync/rebuild_s": since["rebuild_s"] / updates if updates else None,
        }
