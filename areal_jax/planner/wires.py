"""Bytes that a device sends over links, by collective and mesh axes, counted from how the programs are divided.

Invariants:
* Bytes are those of a ring, as ``collectives`` reads them from compiled programs: (g - 1) / g of the whole for a gather or scatter among g devices,
  twice that for an all-reduce. Counters, token numbers and sums of single numbers a row are left out.
* Tests compare the gradient program with the compiled one on several meshes. There the CPU's compiler differs in two ways (``host=True``): gradients
  that lie divided over fsdp are summed whole and cut, and partial gradients of a block's input over tensor are summed before they are added up.
"""

from __future__ import annotations

from collections import defaultdict

import numpy as np

from areal_jax.models.architecture import ModelConfig
from areal_jax.planner.counts import adapter_parts, batch_of, item, kv_bytes_per_token, kv_parts, matrices
from areal_jax.planner.setup import Axes, Setup

Wires = dict[tuple[str, str], float]
"""Bytes by (kind, axes), where axes is as in 'data+context'."""


def _part(devices: int) -> float:
    """Of a gathered whole what a device sends."""
    return (devices - 1) / devices


class _Sum:
    """Adds up bytes by kind and axes; what goes among one device is nothing."""

    def __init__(self, axes: Axes):
        self.axes, self.wires = axes, defaultdict[tuple[str, str], float](float)

    def add(self, kind: str, names: tuple[str, ...], whole: float) -> None:
        names = tuple(name for name in names if getattr(self.axes, name) > 1)
        devices = int(np.prod([getattr(self.axes, name) for name in names]))
        if devices > 1 and whole:
            self.wires[kind, "+".join(names)] += (2.0 if kind == "all-reduce" else 1.0) * _part(devices) * whole


def _forward(found: _Sum, setup: Setup) -> None:
    """One forward pass over a micro-batch: parameters gathered over fsdp, looked-up rows exchanged over it, keys gathered over context."""
    m, axes, w, c = setup.model, setup.trainer, matrices(setup.model), item(setup.model.dtype)
    residual = setup.local_tokens * m.hidden_size
    found.add("all-gather", ("fsdp",), (_blocks(setup) + w.head / axes.tensor) * c)
    found.add("all-to-all", ("fsdp",), residual * c)
    _sums(found, m, setup.local_tokens)
    found.add("all-gather", ("context",), _keys(setup))


def _blocks(setup: Setup) -> float:
    """Parameters of all blocks that are gathered over fsdp."""
    return setup.model.layers * (matrices(setup.model).block / setup.trainer.tensor + adapter_parts(setup.model)[0])


def _keys(setup: Setup) -> float:
    """Keys and values of a device's rows, all positions and layers."""
    m = setup.model
    return 2.0 * m.layers * setup.rows * setup.config.trainer.micro_batch_tokens * m.kv_heads / kv_parts(m, setup.trainer) * m.head_dim * item(m.dtype)


def accumulate_wires(setup: Setup, host: bool = False) -> Wires:
    """Of the program that accumulates one micro-batch's gradient.

    Args:
      setup: what is planned.
      host: as the CPU's compiler lowers it.
    """
    m, axes, w, c, remat = setup.model, setup.trainer, matrices(setup.model), item(setup.model.dtype), setup.config.trainer.remat
    found = _Sum(axes)
    _forward(found, setup)
    residual = setup.local_tokens * m.hidden_size
    found.add("all-gather", ("fsdp",), _blocks(setup) * c)  # blocks are gathered anew, the head is not
    if remat != "none":
        found.add("all-gather", ("context",), _keys(setup))
    found.add("reduce-scatter", ("context",), _keys(setup))
    sums = (1 if remat == "full" else 0) + ((4 if m.experts else 5) if host else 2)
    found.add("all-reduce", ("tensor",), residual * (sums * m.layers * c + 4))
    batch = ("data", "context")
    if m.lora:
        hidden, other = (m.layers * part * c for part in adapter_parts(m))
        found.add("all-reduce", ("data", "fsdp", "context"), hidden + other / axes.tensor)
        return dict(found.wires)
    blocks = m.layers * w.block / axes.tensor * c
    experts = 3 * m.layers * m.experts * m.hidden_size * m.expert_mlp_size / axes.tensor * c if m.experts else 0.0
    found.add("all-reduce" if host else "reduce-scatter", ("fsdp",), blocks - experts)
    found.add("reduce-scatter", ("fsdp",), experts)
    found.add("all-reduce", batch, blocks / axes.fsdp)
    head = w.head / axes.tensor * 4.0
    found.add("reduce-scatter", ("fsdp",), head)
    found.add("all-reduce", batch, head / axes.fsdp)
    # The embedding's: what was exchanged goes back, and each device's columns are summed over those that looked up other tokens.
    found.add("all-to-all", ("fsdp",), residual * c)
    found.add("all-reduce", ("tensor",), residual * c)
    found.add("all-reduce", batch, w.head / (axes.tensor * axes.fsdp) * item(setup.config.model.param_dtype))
    return dict(found.wires)


def proximal_wires(setup: Setup) -> Wires:
    """Of the program that computes one micro-batch's proximal log-probs."""
    found = _Sum(setup.trainer)
    _forward(found, setup)
    return dict(found.wires)


def trainer_wires(setup: Setup) -> Wires:
    """Of a training step: gradients of all micro-batches, proximal passes of those after the first minibatch."""
    micro, minibatches = batch_of(setup).micro_batches, setup.config.trainer.minibatches
    total = defaultdict[tuple[str, str], float](float)
    for wires, times in ((accumulate_wires(setup), micro), (proximal_wires(setup), micro * (minibatches - 1) / minibatches)):
        for key, sent in wires.items():
            total[key] += sent * times
    return dict(total)


def decode_wires(setup: Setup, axes: Axes, slots: int) -> Wires:
    """Of one decode step with ``slots`` slots a shard.

    New keys and values are gathered among all shards, each of which picks its own slots'; logits are gathered where a draw sorts them (top-k, top-p).
    """
    r, m, found = setup.config.rollout, setup.model, _Sum(axes)
    _sums(found, m, slots)
    found.add("all-gather", ("tensor",), slots * m.vocab_size * 4.0 if r.top_k or r.top_p < 1.0 else 0.0)
    found.add("all-gather", ("data", "fsdp"), slots * axes.shards * kv_bytes_per_token(m) / kv_parts(m, axes))
    return dict(found.wires)


def prefill_wires(model: ModelConfig, axes: Axes, tokens: float) -> Wires:
    """Of a sampler's forward pass over a device's tokens that fills caches."""
    found = _Sum(axes)
    _sums(found, model, tokens)
    return dict(found.wires)


def _sums(found: _Sum, m: ModelConfig, tokens: float) -> None:
    c = item(m.dtype)
    found.add("all-reduce", ("tensor",), tokens * m.hidden_size * (c + m.layers * (c + (4 if m.experts else c))))
