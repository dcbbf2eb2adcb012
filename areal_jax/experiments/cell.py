"""One cell of a study: reinforcement learning in virtual time from a seed's warm-up, and what is measured of it.

Invariants:
* Held-out accuracy is measured before the first step, every ``eval.every_steps`` and after the last, with one version of weights each.
* A run whose gradients stop being finite ends there: that is its result (``diverged``), measured with the last weights that were finite.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np

from areal_jax.assembly import EVALUATION_SEED, check_positions, evaluation_engines, make_engines, make_policy, make_pusher, make_sampler, start_devices
from areal_jax.config import Config, put
from areal_jax.config_devices import check_pages
from areal_jax.controller.controller import Controller
from areal_jax.controller.evaluation import Evaluator
from areal_jax.data.task import settle_lengths
from areal_jax.experiments.in_process import DirectRewards
from areal_jax.experiments.task import load_study_task
from areal_jax.experiments.virtual_time import TrainedStep, VirtualClock, VirtualRun, ages
from areal_jax.models.tokenizer import load_tokenizer
from areal_jax.rewards.worker import load as load_verifier
from areal_jax.sampler.driver import RolloutDriver
from areal_jax.trainer.step import NonFiniteError
from areal_jax.trainer.trainer import Trainer
from areal_jax.types import WeightUpdate

KEPT = (
    *("reward/mean", "reward/zero_std_groups", "entropy", "approx_kl", "clip_ratio/low", "clip_ratio/high", "grad_norm", "update/skipped_nonfinite"),
    *("importance_weight/mean", "importance_weight/max", "importance_weight/ess", "importance_weight/capped_fraction", "mismatch_kl/staleness"),
    *("engine_gap/max", "staleness/mean", "staleness/max", "trajectory_spans/mean", "trajectory_spans/max", "response_length/mean", "truncated_ratio"),
)
"""Metrics of a step that a cell's file holds, besides its tick."""
EVALUATED = ("step", "accuracy", "n", "k", "confidence95", "truncated_ratio", "response_length")
"""Of an evaluation."""


class StoppedError(Exception):
    """Somebody asked the cell to stop; it leaves nothing."""


