"""Finished samples of a load, as a trainer gets them, and how they are laid out where they are not packed.

Invariants:
* A batch is a function of its arguments alone; its tokens, rewards and log-probs are random, its lengths the load's.
* Every sample is computed, also those whose group has equal rewards.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from areal_jax.benchmarks.loads import Load
from areal_jax.config import base_config
from areal_jax.models.architecture import ModelConfig
from areal_jax.models.work import forward_flops
from areal_jax.trainer.packing import PackedBatch, PackedSequence, pack_rows
from areal_jax.types import Prompt, TrainingBatch, Trajectory, TrajectoryGroup


def training_batch(load: Load, vocab_size: int, step: int, seed: int) -> TrainingBatch:
    """The load's requests, answered by random tokens of the policy of version ``step``; rewards are 0 or 1."""
    random = np.random.default_rng((seed, step))
    groups: dict[int, list[Trajectory]] = {}
    for prompt, length, group in zip(load.prompts, load.lengths, load.groups, strict=True):
        tokens = random.integers(2, vocab_size, length).astype(np.int32)
        logprobs = (-np.log(vocab_size) + 0.1 * random.standard_normal(length)).astype(np.float32)
        reward = float(random.integers(0, 2))
        sample = Trajectory(group, len(groups.setdefault(group, [])), prompt, tokens, logprobs, np.full(length, step, np.int32), False, reward)
        groups[group].append(sample)
    made = (TrajectoryGroup(Prompt(g, f"p{g}", "", samples[0].prompt_tokens, ""), step, tuple(samples)) for g, samples in groups.items())
    return TrainingBatch(step, tuple(made), 0)


def trainer_config(dtype: str, **trainer: Any) -> Any:
    """A configuration of one update a step that computes every sample; ``trainer`` are keys of its section, ``attention`` and ``scan`` the model's."""
    config = base_config()
    config.model.update(dtype=dtype, attention=trainer.pop("attention", "auto"), scan_layers=trainer.pop("scan", None))
    config.trainer.update(minibatches=1, warmup_steps=0, **trainer)
    config.algorithm.update(advantage="grpo", skip_zero_advantage=False)
    return config


def padded(batch: TrainingBatch, advantages: Sequence[np.ndarray], micro_batches: int, shards: int = 1) -> PackedBatch:
    """A fixed number of micro-batches without packing: samples in their order, each in a row of its own, padded to the longest of the step.

    The loss is the mean over tokens.

    Args:
      batch: of a step.
      advantages: of each sample, [length].
      micro_batches: how many.
      shards: that the rows of a micro-batch must divide; empty rows fill it up.
    """
    samples = [t for group in batch.groups for t in group.trajectories]
    whole = [np.concatenate([t.prompt_tokens, t.tokens]).astype(np.int32) for t in samples]
    sequences = [PackedSequence(w, t.behaviour_logprobs, t.versions, a) for w, t, a in zip(whole, samples, advantages, strict=True)]
    capacity, rows = max(s.positions for s in sequences), padded_rows(len(sequences), micro_batches, shards)
    alone = [pack_rows([s], capacity) for s in sequences] + [pack_rows([], capacity, rows=lambda _: 1)] * (rows * micro_batches - len(sequences))
    micros = tuple(jax.tree.map(lambda *parts: np.concatenate(parts), *alone[start : start + rows]) for start in range(0, rows * micro_batches, rows))
    tokens = sum(len(s.versions) for s in sequences)
    efficiency = sum(s.positions for s in sequences) / (capacity * rows * micro_batches)
    return PackedBatch(batch.step, (micros,), (tokens,), {"packing/efficiency": efficiency}, (float(tokens),))


def padded_rows(samples: int, micro_batches: int, shards: int) -> int:
    """Rows of each of so many micro-batches."""
    return -(-samples // (micro_batches * shards)) * shards


def real_tokens(load: Load) -> int:
    """Tokens of all sequences, prompts and responses, without padding."""
    return sum(len(prompt) + length for prompt, length in zip(load.prompts, load.lengths, strict=True))


def training_flops(model: ModelConfig, load: Load) -> float:
    """Of a gradient over a load's sequences: three forward passes (6 a matrix parameter and token, the LM head included, and causal attention within
    each sequence alone). What is computed for padding, above the diagonal, or again in the backward pass does not count."""
    lengths = [len(prompt) + length - 1 for prompt, length in zip(load.prompts, load.lengths, strict=True)]
    return sum(3.0 * forward_flops(model, n, (n + 1) / 2) for n in lengths)
