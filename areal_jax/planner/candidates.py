"""Other ways to divide the same devices, and what to change where the configured way does not fit: all analytic, so that hundreds cost a second.

Invariant: a remedy is only named when the same model of memory says that it makes the role fit.
"""

from __future__ import annotations

import bisect
import dataclasses
from collections.abc import Iterator

from areal_jax.config import put
from areal_jax.planner.bounds import Bounds, bounds
from areal_jax.planner.hardware import GIB
from areal_jax.planner.memory import Memory, pages_that_fit, sampler_memory, slots_that_fit, trainer_memory
from areal_jax.planner.setup import Axes, Setup, with_meshes

REMAT = ("none", "dots", "full")


@dataclasses.dataclass(frozen=True)
class Outcome:
    """A setup with what it needs and how fast it can be at best."""

    setup: Setup
    trainer: Memory
    sampler: Memory
    bounds: Bounds

    @property
    def fits(self) -> bool:
        return self.trainer_room >= 0 and self.sampler_room >= 0

    @property
    def trainer_room(self) -> int:
        return self.trainer.room(self.setup.topology.chip)

    @property
    def sampler_room(self) -> int:
        return self.sampler.room(self.setup.topology.chip)


def outcome(setup: Setup) -> Outcome:
    """The analytic plan of a setup."""
    return Outcome(setup, trainer_memory(setup), sampler_memory(setup), bounds(setup))


def _divisors(n: int) -> list[int]:
    return [d for d in range(1, n + 1) if n % d == 0]


