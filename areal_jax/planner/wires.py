"""Bytes that a device sends over links, by collective and mesh axes, counted from how the programs are divided.

Invariants:
* Bytes are those of a ring, as ``collectives`` reads them from compiled programs: (g - 1) / g of the whole for a gather or scatter among g devices,
  twice that for an all-reduce. Counters, token numbers and sums of single numbers a row are left out.
* Tests compare the gradient program with the compiled one on several meshes. There the CPU's compiler differs in two ways (``host=True``): gradients
  that lie divided over fsdp are summed whole and cut, and partial gradients of a block's input over tensor are summed before they are added up.
"""

from __future__ import annotations

import dataclasses
from collections import defaultdict

import numpy as np

from areal_jax.models.architecture import ModelConfig
from areal_jax.models.work import adapter_parts, matrices
from areal_jax.planner.counts import batch_of, item, kv_parts
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


def decode_wires(setup: Setup, axes: Axes, rows: float) -> Wires:
    """Of one decode step of so many rows of a replica. Its slots' numbers and the draw's sums, a few a row, are left out."""
    m, found = setup.model, _Sum(axes)
    _sums(found, m, rows, axes.fsdp)
    _partial(found, m, rows, m.layers)
    found.add("all-reduce", ("fsdp",), rows * m.vocab_size / axes.tensor * 4.0)
    return dict(found.wires)


def prefill_wires(model: ModelConfig, axes: Axes, tokens: float, programs: float) -> Wires:
    """Of so many programs of a replica that fill pages with so many tokens; of the last block only keys and values are computed."""
    found, c = _Sum(axes), item(model.dtype)
    _sums(found, dataclasses.replace(model, layers=model.layers - 1), tokens, axes.fsdp)
    _partial(found, model, tokens, model.layers - 1, programs)
    found.add("all-reduce", ("fsdp",), tokens * 2 * model.kv_heads * model.head_dim / kv_parts(model, axes) * c)
    return dict(found.wires)


def _partial(found: _Sum, m: ModelConfig, tokens: float, layers: int, programs: float = 1.0) -> None:
    """Over a sampler's fsdp axis, which divides its kernels by their hidden dimension: partial products are summed up, experts are gathered."""
    axes, c = found.axes, item(m.dtype)
    products = m.heads * m.head_dim / axes.tensor + 2 * m.kv_heads * m.head_dim / kv_parts(m, axes)
    products += 0 if m.experts else 2 * m.mlp_size / axes.tensor
    found.add("all-reduce", ("fsdp",), tokens * layers * products * c)
    found.add("all-gather", ("fsdp",), programs * layers * 3.0 * m.experts * m.hidden_size * (m.expert_mlp_size if m.experts else 0) / axes.tensor * c)


def _sums(found: _Sum, m: ModelConfig, tokens: float, divided: int = 1) -> None:
    """Over tensor: of the embedding and of each block's two divided products; ``divided``: parts of the hidden dimension."""
    c = item(m.dtype)
    found.add("all-reduce", ("tensor",), tokens * m.hidden_size / divided * (c + m.layers * (c + (4 if m.experts else c))))
