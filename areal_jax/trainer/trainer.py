"""The reinforcement-learning trainer: one step turns a packed batch and version v into version v + 1.

Invariants:
* π_prox is the policy before the step's first update, for every minibatch; the first minibatch reads it off its own forward pass.
* A minibatch's gradient is the mean over all its generated tokens, however they were packed, ordered or sharded.
* All programs are compiled when the trainer is made; a step compiles nothing.
* A step reads the device once, at its end.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import math
import os
import time
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from areal_jax.algorithms.losses import POLICY_LOSSES, TokenLoss, masked_sum, settings_of
from areal_jax.models.architecture import ModelConfig
from areal_jax.models.policy import packed_logprobs
from areal_jax.trainer.build import build_batch
from areal_jax.trainer.packing import MicroBatch, PackedBatch, row_counts
from areal_jax.trainer.step import NonFiniteError, StateHolder, TrainState, update
from areal_jax.types import TrainingBatch

SUMS = (
    "tokens",
    "loss",
    "entropy",
    "approx_kl",
    "clip_low",
    "clip_high",
    "weight",
    "weight_squared",
    "capped",
    "engine_tokens",
    "engine_gap",
    "engine_kl",
    "stale_tokens",
    "staleness_gap",
    "staleness_kl",
)
MAXIMA = ("weight_max", "engine_gap_max")


def learning_rate(section: Any, step: int) -> float:
    """The rate of a training step (from 0): linear warm-up, then constant or a cosine to 0 at ``trainer.steps``."""
    rate = section.learning_rate
    if section.schedule == "cosine":
        length = max(1, section.steps - section.warmup_steps)
        rate *= 0.5 * (1.0 + math.cos(math.pi * min(1.0, max(0, step - section.warmup_steps) / length)))
    return rate * min(1.0, (step + 1) / section.warmup_steps) if section.warmup_steps else rate


def token_statistics(loss: TokenLoss, entropy: jax.Array, proximal: jax.Array, micro: MicroBatch, version: jax.Array) -> dict[str, jax.Array]:
    """Sums and maxima over a micro-batch's generated tokens, by the names in ``SUMS`` and ``MAXIMA``.

    KL terms are the non-negative estimator r - 1 - log r of the sampled tokens. The engine gap is taken on tokens of the trainer's own
    version, the staleness gap on the others: π_prox against π_behav both times.
    """
    mask = micro.loss_mask
    behind = jnp.where(mask > 0, proximal, 0.0) - jnp.where(mask > 0, micro.behaviour_logprobs, 0.0)
    weight = jnp.exp(behind)
    mismatch = weight - 1.0 - behind
    ratio = jnp.where(mask > 0, loss.ratio, 1.0)
    own = jnp.where(micro.versions == version, mask, 0.0)
    stale = mask - own
    sums = {
        "tokens": mask.sum(),
        "loss": masked_sum(loss.loss, mask),
        "entropy": masked_sum(entropy, mask),
        "approx_kl": masked_sum(ratio - 1.0 - jnp.log(ratio), mask),
        "clip_low": masked_sum(loss.clipped * (micro.advantages < 0), mask),
        "clip_high": masked_sum(loss.clipped * (micro.advantages > 0), mask),
        "weight": masked_sum(weight, mask),
        "weight_squared": masked_sum(jnp.square(weight), mask),
        "capped": masked_sum(loss.capped, mask),
        "engine_tokens": own.sum(),
        "engine_gap": masked_sum(jnp.abs(behind), own),
        "engine_kl": masked_sum(mismatch, own),
        "stale_tokens": stale.sum(),
        "staleness_gap": masked_sum(jnp.abs(behind), stale),
        "staleness_kl": masked_sum(mismatch, stale),
    }
    maxima = {"weight_max": jnp.max(jnp.where(mask > 0, weight, 0.0)), "engine_gap_max": jnp.max(jnp.where(own > 0, jnp.abs(behind), 0.0))}
    return jax.lax.stop_gradient({**sums, **maxima})


class Trainer(StateHolder):
    """Decoupled PPO (or PPO) by gradient accumulation over packed micro-batches, sharded over a mesh."""

    def __init__(self, config: Any, model: ModelConfig, mesh: Mesh, params: Any):
        """Puts the state in place and compiles every program of a step.

        Args:
          config: a validated configuration.
          model: the architecture.
          mesh: axes ('data', 'fsdp', 'tensor').
          params: to start from, on any devices; copied.
        """
        super().__init__(model, mesh, config.trainer, params, config.model.param_dtype)
        self.config = config
        self.counts = row_counts(config.trainer.micro_batch_rows, self.placement.shards)
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
        proximal = [[self._proximal[m.tokens.shape[0]](self.state.params, m) for m in minibatch] for minibatch in minibatches[1:]]
        proximal.insert(0, [m.behaviour_logprobs for m in minibatches[0]])
        statistics, norms, applied = self._no_statistics(), [], []
        for index, minibatch in enumerate(minibatches):
            gradients = self._no_gradients()
            fresh = self._true if index == 0 else self._false
            for micro, centre in zip(minibatch, proximal[index], strict=True):
                gradients, statistics = self._accumulate[micro.tokens.shape[0]](self.state.params, gradients, statistics, micro, centre, fresh, version)
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
        here, config = self.placement, self.config
        model, temperature, loss_settings = self.model, config.rollout.temperature, settings_of(config.algorithm)
        policy_loss = POLICY_LOSSES[config.algorithm.loss]
        state = self.abstract_state()
        scalar = jax.ShapeDtypeStruct((), jnp.float32, sharding=here.scalar)
        self._true, self._false = (jax.device_put(np.bool_(value), here.scalar) for value in (True, False))

        def proximal(params: Any, micro: MicroBatch) -> jax.Array:
            return packed_logprobs(model, params, micro.tokens, micro.positions, micro.segment_ids, micro.targets, temperature)[0]

        def loss(params: Any, micro: MicroBatch, centre: jax.Array, fresh: jax.Array, version: jax.Array) -> tuple[jax.Array, dict[str, jax.Array]]:
            logprobs, entropy = packed_logprobs(model, params, micro.tokens, micro.positions, micro.segment_ids, micro.targets, temperature)
            centre = jnp.where(fresh, jax.lax.stop_gradient(logprobs), centre)
            tokens = policy_loss(logprobs, centre, micro.behaviour_logprobs, micro.advantages, micro.loss_mask, micro.segment_ids, loss_settings)
            return masked_sum(tokens.loss, micro.loss_mask), token_statistics(tokens, entropy, centre, micro, version)

        def accumulate(params: Any, gradients: Any, statistics: Any, micro: MicroBatch, centre: Any, fresh: Any, version: Any) -> tuple[Any, Any]:
            more, seen = jax.grad(loss, has_aux=True)(params, micro, centre, fresh, version)
            gradients = jax.tree.map(lambda total, g: total + g.astype(jnp.float32), gradients, more)
            joined = {name: statistics[name] + seen[name] for name in SUMS} | {name: jnp.maximum(statistics[name], seen[name]) for name in MAXIMA}
            return gradients, joined

        def apply(state: TrainState, gradients: Any, tokens: Any, rate: Any, version: Any) -> tuple[TrainState, jax.Array, jax.Array]:
            mean = jax.tree.map(lambda g: g / tokens, gradients)
            state, norm, finite = update(self.optimizer, state, mean, rate, config.trainer.grad_clip)
            return dataclasses.replace(state, step=version + 1), norm, finite

        gradients = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, jnp.float32, sharding=leaf.sharding), state.params)
        statistics = dict.fromkeys(SUMS + MAXIMA, scalar)
        shardings = jax.tree.map(lambda leaf: leaf.sharding, (gradients, statistics))

        def zeros(tree: Any) -> Any:
            return jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), tree)

        flag, version = (jax.ShapeDtypeStruct((), dtype, sharding=here.scalar) for dtype in (jnp.bool_, jnp.int32))
        programs: dict[Any, Any] = {
            "gradients": jax.jit(lambda: zeros(gradients), out_shardings=shardings[0]).lower(),
            "statistics": jax.jit(lambda: zeros(statistics), out_shardings=shardings[1]).lower(),
            "apply": jax.jit(apply, donate_argnums=0, out_shardings=(here.state, here.scalar, here.scalar)).lower(state, gradients, scalar, scalar, version),
        }
        for rows in self.counts:
            shape = (rows, config.trainer.micro_batch_tokens)
            integers, floats = (jax.ShapeDtypeStruct(shape, dtype, sharding=here.rows) for dtype in (jnp.int32, jnp.float32))
            micro = MicroBatch(integers, integers, integers, integers, floats, floats, integers, floats)
            if config.trainer.minibatches > 1:
                programs["proximal", rows] = jax.jit(proximal, out_shardings=here.rows).lower(state.params, micro)
            programs["accumulate", rows] = jax.jit(accumulate, donate_argnums=(1, 2), out_shardings=shardings).lower(
                state.params, gradients, statistics, micro, floats, flag, version
            )
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
