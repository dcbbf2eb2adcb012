"""The reinforcement-learning trainer: one step turns a packed batch and version v into version v + 1.

Invariants:
* π_prox is the policy before the step's first update, for every minibatch; the first minibatch reads it off its own forward pass.
* A minibatch's gradient is the mean over all its generated tokens, however they were packed, ordered or sharded.
* All programs are compiled when the trainer is made; a step compiles nothing.
* A step reads the device once, at its end.
"""

from __future__ import annotations

import concurrent.futures
import math
import os
import time
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from areal_jax.models.architecture import ModelConfig
from areal_jax.trainer.build import build_batch
from areal_jax.trainer.packing import PackedBatch, row_counts
from areal_jax.trainer.programs import train_programs
from areal_jax.trainer.step import NonFiniteError, StateHolder
from areal_jax.types import TrainingBatch


def learning_rate(section: Any, step: int) -> float:
    """The rate of a training step (from 0): linear warm-up, then constant or a cosine to 0 at ``trainer.steps``."""
    rate = section.learning_rate
    if section.schedule == "cosine":
        length = max(1, section.steps - section.warmup_steps)
        rate *= 0.5 * (1.0 + math.cos(math.pi * min(1.0, max(0, step - section.warmup_steps) / length)))
    return rate * min(1.0, (step + 1) / section.warmup_steps) if section.warmup_steps else rate


class Trainer(StateHolder):
    """Decoupled PPO (or PPO) by gradient accumulation over packed micro-batches, sharded over a mesh."""

    def __init__(self, config: Any, model: ModelConfig, mesh: Mesh, params: Any):
        """Puts the state in place and compiles every program of a step.

        Args:
          config: a validated configuration.
          model: the architecture.
          mesh: from ``cluster.meshes``.
          params: to start from, on any devices; copied.
        """
        super().__init__(model, mesh, config.trainer, params, config.model.param_dtype)
        self.config = config
        self.counts = row_counts(config.trainer.micro_batch_rows or self.placement.shards, self.placement.shards)
        self._compile()

    def build(self, batch: TrainingBatch) -> PackedBatch:
        """Rewards, advantages and packing, on the host."""
        return build_batch(batch, self.config, self.counts)

    def step(self, packed: PackedBatch) -> dict[str, float | None]:
        """One training step: all minibatches in turn, one update each.

        Args:
          packed: from ``build``, for this version.

        Returns:
          Metrics of the step by name, the batch's own included; None where nothing could be measured.

        Raises:
          ValueError: the batch is for another version.
          NonFiniteError: ``trainer.max_nonfinite_updates`` updates in a row were skipped; parameters are those before them.
        """
        if packed.step != self.version:
            raise ValueError(f"a batch must be built for the trainer's version {self.version}; got one for step {packed.step}")
        started = time.perf_counter()
        version = jax.device_put(np.int32(self.version), self.placement.scalar)
        rate = learning_rate(self.config.trainer, self.version)
        device_rate = jax.device_put(np.float32(rate), self.placement.scalar)
        minibatches = [[jax.device_put(micro, self.placement.rows) for micro in minibatch] for minibatch in packed.minibatches]
        # The first minibatch needs no pass of its own for π_prox: its policy is the proximal one until the first update.
        proximal = [[self._proximal[m.tokens.shape[0]](self.state.params, self.frozen, m) for m in minibatch] for minibatch in minibatches[1:]]
        proximal.insert(0, [m.behaviour_logprobs for m in minibatches[0]])
        statistics, norms, applied = self._no_statistics(), [], []
        for index, minibatch in enumerate(minibatches):
            gradients = self._no_gradients()
            fresh = self._true if index == 0 else self._false
            for micro, centre in zip(minibatch, proximal[index], strict=True):
                gradients, statistics = self._accumulate[micro.tokens.shape[0]](
                    self.state.params, self.frozen, gradients, statistics, micro, centre, fresh, version
                )
            tokens = jax.device_put(np.float32(max(1, packed.tokens[index])), self.placement.scalar)
            self.state, norm, finite = self._apply(self.state, gradients, tokens, device_rate, version)
            norms.append(norm)
            applied.append(finite)
        sums, norms, applied, skipped = jax.device_get((statistics, norms, applied, self.state.skipped))
        self.version += 1
        metrics = {
            **packed.metrics,
            **step_metrics(sums, sum(packed.tokens)),
            "grad_norm": float(np.mean(norms)),
            "learning_rate": rate,
            "update/skipped_nonfinite": float(len(applied) - sum(applied)),
            "time/train": time.perf_counter() - started,
        }
        if skipped >= self.config.trainer.max_nonfinite_updates:
            raise NonFiniteError(self._diagnosis(int(skipped), metrics))
        return metrics

    def _diagnosis(self, skipped: int, metrics: Mapping[str, float | None]) -> str:
        finite = all(jax.device_get(jax.tree.leaves(jax.tree.map(lambda leaf: jnp.isfinite(leaf).all(), self.state.params))))
        shown = ", ".join(f"{name} {metrics[name]}" for name in ("loss/policy", "importance_weight/max", "entropy", "advantage/std"))
        return (
            f"the gradient must be finite; {skipped} updates in a row were not, up to step {self.version} "
            f"(parameters {'finite' if finite else 'not finite'}, {shown}); lower 'trainer.learning_rate' = {self.config.trainer.learning_rate}, "
            "set 'algorithm.importance_weight_cap', or resume from an earlier checkpoint"
        )

    def _compile(self) -> None:
        here = self.placement
        self._true, self._false = (jax.device_put(np.bool_(value), here.scalar) for value in (True, False))
        programs = train_programs(self.config, self.model, here, self.optimizer, self.abstract_state(), self.abstract_frozen(), self.counts)
        with concurrent.futures.ThreadPoolExecutor(max_workers=os.cpu_count()) as pool:
            compiled = dict(zip(programs, pool.map(lambda lowered: lowered.compile(), programs.values()), strict=True))
        self._no_gradients, self._no_statistics, self._apply = compiled["gradients"], compiled["statistics"], compiled["apply"]
        self._proximal = {rows: compiled["proximal", rows] for rows in self.counts if ("proximal", rows) in compiled}
        self._accumulate = {rows: compiled["accumulate", rows] for rows in self.counts}