class CellRun:
    """The parts of one cell, compiled and ready to run once.

    Args:
      config: from ``study.cell_config``; its policy is there.
      train_ticks: decode steps that a training step lasts in virtual time.
      stop_requested: asked after every step and during evaluations.
      say: called with a line on the progress.

    Raises:
      ConfigError: the configuration does not fit its policy or task.
    """

    def __init__(self, config: Config, train_ticks: int, stop_requested: Callable[[], bool], say: Callable[[str], None] = lambda text: None):
        self._started = time.monotonic()
        self._stop_requested, self._say = stop_requested, say
        tokenizer = load_tokenizer(config.model.path)
        task = load_study_task(config, tokenizer)
        longest, capacity = settle_lengths(config, task)
        check_pages(config, longest)
        put(config, "trainer.micro_batch_tokens", capacity)
        self.config = config
        meshes = start_devices(config)
        model, params = make_policy(config, tokenizer)
        check_positions(config, model, longest)
        self.trainer = Trainer(config, model, meshes.trainer, params)
        self._pusher = make_pusher(config, model, meshes, self.trainer.frozen)
        engines = make_engines(config, model, meshes, tokenizer, longest)
        verify = load_verifier(config.reward.verifier)
        self.controller, clock = self._controller()
        self.run = VirtualRun(
            self.controller,
            clock,
            iter(task.prompts),
            tokenizer.decode,
            verify,
            self.trainer,
            self._pusher,
            slots=config.rollout.slots,
            train_ticks=train_ticks,
        )
        sampler = RolloutDriver(
            engines[0],
            self._weights(),
            seed=config.seed,
            interruptible=config.rollout.interruptible,
            kv_on_update=config.rollout.kv_on_update,
            on_progress=self.run.on_progress,
            on_weights=self.run.on_weights,
        )
        sampler.warm_up()
        self.run.attach(sampler)
        others = evaluation_engines(config, engines, lambda temperature: make_engines(config, model, meshes, tokenizer, longest, temperature=temperature))
        rewards = DirectRewards(verify)
        self._evaluator = Evaluator(
            lambda update, on_progress: make_sampler(config, others, update, seed=(config.seed + EVALUATION_SEED) % 2**32, on_progress=on_progress),
            task.heldout,
            tokenizer.decode,
            rewards,
            samples=config.eval.samples,
            max_new_tokens=config.rollout.max_new_tokens,
            on_row=lambda row: None,
            trainer_version=lambda: self.trainer.version,
            deadline_s=config.rollout.wait_timeout_s,
            stop_requested=stop_requested,
            trace=lambda *_, **__: None,
        )
        rewards.on_result = self._evaluator.on_result
        self._evaluations: list[dict[str, Any]] = []

    def _controller(self) -> tuple[Controller, VirtualClock]:
        c, clock = self.config, VirtualClock()
        controller = Controller(
            groups_per_step=c.trainer.groups_per_step,
            group_size=c.rollout.group_size,
            max_new_tokens=c.rollout.max_new_tokens,
            max_staleness=c.rollout.max_staleness,
            on_overdue=c.rollout.on_overdue,
            max_concurrent_groups=c.rollout.max_concurrent_groups,
            journal=lambda event: None,
            clock=clock,
            total_steps=c.trainer.steps,
        )
        return controller, clock

    def _weights(self) -> WeightUpdate:
        return self._pusher.push(self.trainer.params, self.trainer.version)

    def _evaluate(self, problems: int) -> None:
        row = self._evaluator.evaluate(self._weights(), problems)
        if row is None:
            raise StoppedError
        self._evaluations.append({name: row[name if name == "step" else f"eval/{name}"] for name in EVALUATED})
        self._say(f"step {self.trainer.version}: held-out accuracy {row['eval/accuracy']:.3f}")

    def measure(self) -> dict[str, Any]:
        """Trains and evaluates.

        Returns:
          JSON-able: ``evaluations`` (rows of ``EVALUATED``), ``steps`` (rows of ``KEPT``), ``staleness_tokens`` (trained tokens by age), ``ticks``,
          ``dropped_tokens`` (by reason), ``diverged`` (the cause, or None), ``seconds`` (of start-up, and of all).

        Raises:
          StoppedError: it was asked to stop.
        """
        c, total = self.config, self.config.trainer.steps
        ready = time.monotonic()
        rows: list[dict[str, Any]] = []
        by_age: Counter[int] = Counter()
        diverged = None
        self._evaluate(c.eval.problems)
        try:
            for done in self.run.steps(total):
                rows.append(step_row(done))
                by_age.update(ages(done.batch).tolist())
                if self._stop_requested():
                    raise StoppedError
                if c.eval.every_steps and self.trainer.version % c.eval.every_steps == 0 and self.trainer.version < total:
                    self._evaluate(c.eval.periodic_problems)
        except NonFiniteError as error:
            diverged = str(error)
        self._evaluate(c.eval.problems)
        return {
            "evaluations": self._evaluations,
            "steps": rows,
            "staleness_tokens": {str(age): count for age, count in sorted(by_age.items())},
            "ticks": self.run.clock.now,
            "dropped_tokens": self.controller.dropped_tokens(),
            "diverged": diverged,
            "seconds": {"start": round(ready - self._started, 1), "all": round(time.monotonic() - self._started, 1)},
        }


def step_row(done: TrainedStep) -> dict[str, Any]:
    """What a cell's file holds of a training step; None where nothing could be measured."""
    row: dict[str, Any] = {"step": done.batch.step + 1, "tick": done.tick}
    for name in KEPT:
        value = done.metrics.get(name)
        row[name] = None if value is None or not np.isfinite(value) else round(float(value), 7)
    return row
