"""The reinforcement-learning trainer: one step turns a packed batch and version v into version v + 1.

Invariants:
* π_prox is the policy before the step's first update, for every minibatch; the first minibatch reads it off its own forward pass, so that a step of one
  minibatch has no other. With ``algorithm.proximal=log_linear`` no minibatch has one: π_prox is approximated from π_behav and the current policy.
* A minibatch's gradient is that of its loss aggregated over all its samples, however they were packed, ordered or sharded.
* The reference policy is the one that the run started from; no step changes it.
* All programs are compiled when the trainer is made; a step compiles nothing.
* A step reads the device once, at its end; M2PO's filter, which is over the whole batch, once before. A KL in the reward is read when a batch is built.
* With ``rollout.exact_logprobs`` the sampler's log-probs are only compared: π_prox and π_behav of a micro-batch come from one program, under the
  versions concerned, so on tokens of the trainer's own version they are equal to the bit. The sampler's weights may be a cast (``model.sampler_dtype``);
  a version's policy is then what the trainer's weights of that version say.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import os
import time
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from areal_jax.algorithms.proximal import second_moment_filter
from areal_jax.models.adapters import fingerprint
from areal_jax.models.architecture import ModelConfig
from areal_jax.models.work import attention_span
from areal_jax.trainer.allocation import Work
from areal_jax.trainer.build import build_batch, token_scores_of
from areal_jax.trainer.objective import in_loss, needs_reference
from areal_jax.trainer.packing import MicroBatch, PackedBatch, Packing, row_counts
from areal_jax.trainer.programs import train_programs
from areal_jax.trainer.step import NonFiniteError, StateHolder, TrainState, owned
from areal_jax.trainer.versions import EarlierVersions, earlier_versions, versions_in
from areal_jax.types import TrainingBatch


class Trainer(StateHolder):
    """The configured algorithm by gradient accumulation over packed micro-batches, sharded over a mesh.

    Attributes:
      reference: parameters of the policy that the run started from, or with adapters what is frozen below them; None where nothing asks for it.
    """

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
        self.reference: Any = None
        if needs_reference(config.algorithm):
            own = model.lora is None
            self.reference = owned(params, self.placement.state.params, config.model.param_dtype) if own else self.frozen
            self.base = fingerprint(self.reference)
        self.counts = row_counts(config.trainer.micro_batch_rows or self.placement.shards, self.placement.shards)
        self.packing = Packing(config.trainer.packing, self.placement.shards, Work(attention_span(model)))
        self._compile()

    def build(self, batch: TrainingBatch) -> PackedBatch:
        """Rewards, advantages and packing, on the host; a KL in the reward needs the reference's forward pass before."""
        a, reference = self.config.algorithm, None
        if needs_reference(a) and not in_loss(a):
            reference = token_scores_of(batch, self.config, self.counts, self.packing, lambda micro: jax.device_get(self._reference_of(self._placed(micro))))
        return build_batch(batch, self.config, self.counts, self.packing, reference)

    def _placed(self, micro: MicroBatch) -> MicroBatch:
        return jax.device_put(micro, self.placement.rows)

    def _reference_of(self, micro: MicroBatch) -> Any:
        return self._reference[micro.tokens.shape[0]](self.reference, micro)

    def _proximal_of(self, micro: MicroBatch) -> Any:
        return self._proximal[micro.tokens.shape[0]](self.state.params, self.frozen, micro)

    def step(self, packed: PackedBatch) -> dict[str, float | None]:
        """One training step: all minibatches in turn, one update each.

        Args:
          packed: from ``build``, for this version.

        Returns:
          Metrics of the step by name, the batch's own included; None where nothing could be measured.

        Raises:
          ValueError: the batch is for another version, or holds tokens of one whose parameters are not kept.
          NonFiniteError: ``trainer.max_nonfinite_updates`` updates in a row were skipped; parameters are those before them.
        """
        if packed.step != self.version:
            raise ValueError(f"a batch must be built for the trainer's version {self.version}; got one for step {packed.step}")
        started = time.perf_counter()
        version = jax.device_put(np.int32(self.version), self.placement.scalar)
        minibatches = [[self._placed(micro) for micro in minibatch] for minibatch in packed.minibatches]
        minibatches, sampled, first, rescoring = self._rescored(packed, minibatches)
        minibatches, centres, filtering = self._centres(minibatches, first)
        statistics, updates = self._no_statistics(), []
        for index, minibatch in enumerate(minibatches):
            gradients = self._no_gradients()
            for micro, centre, said in zip(minibatch, centres[index], sampled[index], strict=True):
                fresh = self._true if index == 0 and centre is None else self._false
                reference = self._reference_of(micro) if in_loss(self.config.algorithm) else None
                known = micro.behaviour_logprobs if centre is None else centre
                gradients, statistics = self._accumulate[micro.tokens.shape[0]](
                    self.state.params, self.frozen, gradients, statistics, micro, known, fresh, version, said, reference
                )
            denominator = jax.device_put(np.float32(max(packed.denominators[index], 1.0)), self.placement.scalar)
            self.state, *told = self._apply(self.state, gradients, denominator, version)
            updates.append(told)
        sums, updates, skipped = jax.device_get((statistics, updates, self.state.skipped))
        norms, applied, rates = zip(*updates, strict=True)
        self.version += 1
        metrics = {
            **packed.metrics,
            **step_metrics(sums, sum(packed.denominators[: len(minibatches)]), self.config.algorithm),
            "grad_norm": float(np.mean(norms)),
            "learning_rate": float(rates[-1]),
            "update/skipped_nonfinite": float(len(applied) - sum(applied)),
            "time/train": time.perf_counter() - started,
            **rescoring,
            **filtering,
        }
        if skipped >= self.config.trainer.max_nonfinite_updates:
            raise NonFiniteError(self._diagnosis(int(skipped), metrics))
        return metrics

    def _rescored(
        self, packed: PackedBatch, minibatches: list[list[MicroBatch]]
    ) -> tuple[list[list[MicroBatch]], list[list[Any]], list[Any], dict[str, float]]:
        """Scores tokens of earlier versions anew, and keeps this version's parameters for later steps.

        Returns:
          (micro-batches with those log-probs, what the sampler said of each micro-batch's tokens, π_prox of the first minibatch's micro-batches
          where an older token needs it from the same program, metrics); the batch as it is, Nones and no metrics where nothing is rescored.
        """
        if not self.config.rollout.exact_logprobs:
            return minibatches, [[None] * len(minibatch) for minibatch in minibatches], [None] * len(minibatches[0]), {}
        sampled = [[m.behaviour_logprobs for m in minibatch] for minibatch in minibatches]
        occurring = [[versions_in(m) for m in minibatch] for minibatch in packed.minibatches]
        self.earlier.check(set().union(*(versions for part in occurring for versions in part)), self.version)
        older = [[versions - {self.version} for versions in part] for part in occurring]
        jax.block_until_ready(minibatches)
        started = time.perf_counter()
        rescored = [
            [dataclasses.replace(m, behaviour_logprobs=self.earlier.logprobs(m, versions, self.frozen)) for m, versions in zip(part, among, strict=True)]
            for part, among in zip(minibatches, older, strict=True)
        ]
        centres = [
            self._proximal[m.tokens.shape[0]](self.state.params, self.frozen, m) if versions else None
            for m, versions in zip(minibatches[0], older[0], strict=True)
        ]
        jax.block_until_ready((rescored, centres))  # so that its time is known, and that what is dropped now is free before the copy
        self.earlier.keep(self.version, self.state.params)
        jax.block_until_ready(self.earlier.params)
        return rescored, sampled, centres, {"time/rescore": time.perf_counter() - started}

    def _centres(self, minibatches: list[list[MicroBatch]], first: list[Any]) -> tuple[list[list[MicroBatch]], list[list[Any]], dict[str, float]]:
        """π_prox of each micro-batch; with M2PO the advantages of the tokens that its filter drops become 0.

        Args:
          minibatches: on the device.
          first: of the first minibatch's micro-batches where it is known already, else None.

        Returns:
          (micro-batches, log-probs of each or None where its own forward pass gives them or nothing needs them, metrics).
        """
        a = self.config.algorithm
        if a.proximal == "log_linear":
            return minibatches, [[None] * len(minibatch) for minibatch in minibatches], {}
        if a.loss == "m2po":
            first = [self._proximal_of(m) if known is None else known for m, known in zip(minibatches[0], first, strict=True)]
        centres = [first, *([self._proximal_of(m) for m in minibatch] for minibatch in minibatches[1:])]
        return self._filtered(minibatches, centres) if a.loss == "m2po" else (minibatches, centres, {})

    def _filtered(self, minibatches: list[list[MicroBatch]], centres: list[list[Any]]) -> tuple[list[list[MicroBatch]], list[list[Any]], dict[str, float]]:
        """``_centres`` of M2PO: one filter over all tokens of the step, on the host."""
        micros, scores = [m for part in minibatches for m in part], [c for part in centres for c in part]
        read = jax.device_get([(m.advantages, m.loss_mask, m.behaviour_logprobs, m.versions, c) for m, c in zip(micros, scores, strict=True)])
        inside = [mask > 0 for _, mask, *_ in read]
        proximal = np.concatenate([c[i] for i, (*_, c) in zip(inside, read, strict=True)])
        behaviour = np.concatenate([b[i] for i, (_, _, b, *_) in zip(inside, read, strict=True)])
        if self.config.rollout.exact_logprobs:
            own = np.concatenate([v[i] for i, (*_, v, _) in zip(inside, read, strict=True)]) == self.version
            behaviour = np.where(own, proximal, behaviour)
        kept = second_moment_filter(behaviour, proximal, self.config.algorithm.m2_threshold)
        filtered, start = [], 0
        for micro, mask, (given, *_) in zip(micros, inside, read, strict=True):
            advantages = np.zeros(mask.shape, np.float32)
            advantages[mask] = given[mask] * kept[start : start + int(mask.sum())]
            start += int(mask.sum())
            filtered.append(dataclasses.replace(micro, advantages=jax.device_put(advantages, self.placement.rows)))
        rest = iter(filtered)
        dropped = {"importance_weight/capped_fraction": 1.0 - float(kept.mean())} if kept.size else {}
        return [[next(rest) for _ in part] for part in minibatches], centres, dropped

    def load_state(self, state: TrainState) -> None:
        """Goes on from a restored state, without the parameters of earlier versions."""
        super().load_state(state)
        self.earlier.params = {}

    def saved(self) -> Any:
        """All that a checkpoint must hold of the trainer for the run to go on exactly."""
        if not self.config.rollout.exact_logprobs:
            return self.state
        return {"state": self.state, **{name: self.earlier.params[v] for name, v in self.earlier.names(self.version).items()}}

    def abstract_saved(self, version: int) -> Any:
        """Shapes, types and shardings of ``saved`` at a version."""
        state = self.abstract_state()
        return {"state": state, **dict.fromkeys(self.earlier.names(version), state.params)} if self.config.rollout.exact_logprobs else state

    def load_saved(self, saved: Any) -> None:
        """Goes on from what ``saved`` gave."""
        if not self.config.rollout.exact_logprobs:
            return self.load_state(saved)
        self.load_state(saved["state"])
        self.earlier.params = {v: jax.device_put(saved[name], self.placement.state.params) for name, v in self.earlier.names(self.version).items()}

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
        self._reference = {rows: compiled["reference", rows] for rows in self.counts if ("reference", rows) in compiled}
        self.earlier = EarlierVersions(earlier_versions(self.config), here, compiled)


def step_metrics(sums: Mapping[str, Any], denominator: float, section: Any) -> dict[str, float | None]:
    """Metrics of a step from the sums and maxima over its computed tokens.

    Args:
      sums: by the names in ``programs``.
      denominator: of the weighted losses, over all minibatches.
      section: the ``algorithm`` section of a configuration.
    """
    s = {name: float(value) for name, value in sums.items()}
    tokens = max(1.0, s["tokens"])

    def mean(name: str, count: str) -> float | None:
        return s[name] / s[count] if s[count] else None

    reference = {"loss/kl": section.kl_coefficient * s["reference_loss"] / max(1.0, denominator), "reference_kl": s["reference_kl"] / tokens}
    return {
        **(reference if in_loss(section) else {}),
        "loss/policy": s["loss"] / max(1.0, denominator),
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
        "engine_gap/rescored_mean": mean("rescored_gap", "rescored_tokens"),
        "engine_gap/rescored_max": s["rescored_gap_max"] if s["rescored_tokens"] else None,
        "staleness_gap/mean": mean("staleness_gap", "stale_tokens"),
        "mismatch_kl/engine": mean("engine_kl", "engine_tokens"),
        "mismatch_kl/staleness": mean("staleness_kl", "stale_tokens"),
    }