def step_metrics(sums: Mapping[str, Any], trained: int) -> dict[str, float | None]:
    """Metrics of a step from the sums and maxima over its computed tokens; the loss is the mean over all ``trained`` ones."""
    s = {name: float(value) for name, value in sums.items()}
    tokens = max(1.0, s["tokens"])

    def mean(name: str, count: str) -> float | None:
        return s[name] / s[count] if s[count] else None

    return {
        "loss/policy": s["loss"] / max(1, trained),
        "entropy": s["entropy"] / tokens,
        "approx_kl": s["approx_kl"] / tokens,
        "clip_ratio/low": s["clip_low"] / tokens,
        "clip_ratio/high": s["clip_high"] / tokens,
        "importance_weight/mean": s["weight"] / tokens,
        "importance_weight/max": s["weight_max"],
        "importance_weight/ess": s["weight"] ** 2 / (tokens * s["weight_squared"]) if s["weight_squared"] else None,
        "importance_weight/capped_fraction": s["capped"] / tokens,
        "engine_gap/mean": mean("engine_gap", "engine_tokens"),
        "engine_gap/max": s["engine_gap_max"] if s["engine_tokens"] else None,
        "staleness_gap/mean": mean("staleness_gap", "stale_tokens"),
        "mismatch_kl/engine": mean("engine_kl", "engine_tokens"),
        "mismatch_kl/staleness": mean("staleness_kl", "stale_tokens"),
    }
