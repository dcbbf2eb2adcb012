"""From a batch of groups to packed micro-batches with advantages, and what the host can measure on the way.

Invariants:
* Advantages and the weights of the loss are taken over the whole batch, before it is cut into minibatches and packed.
* Nothing here touches a device.
* Lengths and truncation are the sampler's, never those of an array.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from areal_jax.algorithms.advantages import ADVANTAGES, overlong_penalty, scale_rewards
from areal_jax.algorithms.aggregation import loss_weights
from areal_jax.algorithms.kl import reference_kl
from areal_jax.trainer.packing import MicroBatch, PackedBatch, PackedSequence, Packing, micro_batches, pack
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


def rewards_of(batch: TrainingBatch, config: Any) -> np.ndarray:
    """Raw rewards with the penalty of long responses, float64 [samples].

    With ``algorithm.shuffle_rewards`` permuted within the batch by (seed, step), the control experiment.
    """
    samples, a = trajectories_of(batch), config.algorithm
    rewards = np.asarray([t.reward for t in samples], np.float64)
    if a.overlong_penalty:
        lengths, truncated = np.asarray([t.length for t in samples]), np.asarray([t.truncated for t in samples])
        rewards = rewards + overlong_penalty(lengths, truncated, config.rollout.max_new_tokens, a.overlong_buffer, a.overlong_penalty)
    return np.random.default_rng([config.seed, batch.step]).permutation(rewards) if a.shuffle_rewards else rewards


def advantages_of(batch: TrainingBatch, config: Any, penalties: Sequence[np.ndarray] | None = None) -> list[np.ndarray]:
    """Advantages of each sample's tokens, float64 [length] each.

    Args:
      batch: rewarded groups.
      config: reads ``algorithm``, ``seed`` and ``rollout.max_new_tokens``.
      penalties: for each sample what each of its tokens loses of its reward [length]; None: nothing.
    """
    samples, a = trajectories_of(batch), config.algorithm
    scaled = scale_rewards(rewards_of(batch, config), a.reward_scale, a.reward_bias, a.reward_clip)
    lengths = np.asarray([t.length for t in samples])
    mask = np.arange(lengths.max(initial=1)) < lengths[:, None]
    dense = None
    if penalties is not None:
        dense = np.zeros(mask.shape)
        dense[mask] = np.concatenate(penalties)
    values = ADVANTAGES[a.advantage](scaled, np.asarray([t.group_id for t in samples]), mask, a.gamma, a.gae_lambda, dense)
    return [row[:length] for row, length in zip(values, lengths, strict=True)]


def token_scores_of(batch: TrainingBatch, config: Any, counts: Sequence[int], packing: Packing, score: Callable[[MicroBatch], np.ndarray]) -> list[np.ndarray]:
    """What a packed program says of each sample's tokens.

    Args:
      batch: groups.
      config: reads ``trainer.micro_batch_tokens``.
      counts: static row counts of micro-batches, largest first.
      packing: how rows are filled and dealt out to shards.
      score: from a micro-batch on the host to [rows, C] on the host.

    Returns:
      For each sample float [length].
    """
    sequences = []
    for number, t in enumerate(trajectories_of(batch)):  # packed under its number in the place of versions, by which it is found again
        nothing = np.zeros(t.length, np.float32)
        whole = np.concatenate([t.prompt_tokens, t.tokens]).astype(np.int32)
        sequences.append(PackedSequence(whole, nothing, np.full(t.length, number, np.int32), nothing))
    scores = [np.zeros(0)] * len(sequences)
    for micro in micro_batches(sequences, config.trainer.micro_batch_tokens, counts, packing=packing):
        scored = score(micro)
        for number in np.unique(micro.versions[micro.loss_mask > 0]):
            scores[number] = scored[(micro.versions == number) & (micro.loss_mask > 0)]
    return scores


def kl_penalties(batch: TrainingBatch, section: Any, reference: Sequence[np.ndarray]) -> tuple[list[np.ndarray], dict[str, float | None]]:
    """The KL to the reference as a penalty of each token's reward, between the policy that sampled it and the reference.

    Args:
      batch: groups.
      section: the ``algorithm`` section of a configuration.
      reference: for each sample its tokens' log-probs [length].

    Returns:
      (for each sample float64 [length], metrics).
    """
    samples = trajectories_of(batch)
    kl = [
        reference_kl(section.kl_estimator, t.behaviour_logprobs.astype(np.float64), of.astype(np.float64), np.ones(t.length), np)
        for t, of in zip(samples, reference, strict=True)
    ]
    every = np.concatenate(kl)
    return [section.kl_coefficient * x for x in kl], {"reference_kl": float(every.mean()) if every.size else None}


def skips_zero(section: Any) -> bool:
    """Whether samples of advantage 0 may be left out: they have no gradient, unless the loss has terms beside the advantage's, and M2PO filters all."""
    beside = section.entropy_coefficient > 0 or (section.kl_coefficient > 0 and section.kl_in == "loss")
    return section.skip_zero_advantage and not beside and section.loss != "m2po"


def build_batch(batch: TrainingBatch, config: Any, counts: Sequence[int], packing: Packing, reference: Sequence[np.ndarray] | None = None) -> PackedBatch:
    """The packed batch of a training step.

    Args:
      batch: rewarded groups; ``batch.step`` is the trainer's version.
      config: a validated configuration; reads ``algorithm``, ``trainer``, ``rollout.max_new_tokens`` and ``seed``.
      counts: static row counts of micro-batches, largest first.
      packing: how rows are filled and dealt out to shards.
      reference: for each sample its tokens' log-probs under the reference [length], where the KL is part of the reward.
    """
    a, samples = config.algorithm, trajectories_of(batch)
    penalties, measured = (None, {}) if reference is None else kl_penalties(batch, a, reference)
    advantages = advantages_of(batch, config, penalties)
    lengths, ids = np.asarray([t.length for t in samples]), np.asarray([t.group_id for t in samples])
    weights = loss_weights(a.aggregation, lengths, ids, config.rollout.max_new_tokens)
    packed = pack(batch, advantages, config.trainer.micro_batch_tokens, counts, config.trainer.minibatches, skips_zero(a), weights, packing)
    every = np.concatenate(advantages)
    metrics = {**batch_metrics(batch), **packed.metrics, **measured, "advantage/mean": float(every.mean()), "advantage/std": float(every.std())}
    return dataclasses.replace(packed, metrics=metrics)


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