def trainer_meshes(setup: Setup) -> Iterator[Axes]:
    """Meshes of the trainer's devices: fsdp by context by tensor, the last two within a host or up to 8."""
    n, m = setup.trainer.devices, setup.model
    for tensor in (1, 2, 4, 8):
        for context in (1, 2, 4, 8):
            if n % (tensor * context) or tensor * context > 8 or m.heads % tensor or setup.config.trainer.micro_batch_tokens % context:
                continue
            for fsdp in _divisors(n // (tensor * context)):
                if m.hidden_size % fsdp == 0:
                    yield Axes(n // (tensor * context * fsdp), fsdp, context, tensor)


def sampler_meshes(setup: Setup) -> Iterator[Axes]:
    """Meshes of the sampler's devices, replicas by tensor; the cache is divided in all of them."""
    n, m = setup.sampler.devices, setup.model
    return (Axes(data=n // tensor, tensor=tensor) for tensor in (1, 2, 4, 8) if n % tensor == 0 and m.heads % tensor == 0 and m.kv_heads % tensor == 0)


def best_trainers(setup: Setup, count: int) -> list[Outcome]:
    """The trainer's meshes that fit, the fastest first; where none fits, those that lack least."""
    found = [outcome(with_meshes(setup, trainer=axes)) for axes in trainer_meshes(setup)]
    return sorted(found, key=lambda o: (o.trainer_room < 0, o.bounds.trainer.bound if o.trainer_room >= 0 else -o.trainer_room))[:count]


def best_samplers(setup: Setup) -> list[Outcome]:
    """The sampler's meshes, the fastest first: each with as many slots as fit with pages for the mean length and η can use, and what pages fit beside."""
    r = setup.config.rollout
    most = (1 + (r.max_staleness or 0)) * setup.config.trainer.groups_per_step * r.group_size
    found = []
    for axes in sampler_meshes(setup):
        useful = range(1, -(-most // axes.data) + 1)

        def paged(slots: int, axes: Axes = axes) -> Setup:
            return with_meshes(setup, sampler=axes, slots=slots * axes.data, pages=max(slots * setup.mean_pages + 1, setup.fewest_pages))

        usable = setup.topology.chip.usable
        fitting = max(1, bisect.bisect_right(useful, usable, key=lambda slots: sampler_memory(paged(slots)).total))
        pages = min(pages_that_fit(paged(fitting)), fitting * setup.sequence_pages + 1)
        found.append(outcome(with_meshes(paged(fitting), pages=max(pages, paged(fitting).pages))))
    return sorted(found, key=lambda o: (o.sampler_room < 0, o.bounds.sampler))


def best(setup: Setup) -> Outcome:
    """The fastest division of the devices that fits, or what lacks least."""
    trainer, sampler = best_trainers(setup, 1)[0].setup.trainer, best_samplers(setup)[0].setup
    return outcome(with_meshes(setup, trainer, sampler.sampler, sampler.config.rollout.slots, sampler.pages))


def remedies(now: Outcome) -> list[str]:
    """What makes a role fit that does not, each alone; empty where all fits."""
    setup, found = now.setup, []
    if now.trainer_room < 0:
        stronger = [level for level in REMAT if REMAT.index(level) > REMAT.index(setup.config.trainer.remat)]
        for level in stronger:
            changed = _changed(setup, "trainer.remat", level)
            if trainer_memory(changed).room(setup.topology.chip) >= 0:
                found.append(f"trainer.remat={level}")
                break
        for axes in _fitting_trainers(setup):
            found.append(f"cluster.mesh.trainer={_text(axes)}")
        if setup.rows > 1:
            fewer = _changed(setup, "trainer.micro_batch_rows", setup.trainer.shards)
            if trainer_memory(fewer).room(setup.topology.chip) >= 0:
                found.append("trainer.micro_batch_rows=0 (one a shard)")
        if not found:
            nearest = best_trainers(setup, 1)[0]
            found.append(f"more devices for the trainer: on these {setup.trainer.devices} no mesh fits, the nearest lacks {_gib(-nearest.trainer_room)}")
    if now.sampler_room < 0:
        fitting = slots_that_fit(setup)
        if fitting:
            found.append(f"rollout.slots={fitting * setup.sampler.data} ({fitting} a replica)")
        pages = pages_that_fit(setup)
        if pages >= setup.fewest_pages:
            mean, longest = (pages - 1) // setup.mean_pages, (pages - 1) // setup.sequence_pages
            found.append(
                f"rollout.kv_pages={pages} (a replica's, without preemption {min(mean, setup.slots)} sequences of the mean {setup.workload.sequence} tokens "
                f"at once, {longest} of the longest)"
            )
        wider = [axes for axes in sampler_meshes(setup) if axes.tensor > setup.sampler.tensor]
        for axes in wider:
            slots = setup.config.rollout.slots
            if sampler_memory(with_meshes(setup, sampler=axes, slots=slots)).room(setup.topology.chip) >= 0:
                found.append(f"cluster.mesh.sampler=tensor={axes.tensor} with the same slots")
                break
        if not fitting and not wider and pages < setup.fewest_pages:
            found.append("more devices for the sampler, or shorter responses: not one slot fits")
    return found


def _fitting_trainers(setup: Setup) -> list[Axes]:
    """The fitting meshes nearest to the configured one: more fsdp, then context, then tensor."""
    found = []
    for changed in ("fsdp", "context", "tensor"):
        others = [name for name in ("fsdp", "context", "tensor") if name != changed]
        for axes in sorted(trainer_meshes(setup), key=lambda a: getattr(a, changed)):
            larger = getattr(axes, changed) > getattr(setup.trainer, changed) and all(getattr(axes, name) == getattr(setup.trainer, name) for name in others)
            if larger and trainer_memory(with_meshes(setup, trainer=axes)).room(setup.topology.chip) >= 0:
                found.append(axes)
                break
    return found


def _changed(setup: Setup, key: str, value: object) -> Setup:
    config = setup.config.copy_and_resolve_references()
    put(config, key, value)
    return dataclasses.replace(setup, config=config)


def _text(axes: Axes) -> str:
    return ",".join(f"{name}={size}" for name, size in dataclasses.asdict(axes).items() if name != "data" and size > 1)


def _gib(size: float) -> str:
    return f"{size / GIB:.1f} GiB"
