"""Numbers that a plan starts from: matrices' parameters, a token's cache, the positions of a training step's batch.

Invariant: everything is counted from the architecture, the configuration and the assumed lengths.
"""

from __future__ import annotations

import dataclasses

import numpy as np

from areal_jax.models.architecture import ModelConfig
from areal_jax.planner.setup import Axes, Setup


@dataclasses.dataclass(frozen=True)
class Matrices:
    """Parameters of matrix products that a token goes through, and all of them; ``adapters`` are those of a block's low-rank ones."""

    block: int
    block_active: int
    head: int
    adapters: int = 0


def matrices(model: ModelConfig) -> Matrices:
    """Of one block and of the LM head; a mixture's token goes through some experts and the router."""
    m = model
    attention = m.hidden_size * m.head_dim * 2 * (m.heads + m.kv_heads)
    if m.experts:
        expert, router = 3 * m.hidden_size * m.expert_mlp_size, m.hidden_size * m.experts
        active = attention + router + m.experts_per_token * expert
        return Matrices(attention + router + m.experts * expert, active, m.hidden_size * m.vocab_size, adapter_elements(m))
    block = attention + 3 * m.hidden_size * m.mlp_size
    return Matrices(block, block, m.hidden_size * m.vocab_size, adapter_elements(m))


def adapter_parts(model: ModelConfig) -> tuple[int, int]:
    """Parameters of one block's adapters along the hidden size, which fsdp divides, and along the other, which tensor divides; (0, 0) without."""
    m, queries, keys = model, model.heads * model.head_dim, model.kv_heads * model.head_dim
    others = {"query": queries, "key": keys, "value": keys, "output": queries} | dict.fromkeys(("gate", "up", "down"), m.mlp_size)
    if m.lora is None:
        return 0, 0
    return m.lora.rank * len(m.lora.targets) * m.hidden_size, m.lora.rank * sum(others[name] for name in m.lora.targets)


def adapter_elements(model: ModelConfig) -> int:
    """Parameters of one block's adapters: rank · (in + out) of each layer that has one; 0 without."""
    return sum(adapter_parts(model))


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
