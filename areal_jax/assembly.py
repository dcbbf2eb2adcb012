"""Builds the parts of a run from its configuration; ``launch/`` joins them. The one module that knows every room.

Invariants:
* What is built here is built once, in the order: problems, devices, policy, warm-up, sampler, trainer.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import pathlib
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from areal_jax.cluster.meshes import Meshes, make_meshes, set_host_devices
from areal_jax.config import Config, ConfigError, put
from areal_jax.config_devices import check_heads, check_pages
from areal_jax.controller.evaluation import Evaluator
from areal_jax.data.task import Task, load_task, settle_lengths
from areal_jax.data.tuning import TuningData, load_tuning
from areal_jax.host_memory import keep_freed_memory
from areal_jax.models.adapters import add
from areal_jax.models.architecture import ModelConfig, adapted, new_model
from areal_jax.models.checkpoint import check_vocabulary, load_policy
from areal_jax.models.config_json import read_model
from areal_jax.models.export import export_policy
from areal_jax.models.forward import forward_settings
from areal_jax.models.policy import init_params, param_shapes
from areal_jax.models.sharding import named_shardings, param_specs
from areal_jax.models.tokenizer import Tokenizer, embedded_tokenizer, load_tokenizer
from areal_jax.rewards.service import RewardService
from areal_jax.sampler.driver import RolloutDriver
from areal_jax.sampler.engine import SamplerEngine
from areal_jax.sampler.replicas import Replicas, part_of, replica_meshes
from areal_jax.sampler.settings import engine_settings
from areal_jax.serving.requests import MOST_LOGPROBS, Limits
from areal_jax.serving.service import Service
from areal_jax.trainer.examples import Corpus, row_order
from areal_jax.trainer.preference import DirectPreference, PreferenceTrainer
from areal_jax.trainer.supervised import SupervisedTrainer
from areal_jax.types import Sampling, WeightUpdate
from areal_jax.weights.adapters import AdapterPusher
from areal_jax.weights.push import WeightPusher

EVALUATION_SEED = 0x5EED
"""Added to the run's seed for held-out sampling."""


def load_problems(config: Config) -> tuple[Tokenizer, Task, Config]:
    """Tokenizer, task, and the configuration with the lengths that follow from the task. Touches no device and reads no weight.

    Raises:
      ConfigError: the policy's small files, its tokenizer or the task are broken, or do not fit the configuration or one another.
    """
    model, tokenizer = _small_files(config)
    stop_ids(config, tokenizer)
    task = load_task(config, tokenizer)
    settled = config.copy_and_resolve_references()
    longest, capacity = settle_lengths(config, task)
    check_pages(config, longest)
    if model is not None:
        check_positions(config, model, longest)
    put(settled, "trainer.micro_batch_tokens", capacity)
    return tokenizer, task, settled


def load_examples(config: Config) -> tuple[Tokenizer, TuningData]:
    """Tokenizer and examples of a fine-tuning run. Touches no device and reads no weight.

    Raises:
      ConfigError: the policy's small files or the rows are broken, or do not fit the configuration or one another.
    """
    model, tokenizer = _small_files(config)
    return tokenizer, load_tuning(config, tokenizer, model.max_positions if model is not None else 0)


def make_tuner(config: Config, model: ModelConfig, mesh: Mesh, params: Any, data: TuningData) -> tuple[Config, SupervisedTrainer]:
    """The configuration with its number of steps, and the trainer of ``sft.objective``, compiled."""
    corpus = Corpus(data.train, data.capacity)
    heldout = Corpus(data.heldout, data.capacity) if data.heldout else None
    settled = config.copy_and_resolve_references()
    section, epochs = settled.sft, config.sft.epochs
    if epochs:
        put(settled, "sft.steps", len(row_order(len(corpus.bins), section.rows, config.seed, epochs)))
    forward = forward_settings(config, model, mesh)
    parts = (section, model, mesh, params, corpus, config.seed, forward, config.model.param_dtype)
    if section.objective == "dpo":
        objective = DirectPreference(section.beta, section.label_smoothing)
        return settled, PreferenceTrainer(*parts, objective=objective, epochs=epochs, heldout=heldout)
    return settled, SupervisedTrainer(*parts, epochs=epochs, heldout=heldout)


def _small_files(config: Config) -> tuple[ModelConfig | None, Tokenizer]:
    """Architecture (None of a new policy) and tokenizer, checked against each other and the meshes."""
    model = None
    try:
        if config.model.path:
            model = read_model(config.model.path, config.model.dtype)
        tokenizer = load_tokenizer(config.model.path) if config.model.path else embedded_tokenizer()
        if model is not None:
            check_vocabulary(config.model.path, model, tokenizer)
    except (OSError, ValueError) as error:
        raise ConfigError(f"'model.path': {error}") from error
    if model is not None:
        check_heads(config, adapted(model, config.model).heads, f"the heads of '{config.model.path}'")
    elif 0 < config.model.vocab_size < tokenizer.vocab_size:
        raise ConfigError(
            f"'model.vocab_size' must be at least the tokenizer's {tokenizer.vocab_size} tokens; got {config.model.vocab_size}; raise it, or set 0 to take them"
        )
    return model, tokenizer


