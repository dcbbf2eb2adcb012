"""Pushes parameters from the trainer's mesh to the sampler's, device to device, in one process.

Invariants:
* No parameter passes through host memory, whatever the two meshes: ``jax.device_put`` between meshes does so only when each destination
  shard is also a source shard, and stage 1 makes that true.
* The pushed arrays are new and ready: the trainer may donate its own at once, and the sampler never waits for one.
* Every push runs the same compiled programs; parameters of another shape, type or sharding are refused.
* No program on the sampler's devices communicates, so that a push cannot deadlock with a decode step that another thread dispatches.

The three stages, for a sampler whose axes have sizes s and a trainer of n devices:
  1. on the trainer, one program casts and reshards to the sampler's partition, as finely as n allows (axis size gcd(s, what is left of n));
  2. ``device_put`` sends these shards to the sampler devices that need them;
  3. on the sampler, where n was too few for its partition, each device cuts its own shard out of what it got.

                trainer mesh                     sampler mesh
   params ──1──► staged [s' shards] ────2────► staged [s' shards] ──3──► final [s shards]
"""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding

from areal_jax.models.sharding import named_shardings
from areal_jax.types import WeightUpdate

Leaves = list[jax.Array]


@dataclasses.dataclass(frozen=True)
class _Chunk:
    """Some of the leaves, pushed together. ``finish`` is None where stage 2 already gives the final shards."""

    places: tuple[int, ...]
    start: jax.stages.Compiled
    staged: list[NamedSharding]
    finish: jax.stages.Compiled | None


@dataclasses.dataclass(frozen=True)
class _Plan:
    signature: tuple[tuple[str, tuple[int, ...], str], ...]
    chunks: list[_Chunk]
    bytes: int


class WeightPusher:
    """Moves a parameter tree from one mesh to another and gives it a version.

    Args:
      trainer_mesh: where the parameters are.
      sampler_mesh: where they go. It shares all devices with ``trainer_mesh`` (then the push copies) or none.
      specs: tree of ``PartitionSpec`` like the parameters, for the sampler; an axis that does not divide its dimension is replicated.
      dtype: type of the pushed floating-point parameters; None keeps theirs. The cast is part of stage 1.
      chunk_bytes: leaves are pushed in chunks of about so many bytes, which bounds the extra memory of the stages on both meshes.
    """

    def __init__(self, trainer_mesh: Mesh, sampler_mesh: Mesh, specs: Any, dtype: Any = None, chunk_bytes: int = 1 << 30):
        ours, theirs = set(trainer_mesh.devices.flat), set(sampler_mesh.devices.flat)
        if ours != theirs and ours & theirs:
            raise ValueError(
                f"trainer and sampler must share all devices or none; {len(ours & theirs)} of {len(ours)} and {len(theirs)} are common; "
                "divide the devices anew (areal_jax.cluster.meshes.make_meshes)"
            )
        self.trainer_mesh = trainer_mesh
        self.sampler_mesh = sampler_mesh
        self.specs = specs
        self.dtype = None if dtype is None else jnp.dtype(dtype)
        self.chunk_bytes = chunk_bytes
        self._plan: _Plan | None = None

    def push(self, params: Any, version: int) -> WeightUpdate:
        """Copies ``params`` to the sampler's mesh; returns when they are ready there.

        Args:
          params: tree of arrays on the trainer's mesh, like ``specs``. They are only read.
          version: the policy version that they are.

        Returns:
          The update: new arrays on the sampler's mesh, the seconds from parameters ready here to ready there, and the bytes of one
          copy of them. The first push compiles and takes longer.

        Raises:
          ValueError: shapes or types are not those of the first push.
        """
        jax.block_until_ready(params)
        begin = time.perf_counter()
        plan = self._plan_for(params)
        leaves, structure = jax.tree.flatten(params)
        pushed: list[Any] = [None] * len(leaves)
        for chunk in plan.chunks:
            moved = jax.device_put(chunk.start([leaves[i] for i in chunk.places]), chunk.staged)
            if chunk.finish is not None:
                moved = chunk.finish(moved)
            jax.block_until_ready(moved)
            for place, array in zip(chunk.places, moved, strict=True):
                pushed[place] = array
        return WeightUpdate(version, jax.tree.unflatten(structure, pushed), time.perf_counter() - begin, plan.bytes)

    def _plan_for(self, params: Any) -> _Plan:
        signature = tuple(
            (jax.tree_util.keystr(path, simple=True, separator="/"), tuple(leaf.shape), str(leaf.dtype))
            for path, leaf in jax.tree_util.tree_leaves_with_path(params)
        )
        if self._plan is None:
            self._plan = self._make_plan(params, signature)
        elif signature != self._plan.signature:
            unlike = next(
                (
                    f"'{new[0]}' {new[1]} {new[2]}, before '{old[0]}' {old[1]} {old[2]}"
                    for new, old in zip(signature, self._plan.signature, strict=False)
                    if new != old
                ),
                f"{len(signature)} arrays, before {len(self._plan.signature)}",
            )
            raise ValueError(f"every push must have the first one's names, shapes and types; got {unlike}; make a new WeightPusher for another model")
        return self._plan

    def _make_plan(self, params: Any, signature: tuple[tuple[str, tuple[int, ...], str], ...]) -> _Plan:
        leaves = jax.tree.leaves(params)
        final: list[NamedSharding] = jax.tree.leaves(named_shardings(self.sampler_mesh, self.specs, params))
        types = [self.dtype if self.dtype is not None and jnp.issubdtype(leaf.dtype, jnp.floating) else leaf.dtype for leaf in leaves]
        sizes = [math.prod(leaf.shape) * jnp.dtype(dtype).itemsize for leaf, dtype in zip(leaves, types, strict=True)]
        here, there = staging_meshes(self.trainer_mesh, self.sampler_mesh, {name for sharding in final for name in _axes(sharding)})
        chunks = []
        for places in _divide(sizes, self.chunk_bytes):
            wanted = [final[i] for i in places]
            staged = [NamedSharding(there, sharding.spec) for sharding in wanted]
            sources = [leaves[i] for i in places]
            start = jax.jit(_caster([types[i] for i in places]), out_shardings=[NamedSharding(here, sharding.spec) for sharding in wanted])
            done = all(a.is_equivalent_to(b, leaf.ndim) for a, b, leaf in zip(staged, wanted, sources, strict=True))
            arrived = [jax.ShapeDtypeStruct(leaf.shape, types[i], sharding=s) for i, leaf, s in zip(places, sources, staged, strict=True)]
            chunks.append(
                _Chunk(
                    places,
                    start.lower(sources).compile(),
                    wanted if done else staged,
                    None if done else jax.jit(lambda arrays: arrays, out_shardings=wanted).lower(arrived).compile(),
                )
            )
        return _Plan(signature, chunks, sum(sizes))


