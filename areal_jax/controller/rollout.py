"""The rollout thread: admits prompts while the gate is open, runs the sampler, sends what is finished to the rewards.

Invariants:
* The controller, the prompt stream and the sampler's records change only under the run's one lock, so that a snapshot taken under it is consistent.
* Nothing waits here but the sampler's idle wait; what goes wrong is kept and handed to the trainer's thread.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

from areal_jax.controller.controller import Controller
from areal_jax.controller.protocols import PromptStream, Rewards, Sampler
from areal_jax.types import Trajectory


class Rollout:
    """Everything between the prompt stream and the controller's buffer.

    Args:
      controller: the state machine.
      prompts: the stream.
      decode: token ids → text.
      rewards: the service; its results come to ``on_result``.
      on_failure: 'zero' or 'drop', for a check that failed.
      max_failures: failed checks in a row that end the run.
      changed: the run's lock and condition; notified when a batch may have become possible.
      trace: called as trace(lane, name, start, end, **arguments).
    """

    def __init__(
        self,
        controller: Controller,
        prompts: PromptStream,
        decode: Callable[[Any], str],
        rewards: Rewards,
        *,
        on_failure: str,
        max_failures: int,
        changed: threading.Condition,
        trace: Callable[..., None],
    ):
        self.controller, self.prompts, self.rewards = controller, prompts, rewards
        self._decode, self._on_failure, self._max_failures, self._changed, self._trace = decode, on_failure, max_failures, changed, trace
        self._finished: list[Trajectory] = []
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self.failure: BaseException | None = None
        self.sampler: Sampler

    def attach(self, sampler: Sampler) -> None:
        """Gives the sampler, whose callbacks are ``on_progress`` and ``on_weights``; takes up what a restored controller holds."""
        self.sampler = sampler
        with self._changed:
            if sampler.version > self.controller.active_version:
                self.controller.weights_active(sampler.version)
            sampler.submit(self.controller.pending_requests())
            self._finished.extend(trajectory for _, trajectory in self.controller.unrewarded())

    # The sampler's callbacks, under the lock.

    def on_progress(self, progress: Any) -> None:
        for (group_id, sample_index), count in progress.new_tokens:
            self.controller.tokens_generated(group_id, sample_index, count, progress.version)
        for trajectory in progress.finished:
            self.controller.sample_finished(trajectory)
        self._finished.extend(progress.finished)

    def on_weights(self, version: int) -> None:
        self.controller.weights_active(version)
        self._changed.notify_all()

    # The rewards' callback, from a thread of the service.

    def on_result(self, result: Any) -> None:
        group_id, sample_index = result.key
        with self._changed:
            if result.failure is None:
                self.controller.sample_rewarded(group_id, sample_index, result.reward, result.components, result.latency_s)
            elif self._on_failure == "zero":
                self.controller.sample_rewarded(group_id, sample_index, 0.0, {}, result.latency_s)
            else:
                self.drop(group_id, "reward_error")
            if self.rewards.consecutive_failures >= self._max_failures and self.failure is None:
                self.failure = RuntimeError(
                    f"{self.rewards.consecutive_failures} reward checks in a row failed ('reward.max_consecutive_failures'); the last cause:\n"
                    f"{self.rewards.last_cause}\nmend the verifier and run the same command again"
                )
            self._changed.notify_all()
        end = time.monotonic()
        self._trace("rewards", "check", end - result.latency_s, end, failure=result.failure)

    def drop(self, group_id: int, reason: str) -> None:
        """Gives a group up by name (under the lock)."""
        if self.controller.is_live(group_id):
            self.sampler.cancel(self.controller.drop_group(group_id, reason))

    # The thread.

    def start(self) -> None:
        self._thread = threading.Thread(target=self._run, name="rollout", daemon=True)
        self._thread.start()

    def stop(self, timeout_s: float) -> None:
        """Ends the thread at the next dispatch boundary.

        Raises:
          TimeoutError: the sampler's dispatch did not end in time.
        """
        self._stop.set()
        if self._thread is not None:
            self._thread.join(timeout_s)
            self.sampler.close(timeout_s)
            if self._thread.is_alive():
                raise TimeoutError(f"the rollout thread did not end within {timeout_s:g} s: a dispatch of the sampler is still running")

    def _run(self) -> None:
        try:
            while not self._stop.is_set():
                self._admit()
                self.sampler.run_once()
                self._score()
        except BaseException as error:  # handed to the trainer's thread, which raises it
            with self._changed:
                self.failure = self.failure or error
                self._changed.notify_all()

    def _admit(self) -> None:
        with self._changed:
            for _ in range(self.controller.capacity()):
                self.sampler.submit(self.controller.admit(next(self.prompts)))

    def _score(self) -> None:
        with self._changed:
            finished, self._finished = self._finished, []
            prompts = [self.controller.prompt_of(t.group_id) for t in finished]
        for trajectory, prompt in zip(finished, prompts, strict=True):
            if prompt is not None:
                self.rewards.submit((trajectory.group_id, trajectory.sample_index), self._decode(trajectory.tokens), prompt.answer, prompt.metadata)
