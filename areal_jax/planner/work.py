"""The least work of one training step: tokens, floating-point operations, bytes through memory, bytes over links.

Invariants:
* Everything is counted from the architecture and the lengths; nothing is measured and nothing is fitted.
* What the programs compute is counted, not what an ideal one would: padding to whole rows, the decode cache to its allocated length.
* Sequences all have the assumed mean length. Counts are per device unless a name says ``total``.

FLOPs of a token: 2 for each parameter of the matrix products it goes through (arXiv 2001.08361), and 4 · heads · head_dim for each position that it
attends to; backward twice the forward.
"""

from __future__ import annotations

import dataclasses
import math

import numpy as np

from areal_jax.models.architecture import ModelConfig
from areal_jax.planner.setup import Axes, Setup
from areal_jax.sampler.caches import together


@dataclasses.dataclass(frozen=True)
class Work:
    """Of one device in one training step: FLOPs, bytes between memory and cores, and bytes sent over links by (kind, mesh axis)."""

    flops: float
    memory: float
    wires: dict[tuple[str, str], float]


@dataclasses.dataclass(frozen=True)
class Matrices:
    """Parameters of matrix products that a token goes through, and all of them."""

    block: int
    block_active: int
    head: int


def matrices(model: ModelConfig) -> Matrices:
    """Of one block and of the LM head; a mixture's token goes through some experts and the router."""
    m = model
    attention = m.hidden_size * m.head_dim * 2 * (m.heads + m.kv_heads)
    if m.experts:
        expert, router = 3 * m.hidden_size * m.expert_mlp_size, m.hidden_size * m.experts
        return Matrices(attention + router + m.experts * expert, attention + router + m.experts_per_token * expert, m.hidden_size * m.vocab_size)
    block = attention + 3 * m.hidden_size * m.mlp_size
    return Matrices(block, block, m.hidden_size * m.vocab_size)


def kv_bytes_per_token(model: ModelConfig) -> int:
    """Keys and values of one token in all layers, in the compute type."""
    return 2 * model.layers * model.kv_heads * model.head_dim * item(model.dtype)


def item(dtype: str) -> int:
    """Bytes of one element."""
    return 2 if dtype == "bfloat16" else np.dtype(dtype).itemsize


def attention_flops(model: ModelConfig, seen: float) -> float:
    """Of one token that attends to ``seen`` positions, in all layers: scores and mixing."""
    return 4.0 * model.layers * model.heads * model.head_dim * seen


def forward_flops(model: ModelConfig, tokens: float, seen: float, head: bool = True) -> float:
    """Of a forward pass over tokens that attend to ``seen`` positions each on average."""
    w = matrices(model)
    return tokens * (2.0 * (model.layers * w.block_active + (w.head if head else 0)) + attention_flops(model, seen))


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


def trainer_work(setup: Setup) -> Work:
    """Of the trainer's step: proximal passes of all but the first minibatch, gradients of all, an update each."""
    m, axes, t = setup.model, setup.trainer, setup.config.trainer
    batch, w, c = batch_of(setup), matrices(m), item(m.dtype)
    earlier = (t.minibatches - 1) / t.minibatches
    seen = setup.workload.sequence / 2
    forward = forward_flops(m, batch.positions, 0.0) + batch.tokens * attention_flops(m, seen)
    blocks = forward - batch.positions * 2.0 * w.head
    again = {"none": 0.0, "dots": 0.0, "full": 1.0}[t.remat]
    chunks = 1.0 if setup.local_tokens > t.logprob_chunk else 0.0
    flops = (forward * (3.0 + earlier) + blocks * again + chunks * batch.positions * 2.0 * w.head) / axes.devices
    passes = batch.micro_batches * (2.0 + again + earlier)
    whole = (m.layers * w.block + w.head) / axes.tensor
    local = batch.positions / (axes.shards * axes.context)
    streams = local * m.hidden_size * c * m.layers
    logits = local * m.vocab_size / axes.tensor * 4.0
    own = (m.layers * w.block + 2 * w.head) / (axes.fsdp * axes.tensor)
    memory = (
        passes * whole * c  # weights, read by every pass
        + streams * (2.0 + earlier)  # block inputs, written, read, and those of the proximal pass
        + logits * 2.0 * (2.0 + earlier + chunks)  # written and read, forward, anew and backward
        + batch.micro_batches * own * 8.0  # gradients added up in float32
        + t.minibatches * own * 4.0 * 7.0  # AdamW reads parameter, gradient and two moments, and writes three
    )
    return Work(flops, memory, trainer_wires(setup, batch, again, earlier))


