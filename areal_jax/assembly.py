"""Builds the parts of a run from its configuration; ``launch/`` joins them. The one module that knows every room.

Invariants:
* What is built here is built once, in the order: problems, devices, policy, warm-up, sampler, trainer.
* A run's directory holds all that a resume needs; ``Run.restore`` finds the newest whole checkpoint.
"""

from __future__ import annotations

import contextlib
import functools
import pathlib
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import psutil

from areal_jax.cluster.meshes import Meshes, make_meshes, set_host_devices
from areal_jax.config import Config, put
from areal_jax.controller.controller import Controller
from areal_jax.controller.evaluation import EVALUATION, Evaluator
from areal_jax.controller.loop import STEADY_AFTER, Loop
from areal_jax.controller.rollout import Rollout
from areal_jax.data.stream import TrajectoryStream
from areal_jax.data.task import Task, load_task, settle_lengths
from areal_jax.models.architecture import ModelConfig, new_model
from areal_jax.models.export import export_policy, load_policy
from areal_jax.models.policy import init_params
from areal_jax.models.sharding import named_shardings, param_specs
from areal_jax.models.tokenizer import Tokenizer, embedded_tokenizer, load_tokenizer
from areal_jax.rewards.service import RewardService
from areal_jax.sampler.driver import RolloutDriver
from areal_jax.sampler.engine import SamplerEngine
from areal_jax.telemetry.compiles import CompileCounter
from areal_jax.telemetry.journal import Journal
from areal_jax.telemetry.lines import read_lines
from areal_jax.telemetry.live import LiveView
from areal_jax.telemetry.metrics import MetricsWriter
from areal_jax.telemetry.trace import Trace
from areal_jax.trainer.checkpoint import Checkpointer
from areal_jax.trainer.step import owned
from areal_jax.trainer.trainer import Trainer
from areal_jax.types import TrainingBatch, WeightUpdate
from areal_jax.weights.push import WeightPusher

EVALUATION_SEED = 0x5EED
"""Added to the run's seed for held-out sampling."""


def load_problems(config: Config) -> tuple[Tokenizer, Task, Config]:
    """Tokenizer, task, and the configuration with the lengths that follow from the task. Touches no device."""
    tokenizer = load_tokenizer(config.model.path) if config.model.path else embedded_tokenizer()
    task = load_task(config, tokenizer)
    settled = config.copy_and_resolve_references()
    put(settled, "trainer.micro_batch_tokens", settle_lengths(config, task)[1])
    return tokenizer, task, settled


def start_devices(config: Config) -> Meshes:
    """The meshes; JAX's devices exist from here on."""
    set_host_devices(config)
    if config.cluster.compilation_cache:
        jax.config.update("jax_compilation_cache_dir", config.cluster.compilation_cache)
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    return make_meshes(config)


def make_policy(config: Config, tokenizer: Tokenizer) -> tuple[ModelConfig, Any]:
    """Architecture and parameters: a checkpoint's, or new ones from the seed."""
    if config.model.path:
        return load_policy(config.model.path, dtype=config.model.dtype, param_dtype=config.model.param_dtype)
    model = new_model(config.model, tokenizer.vocab_size, tokenizer.eos_ids, tokenizer.pad_id)
    return model, init_params(model, jax.random.key(config.seed))


def make_engine(config: Config, model: ModelConfig, meshes: Meshes, tokenizer: Tokenizer, longest: int, *, temperature: float | None = None) -> SamplerEngine:
    """The sampler's programs; with ``temperature`` those of evaluation: the whole distribution at that temperature."""
    r = config.rollout
    whole = temperature is not None
    return SamplerEngine(
        model,
        meshes.sampler,
        slots=r.slots,
        max_length=longest,
        buckets=r.length_buckets,
        widths=r.prefill_buckets,
        steps=r.steps_per_dispatch,
        temperature=r.temperature if temperature is None else temperature,
        top_k=0 if whole else r.top_k,
        top_p=1.0 if whole else r.top_p,
        seed=config.seed,
        tokenizer=tokenizer,
        dtype=config.model.sampler_dtype,
    )


def evaluation_engine(config: Config, engine: SamplerEngine, make: Callable[[float], SamplerEngine]) -> SamplerEngine:
    """The rollout engine itself where evaluation samples from the same distribution, else one more."""
    r = config.rollout
    same = config.eval.temperature == r.temperature and r.top_p == 1.0 and r.top_k == 0
    return engine if same else make(config.eval.temperature)


def make_driver(config: Config, engine: SamplerEngine, update: WeightUpdate, **more: Any) -> RolloutDriver:
    """A sampler over an engine's programs; ``more``: seed and callbacks."""
    r = config.rollout
    return RolloutDriver(engine, update, prefill_groups=r.prefill_groups, group_size=r.group_size, kv_on_update=r.kv_on_update, **more)


def make_rewards(config: Config, on_result: Callable[[Any], None]) -> RewardService:
    """The configured verifier in processes of its own."""
    return RewardService(config.reward.workers, config.reward.timeout_s, config.reward.verifier, on_result)


def make_evaluator(config: Config, task: Task, tokenizer: Tokenizer, engine: SamplerEngine, rewards: RewardService, **callbacks: Any) -> Evaluator:
    """Evaluation on the held-out prompts with the engine's programs; ``callbacks``: on_row, trainer_version, stop_requested, trace."""
    seed = (config.seed + EVALUATION_SEED) % 2**32
    return Evaluator(
        lambda update, on_progress: make_driver(config, engine, update, seed=seed, on_progress=on_progress),
        task.heldout,
        tokenizer.decode,
        rewards,
        samples=config.eval.samples,
        max_new_tokens=config.rollout.max_new_tokens,
        deadline_s=config.rollout.wait_timeout_s,
        **callbacks,
    )


