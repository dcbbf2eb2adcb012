"""One training run: its files, its parts joined, restored from its newest checkpoint where there is one.

Invariants:
* The parts are built once, and ended by ``close`` however the building or the run ends.
* A checkpoint holds the train state, the controller's snapshot, the prompt stream's place and the journal's, all of one moment.
"""

from __future__ import annotations

import contextlib
import functools
import pathlib
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import psutil

from areal_jax.assembly import evaluation_engines, make_engines, make_evaluator, make_pusher, make_rewards, make_sampler, save_policy
from areal_jax.cluster.meshes import Meshes
from areal_jax.config import Config
from areal_jax.controller.controller import Controller
from areal_jax.controller.evaluation import EVALUATION
from areal_jax.controller.loop import STEADY_AFTER, Loop
from areal_jax.controller.rollout import Rollout
from areal_jax.data.stream import TrajectoryStream
from areal_jax.data.task import Task, settle_lengths
from areal_jax.models.architecture import ModelConfig
from areal_jax.models.tokenizer import Tokenizer
from areal_jax.telemetry.compiles import CompileCounter
from areal_jax.telemetry.journal import Journal
from areal_jax.telemetry.lines import read_lines
from areal_jax.telemetry.live import LiveView
from areal_jax.telemetry.metrics import MetricsWriter
from areal_jax.telemetry.trace import Trace
from areal_jax.trainer.checkpoint import Checkpointer
from areal_jax.trainer.trainer import Trainer
from areal_jax.types import TrainingBatch, WeightUpdate


class Files:
    """The files of a run: metrics, journal, trace, checkpoints."""

    def __init__(self, workdir: pathlib.Path, config: Config):
        members = [f"reward/{name}" for name in ("correct", "format", "scorer", "math_verify")]
        self.workdir = workdir
        self.metrics = MetricsWriter(workdir, config.telemetry.tensorboard, members)
        self.journal = Journal(workdir / "events.jsonl")
        self.trace = Trace(workdir / "trace.json" if config.telemetry.trace else None)
        self.checkpoints = Checkpointer(workdir / "checkpoints", config.checkpoint.keep)

    def first_accuracy(self) -> str:
        """The accuracy before reinforcement learning, in words."""
        row = next(iter(read_lines(self.workdir / "eval.jsonl")), None)
        return f"{row['eval/accuracy']:.3f} ± {row['eval/confidence95']:.3f} ({row['eval/n']} problems)" if row else "not measured"

    def close(self) -> None:
        """Writes out and closes all; the checkpoint that is being written is waited for."""
        try:
            self.checkpoints.close()
        finally:
            for file in (self.metrics, self.journal, self.trace):
                file.close()