def trainer_wires(setup: Setup, batch: Batch, again: float, earlier: float) -> dict[tuple[str, str], float]:
    """Bytes that a trainer's device sends in a step, by collective and axis."""
    m, axes, w, c = setup.model, setup.trainer, matrices(setup.model), item(setup.model.dtype)
    micro = batch.micro_batches
    blocks, head = m.layers * w.block / axes.tensor, w.head / axes.tensor
    residual = batch.positions / (axes.shards * axes.context) * m.hidden_size * c
    wires: dict[tuple[str, str], float] = {}
    if axes.fsdp > 1:
        part = (axes.fsdp - 1) / axes.fsdp
        # Forward, proximal and backward each gather a block's weights where they are used; the backward pass gathers them for the recomputation.
        wires["all-gather", "fsdp"] = micro * part * c * (blocks * (2.0 + earlier) + head * (2.0 + earlier))
        wires["reduce-scatter", "fsdp"] = micro * part * (blocks * c + head * 4.0)
    if axes.data * axes.context > 1:
        n = axes.data * axes.context
        wires["all-reduce", "data" if axes.data > 1 else "context"] = micro * 2.0 * (n - 1) / n * (blocks * c + head * 4.0) / axes.fsdp
    if axes.tensor > 1:
        # Two sums of the residual stream a block, forward, anew and backward.
        wires["all-reduce", "tensor"] = 2.0 * (axes.tensor - 1) / axes.tensor * 2.0 * m.layers * residual * (2.0 + again + earlier)
    if axes.context > 1:
        keys = 2.0 * m.layers * batch.positions / axes.shards * m.kv_heads / math.gcd(m.kv_heads, axes.tensor) * m.head_dim * c
        part = (axes.context - 1) / axes.context
        wires["all-gather", "context"] = part * keys * (1.0 + again + earlier)
        wires["reduce-scatter", "context"] = part * keys
    return wires


def decode_work(setup: Setup, axes: Axes, slots: int) -> Work:
    """Of one decode step of a sampler's device with ``slots`` slots a shard."""
    m, w = setup.model, matrices(setup.model)
    flops = slots * (2.0 * (m.layers * w.block_active + w.head) + attention_flops(m, setup.longest)) / axes.tensor
    weights = (m.layers * w.block + w.head) * item(setup.config.model.sampler_dtype) / axes.tensor
    cache = slots * setup.longest * kv_bytes_per_token(m) / kv_parts(m, axes)
    logits = 3.0 * slots * m.vocab_size * 4.0 / axes.tensor
    wires: dict[tuple[str, str], float] = {}
    if axes.tensor > 1:
        wires["all-reduce", "tensor"] = 2.0 * (axes.tensor - 1) / axes.tensor * 2.0 * m.layers * slots * m.hidden_size * item(m.dtype)
        wires["all-gather", "tensor"] = (axes.tensor - 1) / axes.tensor * slots * m.vocab_size * 4.0
    return Work(flops, weights + cache + logits, wires)


def kv_parts(model: ModelConfig, axes: Axes) -> int:
    """Into how many parts the tensor axis divides a cache: all or, where it does not divide the key heads, one."""
    return axes.tensor if model.kv_heads % axes.tensor == 0 else 1


def prefill_widths(setup: Setup) -> tuple[int, ...]:
    """The lengths to which the sampler pads sequences, ascending."""
    return (*(w for w in sorted(setup.config.rollout.prefill_buckets) if w < setup.longest), setup.longest)


def prefill_rows(setup: Setup, axes: Axes, width: int) -> tuple[int, int]:
    """Sequences of one prefill at a width, and those that each shard computes: all of them where they do not divide among the shards."""
    rows = min(setup.config.rollout.prefill_groups, together(width))
    return rows, rows // axes.shards if rows % axes.shards == 0 else rows