@contextlib.contextmanager
def evaluation_alone(
    config: Config,
    tokenizer: Tokenizer,
    task: Task,
    model: ModelConfig,
    meshes: Meshes,
    on_row: Callable[[dict[str, Any]], Any],
    stop_requested: Callable[[], bool],
) -> Iterator[Callable[[Any, int], dict[str, Any] | None]]:
    """Evaluation without training: gives ``evaluate(params, version)``, which returns the row of eval.jsonl, or None when it was asked to stop.

    The parameters may be on any devices.
    """
    engine = make_engine(config, model, meshes, tokenizer, settle_lengths(config, task)[0], temperature=config.eval.temperature)
    results: list[Callable[[Any], None]] = []
    with make_rewards(config, lambda result: results[0](result)) as rewards:
        evaluator = make_evaluator(
            config,
            task,
            tokenizer,
            engine,
            rewards,
            on_row=on_row,
            trainer_version=lambda: current[0],
            stop_requested=stop_requested,
            trace=lambda *_, **__: None,
        )
        results.append(evaluator.on_result)
        current = [0]
        rewards.warm_up(timeout_s=180.0)

        def evaluate(params: Any, version: int) -> dict[str, Any] | None:
            current[0] = version
            placed = owned(params, named_shardings(meshes.sampler, param_specs(model), params), config.model.sampler_dtype)
            return evaluator.evaluate(WeightUpdate(version, placed), config.eval.problems)

        yield evaluate


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
        self.rewards = make_rewards(config, self._on_result)
        longest = settle_lengths(config, task)[0]
        self.trainer = Trainer(config, model, meshes.trainer, params)
        self.resumed = self._restore()
        self.pusher = WeightPusher(meshes.trainer, meshes.sampler, param_specs(model), config.model.sampler_dtype)
        self.update = self.pusher.push(self.trainer.params, self.trainer.version)
        build = functools.partial(make_engine, config, model, meshes, tokenizer, longest)
        engine = build()
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
        self.sampler = make_driver(
            config,
            engine,
            self.update,
            seed=config.seed,
            interruptible=config.rollout.interruptible,
            on_progress=self.rollout.on_progress,
            on_weights=self.rollout.on_weights,
            lock=self.changed,
            trace=functools.partial(trace, "sampler/0"),
        )
        other = evaluation_engine(config, engine, lambda temperature: build(temperature=temperature))
        self.evaluator = make_evaluator(
            config,
            task,
            tokenizer,
            other,
            self.rewards,
            on_row=self._on_eval,
            trainer_version=lambda: self.controller.version,
            stop_requested=stop_requested,
            trace=trace,
        )
        self.sampler.warm_up()
        if other is not engine:
            make_driver(config, other, self.update, seed=0).warm_up()
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
        )
        self._failed_checks = {"timeouts": 0.0, "errors": 0.0}

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
        }
        self.prompts = iter(self.task.prompts)
        step = files.checkpoints.latest()
        if step is None:
            files.journal.rewind(0)
            files.metrics.rewind(-1)
            self.controller = Controller(**constructor)
            return None
        state, meta = files.checkpoints.restore(step, self.trainer.abstract_state())
        self.trainer.load_state(state)
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
        with self.changed:
            mark = self.files.journal.sync()
        self.files.metrics.sync()
        self.files.checkpoints.save(version, self.trainer.state, {**snapshot, "journal": mark})

    def _on_result(self, result: Any) -> None:
        (self.evaluator if result.key[0] == EVALUATION else self.rollout).on_result(result)

    def _on_step(self, row: Mapping[str, Any]) -> None:
        self.live.update_metrics(self.files.metrics.write(row), step=row["step"])

    def _on_eval(self, row: Mapping[str, Any]) -> None:
        self.live.update_metrics(self.files.metrics.write_eval(row))

    def _after_step(self, version: int) -> None:
        if version == STEADY_AFTER + (self.resumed or 0):
            self.compiles.mark_steady()
        every = self.config.eval.every_steps
        if every and version % every == 0 and version < self.config.trainer.steps:
            self.evaluator.start(self._weights(), self.config.eval.periodic_problems)

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
            "reward/latency_p50_s": counts["latency_p50_s"],
            "reward/latency_p99_s": counts["latency_p99_s"],
            "memory/host_rss_bytes": psutil.Process().memory_info().rss,
            "memory/trainer_bytes": peak_bytes(self.trainer.placement.scalar.mesh),
            "memory/sampler_bytes": peak_bytes(self.sampler.engine.mesh),
        }

    def evaluate(self) -> dict[str, Any] | None:
        """The whole held-out evaluation of the trainer's policy, waited for; None when somebody asked to stop."""
        return self.evaluator.evaluate(self._weights(), self.config.eval.problems)

    def export(self, directory: pathlib.Path) -> None:
        """Writes the policy in Hugging Face's layout."""
        export_policy(directory, self.trainer.model, self.trainer.params, self.tokenizer)

    def close(self) -> None:
        """Ends the reward processes and stops counting compilations."""
        self.rewards.close()
        self.compiles.close()


def peak_bytes(mesh: Any) -> int | None:
    """Largest peak of memory in use on a device of the mesh; None where the backend does not tell."""
    statistics = [device.memory_stats() for device in mesh.devices.flat]
    return max((s["peak_bytes_in_use"] for s in statistics if s), default=None)