class Run:
    """The parts of a training run, restored from its newest checkpoint where there is one.

    Args:
      config: settled.
      tokenizer, task, model, meshes: from the functions above.
      params: makes the parameters to start from when there is no checkpoint (the warm-up).
      files: of the run.
      live: the terminal's view.
      stop_requested: whether somebody asked the run to stop.
    """

    def __init__(
        self,
        config: Config,
        tokenizer: Tokenizer,
        task: Task,
        model: ModelConfig,
        meshes: Meshes,
        params: Any,
        files: Files,
        live: LiveView,
        stop_requested: Callable[[], bool],
    ):
        self.config, self.task, self.files, self.live, self.tokenizer = config, task, files, live, tokenizer
        self.changed = threading.Condition(threading.RLock())
        self.compiles = CompileCounter()
        self._built = False
        self.rewards = make_rewards(config, self._on_result)
        with contextlib.ExitStack() as unbuilt:
            unbuilt.callback(self.close)
            self._build(model, meshes, params, stop_requested)
            unbuilt.pop_all()

    def _build(self, model: ModelConfig, meshes: Meshes, params: Any, stop_requested: Callable[[], bool]) -> None:
        config, task, tokenizer, files = self.config, self.task, self.tokenizer, self.files
        self.sampler_mesh = meshes.sampler
        longest = settle_lengths(config, task)[0]
        self.trainer = Trainer(config, model, meshes.trainer, params)
        self.resumed = self._restore()
        self.pusher = make_pusher(config, model, meshes, self.trainer.frozen)
        self.update = self.pusher.push(self.trainer.params, self.trainer.version)
        build = functools.partial(make_engines, config, model, meshes, tokenizer, longest)
        engines = build()
        trace = files.trace.span
        self.rollout = Rollout(
            self.controller,
            self.prompts,
            tokenizer.decode,
            self.rewards,
            on_failure=config.reward.on_failure,
            max_failures=config.reward.max_consecutive_failures,
            changed=self.changed,
            trace=trace,
        )
        self.sampler = make_sampler(
            config,
            engines,
            self.update,
            seed=config.seed,
            interruptible=config.rollout.interruptible,
            on_progress=self.rollout.on_progress,
            on_weights=self.rollout.on_weights,
            lock=self.changed,
            trace=trace,
        )
        others = evaluation_engines(config, engines, lambda temperature: build(temperature=temperature))
        self.evaluator = make_evaluator(
            config,
            task,
            tokenizer,
            others,
            self.rewards,
            on_row=self._on_eval,
            trainer_version=lambda: self.controller.version,
            stop_requested=stop_requested,
            trace=trace,
        )
        self.sampler.warm_up()
        if others is not engines:
            make_sampler(config, others, self.update, seed=0).warm_up()
        self.rewards.warm_up(timeout_s=180.0)
        self.rollout.attach(self.sampler)
        self.loop = Loop(
            self.controller,
            self.rollout,
            self.trainer,
            self.pusher,
            self._stream,
            changed=self.changed,
            total_steps=config.trainer.steps,
            wait_timeout_s=config.rollout.wait_timeout_s,
            stop_requested=stop_requested,
            on_step=self._on_step,
            save=self._save,
            save_every=config.checkpoint.every_steps,
            after_step=self._after_step,
            extra_metrics=self._extra,
            trace=trace,
            marks=lambda: {"journal": files.journal.mark},
        )
        self._failed_checks = {"timeouts": 0.0, "errors": 0.0}
        self._built = True

    def _restore(self) -> int | None:
        """Makes controller and prompt stream, from the newest checkpoint if there is one; returns its step."""
        c, files = self.config, self.files
        constructor = {
            "groups_per_step": c.trainer.groups_per_step,
            "group_size": c.rollout.group_size,
            "max_new_tokens": c.rollout.max_new_tokens,
            "max_staleness": c.rollout.max_staleness,
            "on_overdue": c.rollout.on_overdue,
            "max_concurrent_groups": c.rollout.max_concurrent_groups,
            "journal": files.journal.append,
            "clock": time.time,
            "total_steps": c.trainer.steps,
            "refills_per_step": c.algorithm.dynamic_sampling_refills * c.trainer.groups_per_step if c.algorithm.dynamic_sampling else 0,
        }
        self.prompts = iter(self.task.prompts)
        step = files.checkpoints.latest()
        if step is None:
            if files.journal.mark:
                self.live.message(f"'{files.workdir}' holds no checkpoint: its journal and metrics begin anew")
            files.journal.rewind(0)
            files.metrics.rewind(-1)
            self.controller = Controller(**constructor)
            return None
        state, meta = files.checkpoints.restore(step, self.trainer.abstract_saved(step))
        self.trainer.check_base(meta)
        self.trainer.load_saved(state)
        files.journal.rewind(meta["journal"])
        files.metrics.rewind(step)
        self.prompts.set_state(meta["prompts"])
        self.controller = Controller.restore(meta["controller"], **constructor)
        return step

    def _stream(self, fetch: Callable[[], TrainingBatch | None]) -> Iterator[Any]:
        stream = TrajectoryStream(fetch)
        iterator = iter(stream.map(self.trainer.build))
        iterator.set_state({"step": self.controller.version})
        return iterator

    def _save(self, version: int, snapshot: Mapping[str, Any]) -> None:
        self.files.journal.sync()
        self.files.metrics.sync()
        self.files.checkpoints.save(version, self.trainer.saved(), {**snapshot, "base": self.trainer.base})

    def _on_result(self, result: Any) -> None:
        (self.evaluator if result.key[0] == EVALUATION else self.rollout).on_result(result)

    def _on_step(self, row: Mapping[str, Any]) -> None:
        self.files.journal.flush()
        self.live.update_metrics(self.files.metrics.write(row), step=row["step"])

    def _on_eval(self, row: Mapping[str, Any]) -> None:
        self.live.update_metrics(self.files.metrics.write_eval(row))

    def _after_step(self, version: int) -> None:
        if version == STEADY_AFTER + (self.resumed or 0):
            self.compiles.mark_steady()
        every = self.config.eval.every_steps
        due = every and version % every == 0 and version < self.config.trainer.steps
        if due and not self.evaluator.start(self._weights(), self.config.eval.periodic_problems):
            self.live.message(f"the evaluation of version {version} is left out: one is still running")
        if self.evaluator.failure is not None:
            raise self.evaluator.failure

    def _weights(self) -> WeightUpdate:
        """The trainer's weights on the sampler's mesh."""
        return self.pusher.push(self.trainer.params, self.trainer.version)

    def _extra(self, version: int) -> dict[str, Any]:
        counts = self.rewards.counts()
        failed = {"timeouts": counts["timeouts"], "errors": counts["errors"] + counts["died"]}
        since = {f"reward/{name}": int(value - self._failed_checks[name]) for name, value in failed.items()}
        self._failed_checks = failed
        return {
            **since,
            **self.compiles.metrics(),
            "drop/overlong_prompt": len(self.task.overlong),
            "reward/latency_p50_s": counts["latency_p50_s"],
            "reward/latency_p99_s": counts["latency_p99_s"],
            "memory/host_rss_bytes": psutil.Process().memory_info().rss,
            "memory/trainer_bytes": peak_bytes(self.trainer.placement.scalar.mesh),
            "memory/sampler_bytes": peak_bytes(self.sampler_mesh),
        }

    def finish_evaluation(self) -> None:
        """Waits for a running periodic evaluation; a stop request ends it."""
        self.evaluator.finish(self.config.rollout.wait_timeout_s)

    def evaluate(self) -> dict[str, Any] | None:
        """The whole held-out evaluation of the trainer's policy, waited for; None when somebody asked to stop."""
        return self.evaluator.evaluate(self._weights(), self.config.eval.problems)

    def export(self, directory: pathlib.Path) -> None:
        """Writes the policy in Hugging Face's layout."""
        save_policy(self.config, directory, self.trainer.model, self.trainer.policy, self.tokenizer)

    def close(self) -> None:
        """Ends a running evaluation and the reward processes, and stops counting compilations."""
        try:
            if self._built:
                self.evaluator.close(timeout_s=20.0)
        finally:
            self.rewards.close()
            self.compiles.close()


def peak_bytes(mesh: Any) -> int | None:
    """Largest peak of memory in use on a device of the mesh; None where the backend does not tell."""
    statistics = [device.memory_stats() for device in mesh.devices.flat]
    return max((s["peak_bytes_in_use"] for s in statistics if s), default=None)
