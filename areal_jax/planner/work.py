"""The least work of one training step: tokens, floating-point operations, bytes through memory, bytes over links.

Invariants:
* Everything is counted from the architecture and the lengths; nothing is measured and nothing is fitted.
* What the programs compute is counted, not what an ideal one would: padding to whole rows of the trainer's, pages read anew by every block of a prefill.
* Sequences all have the assumed mean length. Counts are per device unless a name says ``total``.

FLOPs of a token: 2 for each parameter of the matrix products it goes through (arXiv 2001.08361), and 4 · heads · head_dim for each position that it
attends to; backward twice the forward. With adapters (arXiv 2106.09685) the frozen matrices have no gradient: their backward is once the forward.
"""

from __future__ import annotations

import dataclasses

from areal_jax.models.work import attention_flops, forward_flops, matrices
from areal_jax.planner.counts import batch_of, item, kv_bytes_per_token, kv_parts, trained_elements
from areal_jax.planner.setup import Axes, Setup
from areal_jax.planner.wires import Wires, decode_wires, prefill_wires, trainer_wires
from areal_jax.sampler.engine import BLOCK


@dataclasses.dataclass(frozen=True)
class Work:
    """Of one device in one training step: FLOPs, bytes between memory and cores, and bytes sent over links by (kind, mesh axis)."""

    flops: float
    memory: float
    wires: Wires


def trainer_work(setup: Setup) -> Work:
    """Of the trainer's step: proximal passes of all but the first minibatch, gradients of all, an update each."""
    m, axes, t = setup.model, setup.trainer, setup.config.trainer
    batch, w, c = batch_of(setup), matrices(m), item(m.dtype)
    earlier = (t.minibatches - 1) / t.minibatches
    attention = batch.tokens * attention_flops(m, setup.workload.sequence / 2)
    products = forward_flops(m, batch.positions, 0.0)
    head = batch.positions * 2.0 * w.head
    adapters = batch.positions * 2.0 * m.layers * w.adapters
    kernels = adapters if m.lora else products  # those whose own gradient is computed
    again = {"none": 0.0, "dots": 0.0, "full": 1.0}[t.remat]
    chunks = 1.0 if setup.local_tokens > t.logprob_chunk else 0.0
    forward = products + attention
    flops = (forward * (1.0 + earlier) + products + kernels + 2.0 * attention + (forward - head) * again + head * chunks) / axes.devices
    passes = batch.micro_batches * (2.0 + again + earlier)
    whole = (m.layers * (w.block + w.adapters) + w.head) / axes.tensor
    local = batch.positions / (axes.shards * axes.context)
    streams = local * m.hidden_size * c * m.layers
    logits = local * m.vocab_size / axes.tensor * 4.0
    own = trained_elements(m, axes)
    memory = (
        passes * whole * c  # weights, read by every pass
        + streams * (2.0 + earlier)  # block inputs, written, read, and those of the proximal pass
        + logits * 2.0 * (2.0 + earlier + chunks)  # written and read, forward, anew and backward
        + batch.micro_batches * own * 8.0  # gradients added up in float32
        + t.minibatches * own * 4.0 * 7.0  # AdamW reads parameter, gradient and two moments, and writes three
    )
    return Work(flops, memory, trainer_wires(setup))


def decode_work(setup: Setup, axes: Axes) -> Work:
    """Of one decode step of a device of a replica: the sequences that it decodes together, on average half-way through their responses."""
    m, w, rows = setup.model, matrices(setup.model), setup.concurrent
    block, seen = w.block_active + w.adapters, setup.workload.prompt + setup.workload.response / 2
    flops = rows * (2.0 * (m.layers * block + w.head) + attention_flops(m, seen)) / (axes.tensor * axes.fsdp)
    weights = (m.layers * (w.block + w.adapters) + w.head) * item(setup.config.model.sampler_dtype) / (axes.tensor * axes.fsdp)
    cache = rows * seen * kv_bytes_per_token(m) / kv_parts(m, axes)
    logits = 3.0 * rows * m.vocab_size * 4.0 / axes.tensor
    return Work(flops, weights + cache + logits, decode_wires(setup, axes, rows))


def prefill_work(setup: Setup, axes: Axes) -> tuple[Work, Work]:
    """Of a training step, of a device of a replica: (its prompts, the caches of unfinished sequences rebuilt after the update).

    The samples of a group are on one replica and share their prompt, which is computed once for all of them, on entering as in a rebuild.
    """
    r, t, size, response = setup.config.rollout, setup.config.trainer, setup.workload, setup.workload.response
    replicas = setup.sampler.data
    prompts = t.groups_per_step / replicas * size.prompt
    entered = filling(setup, axes, ((prompts, size.prompt / 2),))
    if r.kv_on_update != "recompute":
        return entered, Work(0.0, 0.0, {})
    live = min(setup.concurrent, (1 + (r.max_staleness or 0)) * batch_of(setup).sequences / replicas)
    # Responses are anywhere between begun and ended; a token that is recomputed has a third of a response before it on average.
    again = ((live / r.group_size * size.prompt, size.prompt / 2), (live * response / 2, size.prompt + response / 3))
    return entered, filling(setup, axes, again)


def filling(setup: Setup, axes: Axes, parts: tuple[tuple[float, float], ...]) -> Work:
    """Of a device whose replica fills pages: parts of (tokens, positions that each of them sees on average)."""
    m, w = setup.model, matrices(setup.model)
    tokens, divided = sum(count for count, _ in parts), axes.tensor * axes.fsdp
    flops = sum(forward_flops(m, count, seen, head=False) for count, seen in parts) / divided
    programs = tokens / setup.config.rollout.prefill_chunk
    weights = m.layers * (w.block + w.adapters) * item(setup.config.model.sampler_dtype) / divided
    # What is written, and what each block of a sequence reads of the pages before it.
    cached = (tokens + sum(count * seen for count, seen in parts) / BLOCK) * kv_bytes_per_token(m) / kv_parts(m, axes)
    return Work(flops, programs * weights + cached, prefill_wires(m, axes, tokens, programs))
