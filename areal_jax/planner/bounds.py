"""From work to least times: what compute, memory and links each allow at their peaks, and which role a step waits for.

Invariants:
* A bound assumes that compute, memory traffic and communication overlap wholly: the largest of them is the time. A real step is slower.
* A collective's ring crosses between domains through the ports of all its members in a domain.
"""

from __future__ import annotations

import dataclasses

from areal_jax.planner.hardware import Chip
from areal_jax.planner.setup import Axes, Setup
from areal_jax.planner.work import Batch, Work, batch_of, decode_work, forward_flops, item, matrices, prefill_rows, prefill_widths, trainer_work


@dataclasses.dataclass(frozen=True)
class Times:
    """Seconds that each resource needs at its peak."""

    compute: float
    memory: float
    links: float

    @property
    def bound(self) -> float:
        return max(self.compute, self.memory, self.links)

    @property
    def limit(self) -> str:
        """The resource that sets the bound."""
        return max(("compute", "memory", "links"), key=lambda name: getattr(self, name))


@dataclasses.dataclass(frozen=True)
class Bounds:
    """Least seconds of a step's parts.

    Attributes:
      batch: what is trained.
      trainer: the update of all minibatches.
      decode: one decode step of all slots.
      decode_steps: decode steps in which the slots generate a batch.
      prefill: prompts, and the caches of unfinished sequences rebuilt after the update.
      push: new weights to all samplers.
      push_bytes: sent in all.
      asynchronous: rollout and training overlap (η > 0).
    """

    batch: Batch
    trainer: Times
    decode: Times
    decode_steps: float
    prefill: float
    push: float
    push_bytes: float
    asynchronous: bool

    @property
    def sampler(self) -> float:
        return self.decode.bound * self.decode_steps + self.prefill

    @property
    def step(self) -> float:
        return max(self.trainer.bound, self.sampler) if self.asynchronous else self.trainer.bound + self.sampler + self.push

    @property
    def bottleneck(self) -> str:
        return "trainer" if self.trainer.bound >= self.sampler else "sampler"


def rate(setup: Setup, axes: Axes, axis: str) -> float:
    """Bytes/s of a device in a ring along a mesh axis."""
    chip, domain = setup.topology.chip, setup.topology.domain
    reach = axes.stride(axis) * getattr(axes, axis)
    if reach <= domain:
        return chip.link
    return min(chip.link, chip.network * max(1, domain // axes.stride(axis)))


def times(setup: Setup, axes: Axes, work: Work) -> Times:
    """Least times of a device's work."""
    chip: Chip = setup.topology.chip
    return Times(work.flops / chip.flops, work.memory / chip.bandwidth, sum(sent / rate(setup, axes, axis) for (_, axis), sent in work.wires.items()))


def bounds(setup: Setup) -> Bounds:
    """Least times of a training step's parts."""
    r, m, axes, chip = setup.config.rollout, setup.model, setup.sampler, setup.topology.chip
    batch = batch_of(setup)
    per_step = setup.slots * axes.shards
    steps = batch.sequences * setup.workload.response / per_step
    live = min(per_step, (1 + (r.max_staleness or 0)) * batch.sequences)
    length = setup.workload.prompt + setup.workload.response / 2
    width = next(w for w in prefill_widths(setup) if w >= setup.workload.prompt)
    rows, own = prefill_rows(setup, axes, width)
    entered = setup.config.trainer.groups_per_step * width * own / rows
    again = live * length / axes.shards if r.kv_on_update == "recompute" else 0.0
    prefill = (forward_flops(m, entered, width / 2, head=False) + forward_flops(m, again, length / 2, head=False)) / axes.tensor / chip.flops
    weights = (m.layers * matrices(m).block + (1 if m.tie_embeddings else 2) * matrices(m).head) * item(setup.config.model.sampler_dtype)
    pushed = weights * axes.shards
    push = max(weights / axes.tensor, pushed / setup.trainer.devices) / chip.network
    trainer = times(setup, setup.trainer, trainer_work(setup))
    decode = times(setup, axes, decode_work(setup, axes, setup.slots))
    return Bounds(batch, trainer, decode, steps, prefill, push, pushed, r.max_staleness != 0)
