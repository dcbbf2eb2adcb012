"""Numbers that a plan starts from: a token's cache, a device's parameters, the positions of a training step's batch.

Invariant: everything is counted from the architecture, the configuration and the assumed lengths.
"""

from __future__ import annotations

import dataclasses

import numpy as np

from areal_jax.models.architecture import ModelConfig
from areal_jax.models.work import adapter_parts, matrices
from areal_jax.planner.setup import Axes, Setup


def trained_elements(model: ModelConfig, axes: Axes) -> float:
    """Parameters of a device in matrices that have a gradient: in all of them, or in the adapters."""
    w, (hidden, other) = matrices(model), adapter_parts(model)
    if model.lora:
        return model.layers * (hidden / axes.fsdp + other / axes.tensor)
    return (model.layers * w.block + (1 if model.tie_embeddings else 2) * w.head) / (axes.fsdp * axes.tensor)


def kv_bytes_per_token(model: ModelConfig) -> int:
    """Keys and values of one token in all layers, in the compute type."""
    return 2 * model.layers * model.kv_heads * model.head_dim * item(model.dtype)


def item(dtype: str) -> int:
    """Bytes of one element."""
    return 2 if dtype == "bfloat16" else np.dtype(dtype).itemsize


@dataclasses.dataclass(frozen=True)
class Batch:
    """A training step's batch, in all.

    Attributes:
      sequences: samples.
      tokens: trained positions (of a sequence, all but the last).
      positions: computed ones, with the padding to whole micro-batches.
      micro_batches: of all minibatches.
    """

    sequences: int
    tokens: int
    positions: int
    micro_batches: int


def batch_of(setup: Setup) -> Batch:
    """The batch that the configuration makes of sequences of the assumed length."""
    t = setup.config.trainer
    sequences = t.groups_per_step * setup.config.rollout.group_size
    length = setup.workload.sequence - 1
    rows = -(-sequences // t.minibatches // max(1, t.micro_batch_tokens // length))
    micro = t.minibatches * max(1, -(-rows // t.micro_batch_rows))
    return Batch(sequences, sequences * length, micro * t.micro_batch_rows * t.micro_batch_tokens, micro)


def kv_parts(model: ModelConfig, axes: Axes) -> int:
    """Into how many parts the tensor axis divides a cache: all or, where it does not divide the key heads, one."""
    return axes.tensor if model.kv_heads % axes.tensor == 0 else 1
