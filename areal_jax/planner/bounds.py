"""From work to least times: what compute, memory and links each allow at their peaks, and which role a step waits for.

Invariants:
* A bound assumes that compute, memory traffic and communication overlap wholly: the largest of them is the time. A real step is slower.
* A collective's ring crosses between domains through the ports of all its members in a domain.
"""

from __future__ import annotations

import dataclasses

from areal_jax.planner.counts import Batch, batch_of
from areal_jax.planner.hardware import Chip
from areal_jax.planner.memory import pushed_bytes
from areal_jax.planner.setup import Axes, Setup
from areal_jax.planner.wires import Wires
from areal_jax.planner.work import Work, decode_work, prefill_work, trainer_work


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
      trainer_work, decode_work, prefill_work: of a device, in the same parts.
      decode: one decode step of the sequences that have slots and pages.
      decode_steps: decode steps in which they generate a batch.
      prefill: prompts.
      rebuild: the caches of unfinished sequences, recomputed after the update.
      push: new weights to all samplers.
      push_bytes: sent in all.
      asynchronous: rollout and training overlap (η > 0).
    """

    batch: Batch
    trainer: Times
    trainer_work: Work
    decode: Times
    decode_work: Work
    decode_steps: float
    prefill: Times
    prefill_work: Work
    rebuild: Times
    rebuild_work: Work
    push: float
    push_bytes: float
    asynchronous: bool

    @property
    def sampler(self) -> float:
        return self.decode.bound * self.decode_steps + self.prefill.bound + self.rebuild.bound

    @property
    def step(self) -> float:
        return max(self.trainer.bound, self.sampler) if self.asynchronous else self.trainer.bound + self.sampler + self.push

    @property
    def bottleneck(self) -> str:
        return "trainer" if self.trainer.bound >= self.sampler else "sampler"


def rate(setup: Setup, axes: Axes, axis: str) -> float:
    """Bytes/s of a device in a ring along a mesh axis, or along several, as in 'data+context'."""
    chip, domain = setup.topology.chip, setup.topology.domain
    names = axis.split("+")
    reach = max(axes.stride(name) * getattr(axes, name) for name in names)
    if reach <= domain:
        return chip.link
    return min(chip.link, chip.network * max(1, domain // min(axes.stride(name) for name in names)))


def times(setup: Setup, axes: Axes, work: Work) -> Times:
    """Least times of a device's work."""
    chip: Chip = setup.topology.chip
    return Times(work.flops / chip.flops, work.memory / chip.bandwidth, sum(link_seconds(setup, axes, work.wires).values()))


def link_seconds(setup: Setup, axes: Axes, wires: Wires) -> Wires:
    """Least seconds of each collective."""
    return {(kind, axis): sent / rate(setup, axes, axis) for (kind, axis), sent in wires.items()}


def bounds(setup: Setup) -> Bounds:
    """Least times of a training step's parts."""
    r, axes, chip = setup.config.rollout, setup.replica, setup.topology.chip
    batch = batch_of(setup)
    steps = batch.sequences * setup.workload.response / (setup.concurrent * setup.sampler.data)
    one = pushed_bytes(setup.model, axes, setup.config.model.sampler_dtype)  # of a device
    pushed = one * setup.sampler.devices
    push = max(one, pushed / setup.trainer.devices) / chip.network
    training, decoding, (prefilling, rebuilding) = trainer_work(setup), decode_work(setup, axes), prefill_work(setup, axes)
    return Bounds(
        batch,
        times(setup, setup.trainer, training),
        training,
        times(setup, axes, decoding),
        decoding,
        steps,
        times(setup, axes, prefilling),
        prefilling,
        times(setup, axes, rebuilding),
        rebuilding,
        push,
        pushed,
        r.max_staleness != 0,
    )