def check_positions(config: Config, model: ModelConfig, longest: int) -> None:
    """Refuses sequences longer than the policy was made for.

    Raises:
      ConfigError: the longest prompt and 'rollout.max_new_tokens' exceed the policy's 'max_position_embeddings'.
    """
    if model.max_positions and longest > model.max_positions:
        answer = config.rollout.max_new_tokens
        raise ConfigError(
            f"the longest prompt of {longest - answer} tokens + 'rollout.max_new_tokens' = {answer} must be at most the {model.max_positions} positions that "
            f"'{config.model.path}' was made for; got {longest}; lower 'rollout.max_new_tokens' or 'task.max_prompt_tokens'"
        )


def stop_ids(config: Config, tokenizer: Tokenizer) -> tuple[int, ...]:
    """The tokens of ``rollout.stop``. They end responses in this run's sampler only: an exported policy does not know them."""
    try:
        return tokenizer.single_tokens(config.rollout.stop)
    except ValueError as error:
        raise ConfigError(f"'rollout.stop': {error}") from error


def start_devices(config: Config) -> Meshes:
    """The meshes; JAX's devices exist from here on."""
    keep_freed_memory()
    set_host_devices(config)
    if config.cluster.compilation_cache:
        jax.config.update("jax_compilation_cache_dir", config.cluster.compilation_cache)
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    return make_meshes(config)


def make_policy(config: Config, tokenizer: Tokenizer, mesh: Mesh | None = None, param_dtype: str | None = None) -> tuple[ModelConfig, Any]:
    """Architecture and parameters: a checkpoint's, or new ones from the seed.

    Args:
      config: a validated configuration.
      tokenizer: the policy's.
      mesh: a checkpoint is read straight to its shards; None: whole on the first device.
      param_dtype: of a checkpoint's parameters; None: 'model.param_dtype'.

    Raises:
      ConfigError: the checkpoint cannot be read.
    """
    if config.model.path:
        try:
            model, params = load_policy(config.model.path, config.model.dtype, param_dtype or config.model.param_dtype, mesh)
        except (OSError, ValueError) as error:
            raise ConfigError(f"'model.path': {error}") from error
        model = dataclasses.replace(model, eos_ids=tokenizer.eos_ids, pad_id=tokenizer.pad_id)
        if config.model.lora_rank:
            model = adapted(model, config.model)
            params = add(model, params, jax.random.key(config.seed))
        return model, params
    model = new_model(config.model, tokenizer.vocab_size, tokenizer.eos_ids, tokenizer.pad_id)
    return model, init_params(model, jax.random.key(config.seed))


def save_policy(config: Config, directory: pathlib.Path, model: ModelConfig, params: Any, tokenizer: Tokenizer) -> None:
    """Exports a run's policy, with what came with the checkpoint that it started from."""
    export_policy(directory, model, params, tokenizer, source=config.model.path or None, dtype=config.checkpoint.export_dtype)


def make_engines(
    config: Config, model: ModelConfig, meshes: Meshes, tokenizer: Tokenizer, longest: int, *, temperature: float | None = None, served: bool = False
) -> list[SamplerEngine]:
    """The sampler's programs, one engine for each place of its data axis.

    With ``temperature`` those of evaluation: the whole distribution at that; ``served``: each request brings its own, and 'rollout.stop' ends nothing.
    """
    parts = replica_meshes(meshes.sampler)
    ends = dict.fromkeys((*model.eos_ids, *(() if served else stop_ids(config, tokenizer))))
    own = {"per_request": True, "top_logprobs": min(MOST_LOGPROBS["chat"], model.vocab_size)} if served else {}
    return [
        SamplerEngine(
            dataclasses.replace(model, eos_ids=tuple(ends)),
            mesh,
            slots=config.rollout.slots // len(parts),
            max_length=longest,
            seed=config.seed,
            tokenizer=tokenizer,
            **engine_settings(config, temperature),
            **own,
        )
        for mesh in parts
    ]


def evaluation_engines(config: Config, engines: list[SamplerEngine], make: Callable[[float], list[SamplerEngine]]) -> list[SamplerEngine]:
    """The rollout engines themselves where evaluation samples from the same distribution, else others."""
    r = config.rollout
    same = config.eval.temperature == r.temperature and r.top_p == 1.0 and r.top_k == 0
    return engines if same else make(config.eval.temperature)


