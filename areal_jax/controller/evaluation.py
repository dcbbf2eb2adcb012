"""Held-out evaluation beside the training: the same sampler programs, the same rewards, weights that do not change under it.

Invariants:
* Every held-out sample is drawn under one version, which the row names; training goes on meanwhile.
* An evaluation that is due while one runs is left out and said so; the first and the last are waited for.
* A failed check counts as wrong.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from areal_jax.controller.protocols import Rewards
from areal_jax.types import GenerationRequest, Prompt, Trajectory, WeightUpdate

EVALUATION = "evaluation"
"""First part of the reward service's keys for held-out samples."""


class Evaluator:
    """Evaluates policies on held-out prompts.

    Args:
      make_sampler: (weights, on_progress) → a sampler of its own over the engine's programs, with ``run_until_done(deadline_s, stop_requested)``.
      prompts: held-out prompts in an order whose every prefix is a fair sample.
      decode: token ids → text.
      rewards: the service; results with keys (EVALUATION, ...) come to ``on_result``.
      samples: k, samples a problem.
      max_new_tokens: length limit.
      on_row: called with each row of eval.jsonl.
      trainer_version: the trainer's version of the moment.
      deadline_s: longest an evaluation may take.
      stop_requested: whether somebody asked the run to stop; an evaluation is then given up.
      trace: called as trace(lane, name, start, end, **arguments).
    """

    def __init__(
        self,
        make_sampler: Callable[[WeightUpdate, Callable[[Any], None]], Any],
        prompts: Sequence[Prompt],
        decode: Callable[[Any], str],
        rewards: Rewards,
        *,
        samples: int,
        max_new_tokens: int,
        on_row: Callable[[dict[str, Any]], None],
        trainer_version: Callable[[], int],
        deadline_s: float,
        stop_requested: Callable[[], bool],
        trace: Callable[..., None],
    ):
        self._make_sampler, self._prompts, self._decode, self._rewards = make_sampler, prompts, decode, rewards
        self._samples, self._max_new_tokens, self._on_row = samples, max_new_tokens, on_row
        self._trainer_version, self._deadline_s, self._trace = trainer_version, deadline_s, trace
        self._stop_requested = lambda: stop_requested() or self._closing.is_set()
        self._closing = threading.Event()
        self._results: dict[Any, float] = {}
        self._arrived = threading.Condition()
        self._thread: threading.Thread | None = None
        self.failure: BaseException | None = None
        self.left_out = 0

    def on_result(self, result: Any) -> None:
        """The reward service's callback for keys of an evaluation."""
        with self._arrived:
            self._results[result.key] = 0.0 if result.failure else float(result.reward)
            self._arrived.notify_all()

    def start(self, weights: WeightUpdate, problems: int) -> bool:
        """Evaluates in the background; False if an evaluation is still running, and this one is left out."""
        if self._thread is not None and self._thread.is_alive():
            self.left_out += 1
            return False
        self._thread = threading.Thread(target=self._guarded, args=(weights, problems), name="evaluation", daemon=True)
        self._thread.start()
        return True

    def finish(self, timeout_s: float) -> None:
        """Waits for a running evaluation.

        Raises:
          TimeoutError: it did not end in time. Or what the evaluation raised.
        """
        if self._thread is not None:
            self._thread.join(timeout_s)
            if self._thread.is_alive():
                raise TimeoutError(f"the running evaluation did not end within {timeout_s:g} s; lower 'eval.periodic_problems'")
        if self.failure is not None:
            raise self.failure

    def close(self, timeout_s: float) -> None:
        """Ends a running evaluation without a row.

        Raises:
          TimeoutError: it did not end in time.
        """
        self._closing.set()
        if self._thread is not None:
            self._thread.join(timeout_s)
            if self._thread.is_alive():
                raise TimeoutError(f"the running evaluation did not end within {timeout_s:g} s: a dispatch of the sampler is still running")

    def _guarded(self, weights: WeightUpdate, problems: int) -> None:
        try:
            self.evaluate(weights, problems)
        except BaseException as error:  # raised in the trainer's thread, after its step or by ``finish``
            self.failure = error

    def evaluate(self, weights: WeightUpdate, problems: int) -> dict[str, Any] | None:
        """Draws and checks ``samples`` responses for each of the first ``problems`` held-out prompts.

        Returns:
          The row of eval.jsonl; None, and no row is written, when somebody asked to stop.

        Raises:
          TimeoutError: generation or checking passed the deadline.
        """
        start = time.monotonic()
        prompts = list(self._prompts[:problems])
        drawn: list[Trajectory] = []
        sampler = self._make_sampler(weights, lambda progress: drawn.extend(progress.finished))
        sampler.submit(
            GenerationRequest(group_id=i, sample_index=k, prompt_tokens=p.tokens, max_new_tokens=self._max_new_tokens)
            for i, p in enumerate(prompts)
            for k in range(self._samples)
        )
        sampler.run_until_done(self._deadline_s, self._stop_requested)
        if self._stop_requested():
            return None
        keys = {(EVALUATION, weights.version, t.group_id, t.sample_index): t for t in drawn}
        for key, t in keys.items():
            prompt = prompts[t.group_id]
            self._rewards.submit(key, self._decode(t.tokens), prompt.answer, prompt.metadata)
        deadline = time.monotonic() + self._deadline_s
        with self._arrived:
            while not self._arrived.wait_for(lambda: keys.keys() <= self._results.keys(), 0.2):
                if self._stop_requested():
                    return None
                if time.monotonic() > deadline:
                    missing = len(keys.keys() - self._results.keys())
                    raise TimeoutError(
                        f"evaluation of version {weights.version}: {missing} of {len(keys)} answers unchecked after {self._deadline_s:g} s "
                        "('rollout.wait_timeout_s'); raise it, or lower 'reward.timeout_s' or 'eval.problems'"
                    )
            correct = {key: self._results.pop(key) for key in keys}
        row = self._row(weights.version, prompts, [(keys[key], value) for key, value in correct.items()], time.monotonic() - start)
        self._trace("evaluation", "evaluation", start, time.monotonic(), version=weights.version, accuracy=row["eval/accuracy"])
        self._on_row(row)
        return row

    def _row(self, version: int, prompts: Sequence[Prompt], checked: list[tuple[Trajectory, float]], seconds: float) -> dict[str, Any]:
        by_problem = np.zeros(len(prompts))
        for t, value in checked:
            by_problem[t.group_id] += value / self._samples
        accuracy = float(by_problem.mean())
        deviation = float(by_problem.std(ddof=1)) if len(prompts) > 1 else 0.0
        kinds: dict[str, list[float]] = {}
        for prompt, value in zip(prompts, by_problem, strict=True):
            if "kind" in prompt.metadata:
                kinds.setdefault(str(prompt.metadata["kind"]), []).append(float(value))
        return {
            "step": version,
            "stage": "evaluation",
            "eval/accuracy": accuracy,
            "eval/n": len(prompts),
            "eval/k": self._samples,
            "eval/version": version,
            "eval/lag_steps": self._trainer_version() - version,
            "eval/truncated_ratio": float(np.mean([t.truncated for t, _ in checked])),
            "eval/confidence95": 1.96 * deviation / math.sqrt(len(prompts)),
            "eval/response_length": float(np.mean([t.length for t, _ in checked])),
            "eval/time_s": seconds,
            **{f"eval/accuracy/{kind}": float(np.mean(values)) for kind, values in sorted(kinds.items())},
        }
