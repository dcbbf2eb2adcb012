"""The warm-up: supervised learning on the task's demonstrations, over all devices, with checkpoints of its own.

Invariants:
* A finished warm-up in the directory is used and not repeated; an interrupted one goes on from its last checkpoint with the same rows.
* Its parameters come out on the warm-up's mesh, copied nowhere else.
"""

from __future__ import annotations

import math
import pathlib
import time
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from areal_jax.config import ConfigError
from areal_jax.models.architecture import ModelConfig
from areal_jax.models.forward import forward_settings
from areal_jax.trainer.checkpoint import Checkpointer, CheckpointError
from areal_jax.trainer.step import NonFiniteError, StateHolder
from areal_jax.trainer.supervised import SupervisedTrainer, learning_rate, pack_demonstrations

REPORT_EVERY = 25
"""Steps between two reads of the loss; in between the host runs ahead of the device."""


class Interrupted(Exception):
    """The warm-up was asked to stop; its last checkpoint is written."""


def warm_up(
    config: Any,
    model: ModelConfig,
    mesh: Mesh,
    params: Any,
    pairs: Callable[[], list[tuple[np.ndarray, np.ndarray]]],
    directory: pathlib.Path,
    *,
    on_row: Callable[[dict[str, Any]], None],
    on_resume: Callable[[int], None] = lambda step: None,
    stop_requested: Callable[[], bool],
) -> Any:
    """Trains, or finds trained, the policy that reinforcement learning starts from.

    Args:
      config: a validated configuration; its ``sft`` section rules.
      model: the architecture.
      mesh: all devices that take part.
      params: to start from.
      pairs: makes the (prompt, response) token pairs; called only when there is something to learn.
      directory: of the checkpoints.
      on_row: called with a row of warmup.jsonl every ``REPORT_EVERY`` steps.
      on_resume: called with the step that the warm-up goes on from, 0 at the beginning.
      stop_requested: whether somebody asked the run to stop.

    Returns:
      The parameters.

    Raises:
      Interrupted: after a checkpoint, when asked to stop.
      ConfigError: ``sft.path`` holds no finished warm-up of this architecture.
    """
    steps = config.sft.steps
    if config.sft.path:
        directory = pathlib.Path(config.sft.path)
    elif not steps:
        return params
    checkpoints = Checkpointer(directory, keep=1)
    try:
        latest = checkpoints.latest()
        if config.sft.path and (latest is None or latest < checkpoints.meta(latest).get("steps", latest)):
            raise ConfigError(f"'sft.path' must hold a finished warm-up; '{directory}' holds {'none' if latest is None else f'one stopped at step {latest}'}")
        finished = latest is not None and (bool(config.sft.path) or latest >= steps)
        if finished:
            trainer = StateHolder(model, mesh, config.sft, params, config.model.param_dtype)
        else:
            corpus = pairs()
            step = math.lcm(16, mesh.shape["context"])
            row_tokens = config.sft.row_tokens or -(-max(144, *(len(p) + len(r) for p, r in corpus)) // step) * step
            packed = pack_demonstrations(corpus, row_tokens)
            trainer = SupervisedTrainer(config.sft, model, mesh, params, packed, config.seed, forward_settings(config, model, mesh), config.model.param_dtype)
        if latest is not None:
            try:
                state, meta = checkpoints.restore(latest, trainer.abstract_state())
                trainer.check_base(meta)
                trainer.load_state(state)
            except CheckpointError as error:
                raise ConfigError(str(error)) from error
        if not finished:
            on_resume(latest or 0)
        if isinstance(trainer, SupervisedTrainer):
            _train(config, trainer, checkpoints, on_row, stop_requested)
        return trainer.policy
    finally:
        checkpoints.close()


def _train(
    config: Any, trainer: SupervisedTrainer, checkpoints: Checkpointer, on_row: Callable[[dict[str, Any]], None], stop_requested: Callable[[], bool]
) -> None:
    steps, every = config.sft.steps, config.sft.checkpoint_every
    started, pending = time.monotonic(), []
    while trainer.version < steps:
        pending.append(trainer.step())
        done = trainer.version
        if done % REPORT_EVERY == 0 or done == steps:
            values = jax.device_get(pending)
            seconds, started = time.monotonic() - started, time.monotonic()
            on_row(
                {
                    "step": done,
                    "stage": "warm-up",
                    "loss/supervised": float(np.mean([v["loss"] for v in values])),
                    "learning_rate": learning_rate(config.sft, done - 1),
                    "grad_norm": float(np.mean([v["grad_norm"] for v in values])),
                    "tokens_per_second/trained": float(np.sum([v["tokens"] for v in values])) / seconds,
                    "time/step": seconds / len(pending),
                }
            )
            if all(v["skipped"] for v in values):
                raise NonFiniteError(
                    f"the warm-up's gradients are not finite since step {done - len(values)}; lower 'sft.learning_rate' = {config.sft.learning_rate}"
                )
            pending = []
        stopping = stop_requested()
        if done % every == 0 or done == steps or stopping:
            checkpoints.save(done, trainer.state, {"step": done, "steps": steps, "base": trainer.base})
        if stopping and done < steps:
            raise Interrupted(f"the warm-up was stopped at step {done} of {steps}; the same command goes on from there")