def make_sampler(
    config: Config, engines: list[SamplerEngine], update: WeightUpdate, *, trace: Callable[..., None] | None = None, **more: Any
) -> RolloutDriver | Replicas:
    """A sampler over the programs of one engine or several.

    Args:
      config: of the run.
      engines: from ``make_engines``.
      update: weights on the sampler's mesh.
      trace: called as trace(lane, name, start, end, **arguments), with a lane for each replica.
      more: seed and callbacks.
    """
    kept = config.rollout.kv_on_update
    traces = [functools.partial(trace or _untraced, f"sampler/{i}") for i in range(len(engines))]
    if len(engines) == 1:
        return RolloutDriver(engines[0], part_of(update, engines[0]), kv_on_update=kept, trace=traces[0], **more)
    return Replicas(engines, update, kv_on_update=kept, traces=traces, **more)


def _untraced(*_: Any, **__: Any) -> None:
    pass


def sampler_params(config: Config, model: ModelConfig, meshes: Meshes, params: Any) -> Any:
    """Parameters from anywhere on the sampler's mesh, in its type."""
    dtype = jnp.dtype(config.model.sampler_dtype)
    return jax.device_put(jax.tree.map(lambda leaf: leaf.astype(dtype), params), named_shardings(meshes.sampler, param_specs(model), param_shapes(model)))


def make_pusher(config: Config, model: ModelConfig, meshes: Meshes, frozen: Any) -> WeightPusher | AdapterPusher:
    """The way of what is trained from the trainer's mesh to the sampler's; with adapters ``frozen`` goes it once, here."""
    if model.lora is None:
        return WeightPusher(meshes.trainer, meshes.sampler, param_specs(model), config.model.sampler_dtype)
    return AdapterPusher(meshes.trainer, meshes.sampler, model, frozen, config.model.sampler_dtype)


def make_rewards(config: Config, on_result: Callable[[Any], None]) -> RewardService:
    """The configured verifier in processes of its own."""
    return RewardService(config.reward.workers, config.reward.timeout_s, config.reward.verifier, on_result)


def make_evaluator(config: Config, task: Task, tokenizer: Tokenizer, engines: list[SamplerEngine], rewards: RewardService, **callbacks: Any) -> Evaluator:
    """Evaluation on the held-out prompts with the engines' programs; ``callbacks``: on_row, trainer_version, stop_requested, trace."""
    seed = (config.seed + EVALUATION_SEED) % 2**32
    return Evaluator(
        lambda update, on_progress: make_sampler(config, engines, update, seed=seed, on_progress=on_progress),
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
    engines = make_engines(config, model, meshes, tokenizer, settle_lengths(config, task)[0], temperature=config.eval.temperature)
    results: list[Callable[[Any], None]] = []
    with make_rewards(config, lambda result: results[0](result)) as rewards:
        evaluator = make_evaluator(
            config,
            task,
            tokenizer,
            engines,
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
            return evaluator.evaluate(WeightUpdate(version, sampler_params(config, model, meshes, params)), config.eval.problems)

        yield evaluate


SERVED_LENGTH = 2048
"""Longest sequence of a server whose configuration does not say."""


def load_served(config: Config) -> tuple[Tokenizer, Limits]:
    """Tokenizer and limits of a policy that is to be served. Touches no device and reads no weight.

    Raises:
      ConfigError: the policy's small files are broken, or do not fit the configuration or one another.
    """
    model, tokenizer = _small_files(config)
    if model is None:
        raise ConfigError("'model.path' must name the policy to serve; got ''")
    longest = config.serve.max_length or min(model.max_positions or SERVED_LENGTH, SERVED_LENGTH)
    if model.max_positions and longest > model.max_positions:
        raise ConfigError(f"'serve.max_length' must be at most the {model.max_positions} positions that '{config.model.path}' was made for; got {longest}")
    check_pages(config, longest)
    name = config.serve.name or pathlib.Path(config.model.path).resolve().name
    return tokenizer, Limits(name, longest, model.vocab_size, config.rollout.slots + config.serve.max_waiting)


def make_service(config: Config, tokenizer: Tokenizer, model: ModelConfig, params: Any, meshes: Meshes, limits: Limits) -> Service:
    """A sampler for requests of any distribution, compiled; requests that name none have the rollout's."""
    engines = make_engines(config, model, meshes, tokenizer, limits.max_length, served=True)

    def sampler(on_progress: Callable[[Any], None]) -> RolloutDriver | Replicas:
        update = WeightUpdate(0, sampler_params(config, model, meshes, params))
        made = make_sampler(config, engines, update, seed=config.seed, on_progress=on_progress)
        made.warm_up()
        return made

    def pages(sampler: RolloutDriver | Replicas) -> tuple[int, int]:
        pools = [driver.schedule.pool for driver in (sampler.drivers if isinstance(sampler, Replicas) else [sampler])]
        return sum(pool.held for pool in pools), sum(pool.held + pool.free for pool in pools)

    s, r = config.serve, config.rollout
    return Service(
        sampler,
        slots=r.slots,
        max_waiting=s.max_waiting,
        request_timeout_s=s.request_timeout_s,
        sampling=Sampling(r.temperature, r.top_k, r.top_p),
        pages=pages,
    )