def staging_meshes(trainer: Mesh, sampler: Mesh, used: set[str]) -> tuple[Mesh, Mesh]:
    """The two meshes between which stage 2 moves equal shards.

    Both have, for each used axis of the sampler, an axis of that name and size gcd(sampler's size, trainer devices not yet divided). The
    trainer's other devices hold replicas. On the sampler each axis is split in two, major part first: the staged shard of a device
    contains its final one, so that stage 3 is local.

    Args:
      trainer, sampler: the roles' meshes.
      used: names of the sampler's axes over which a parameter is sharded.
    """
    left = trainer.size
    coarse: dict[str, int] = {}
    for name in reversed(sampler.axis_names):
        coarse[name] = math.gcd(sampler.shape[name], left) if name in used else 1
        left //= coarse[name]
    outer = [coarse[name] for name in sampler.axis_names]
    here = _mesh(trainer.devices.reshape(left, *outer), ("replica", *sampler.axis_names))
    split = [part for name in sampler.axis_names for part in (coarse[name], sampler.shape[name] // coarse[name])]
    there = _mesh(sampler.devices.reshape(split), [part for name in sampler.axis_names for part in (name, f"{name}_inner")])
    return here, there


def _mesh(devices: np.ndarray, names: Sequence[str]) -> Mesh:
    return Mesh(devices, tuple(names), axis_types=(AxisType.Auto,) * len(names))


def _axes(sharding: NamedSharding) -> list[str]:
    return [name for part in sharding.spec if part is not None for name in ((part,) if isinstance(part, str) else part)]


def _caster(types: Sequence[Any]) -> Any:
    """Stage 1: always a new buffer (an identity would hand the trainer's own on), in the wanted type."""

    def stage(arrays: Leaves) -> Leaves:
        return [jnp.copy(x) if x.dtype == dtype else x.astype(dtype) for x, dtype in zip(arrays, types, strict=True)]

    return stage


def _divide(sizes: Sequence[int], limit: int) -> list[tuple[int, ...]]:
    """Indices of neighbouring leaves whose sizes sum to at most ``limit``; a larger leaf is alone."""
    chunks: list[tuple[int, ...]] = []
    current: list[int] = []
    total = 0
    for index, size in enumerate(sizes):
        if current and total + size > limit:
            chunks.append(tuple(current))
            current, total = [], 0
        current.append(index)
        total += size
    return [*chunks, tuple(current)] if current else chunks
