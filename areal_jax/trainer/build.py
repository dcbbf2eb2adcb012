"""From a batch of groups to packed micro-batches with advantages, and what the host can measure on the way.

Invariants:
* Advantages are taken over the whole batch, before it is cut into minibatches.
* Nothing here touches a device.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from areal_jax.algorithms.advantages import ADVANTAGES, scale_rewards
from areal_jax.trainer.packing import PackedBatch, Packing, pack
from areal_jax.types import TrainingBatch, Trajectory


def trajectories_of(batch: TrainingBatch) -> list[Trajectory]:
    """All samples, groups in order, samples in order.

    Raises:
      ValueError: one has no reward yet.
    """
    samples = [t for group in batch.groups for t in group.trajectories]
    for t in samples:
        if t.reward is None:
            raise ValueError(f"a trained sample must have its reward; group {t.group_id} sample {t.sample_index} has none: reward it or drop its group")
    return samples


def rewards_of(batch: TrainingBatch, shuffle: bool, seed: int) -> np.ndarray:
    """Raw rewards, float64 [samples]; with ``shuffle`` permuted within the batch by (seed, step), the control experiment."""
    rewards = np.asarray([t.reward for t in trajectories_of(batch)], np.float64)
    return np.random.default_rng([seed, batch.step]).permutation(rewards) if shuffle else rewards


def advantages_of(batch: TrainingBatch, algorithm: Any, seed: int) -> list[np.ndarray]:
    """Advantages of each sample's tokens, float64 [length] each.

    Args:
      batch: rewarded groups.
      algorithm: that section of the configuration.
      seed: the run's, for ``shuffle_rewards``.
    """
    samples = trajectories_of(batch)
    scaled = scale_rewards(rewards_of(batch, algorithm.shuffle_rewards, seed), algorithm.reward_scale, algorithm.reward_bias, algorithm.reward_clip)
    lengths = np.asarray([t.length for t in samples])
    mask = np.arange(lengths.max(initial=1)) < lengths[:, None]
    values = ADVANTAGES[algorithm.advantage](scaled, np.asarray([t.group_id for t in samples]), mask, algorithm.gamma, algorithm.gae_lambda)
    return [row[:length] for row, length in zip(values, lengths, strict=True)]


def build_batch(batch: TrainingBatch, config: Any, counts: Sequence[int], packing: Packing) -> PackedBatch:
    """The packed batch of a training step.

    Args:
      batch: rewarded groups; ``batch.step`` is the trainer's version.
      config: a validated configuration; reads ``algorithm``, ``trainer`` and ``seed``.
      counts: static row counts of micro-batches, largest first.
      packing: how rows are filled and dealt out to shards.
    """
    advantages = advantages_of(batch, config.algorithm, config.seed)
    skip_zero = config.algorithm.skip_zero_advantage
    packed = pack(batch, advantages, config.trainer.micro_batch_tokens, counts, config.trainer.minibatches, skip_zero, packing)
    every = np.concatenate(advantages)
    metrics = {**batch_metrics(batch), **packed.metrics, "advantage/mean": float(every.mean()), "advantage/std": float(every.std())}
    return PackedBatch(packed.step, packed.minibatches, packed.tokens, metrics)


def batch_metrics(batch: TrainingBatch) -> dict[str, float | None]:
    """Rewards, staleness and lengths of a batch, by metric name.

    Ages are ``batch.step`` minus a token's version; a version below 0 is unknown and lowers ``staleness/coverage``.
    """
    samples = trajectories_of(batch)
    rewards = np.asarray([t.reward for t in samples], np.float64)
    versions = np.concatenate([t.versions for t in samples])
    ages = batch.step - versions[versions >= 0]
    spoken = [t.versions for t in samples if t.length]
    lengths = np.asarray([t.length for t in samples])
    spans = np.asarray([len(np.unique(v)) for v in spoken])
    correct = [t.components.get("correct", float(t.reward is not None and t.reward > 0)) for t in samples]
    metrics: dict[str, float | None] = {
        "reward/mean": float(rewards.mean()),
        "reward/std": float(rewards.std()),
        "reward/correct_fraction": float(np.mean(correct)),
        "reward/zero_std_groups": float(sum(len({t.reward for t in g.trajectories}) == 1 for g in batch.groups)),
        "staleness/mean": float(ages.mean()) if ages.size else None,
        "staleness/p95": float(np.quantile(ages, 0.95)) if ages.size else None,
        "staleness/max": float(ages.max()) if ages.size else None,
        "staleness/generating_mean": float(np.mean([v[-1] - v[0] for v in spoken])) if spoken else None,
        "staleness/buffered_mean": float(np.mean([batch.step - v[-1] for v in spoken])) if spoken else None,
        "staleness/coverage": ages.size / versions.size if versions.size else None,
        "trajectory_spans/mean": float(spans.mean()) if spans.size else None,
        "trajectory_spans/max": float(spans.max()) if spans.size else None,
        "response_length/mean": float(lengths.mean()),
        "response_length/p50": float(np.quantile(lengths, 0.5)),
        "response_length/p90": float(np.quantile(lengths, 0.9)),
        "response_length/max": float(lengths.max()),
        "truncated_ratio": float(np.mean([t.truncated for t in samples])),
        "prompt_length/mean": float(np.mean([len(t.prompt_tokens) for t in samples])),
    }
    for name in sorted({name for t in samples for name in t.components}):
        metrics[f"reward/{name}"] = float(np.mean([t.components[name] for t in samples if name in t.components]))
    return metrics
