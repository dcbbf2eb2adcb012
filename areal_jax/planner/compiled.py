"""The run's own programs, lowered and compiled for devices that are not here: what the compiler says of their memory and communication.

Invariants:
* The programs are those that training and sampling run (``trainer.programs``, ``sampler.engine``), lowered from shapes; no array is made.
* On virtual CPU devices the division among devices and the collectives are the real ones. Memory is that of the CPU's compiler, which widens bfloat16
  products to float32, the sampler's whole cache with them: exact for float32, an upper estimate for bfloat16.
* Unrolled programs of many equal blocks are compiled with a few of them: all figures are linear in their number.
* With ``libtpu`` TPU topologies are compiled by the TPU's own compiler instead, whose memory figures are the chip's.
* Shards of the data axis run the same program: where they are left out, the group sizes of their collectives are smaller and nothing else changes.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import os
import re
import time
from collections.abc import Sequence
from typing import Any

import jax

from areal_jax.cluster.meshes import build_mesh
from areal_jax.config import ConfigError, put
from areal_jax.planner.collectives import Communication, read_collectives
from areal_jax.planner.setup import Axes, Setup, train_state
from areal_jax.sampler.engine import SamplerEngine
from areal_jax.sampler.settings import engine_settings
from areal_jax.trainer.programs import train_programs

SILENT = Communication((), 0)
UNROLLED = 8
"""Most blocks of a sampler's program that are compiled as they are: it is unrolled, and the compiler's time grows with them."""
SAMPLED_LAYERS = (2, 4)
"""Of a deeper policy's sampler, these numbers of blocks are compiled, and the figures extrapolated."""


@dataclasses.dataclass(frozen=True)
class Program:
    """One compiled program.

    Attributes:
      name: what it does.
      axes: of the mesh that it was compiled for.
      target: whose compiler.
      seconds: of lowering and compiling.
      argument, output, alias, temporary: bytes of a device; ``alias`` is counted in both argument and output.
      communication: of one run; None where this host's JAX cannot read the target's program.
      refusal: why it did not compile, else empty; the figures are then 0.
      layers: numbers of blocks that were compiled, where the figures are extrapolated from them; else empty.
    """

    name: str
    axes: Axes
    target: str
    seconds: float
    argument: int = 0
    output: int = 0
    alias: int = 0
    temporary: int = 0
    communication: Communication | None = SILENT
    refusal: str = ""
    layers: tuple[int, ...] = ()

    @property
    def total(self) -> int:
        """Bytes of a device while the program runs."""
        return self.argument + self.output + self.temporary - self.alias


def virtual_devices(count: int) -> None:
    """Gives this host so many CPU devices; before JAX's first use."""
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", count)


def target_devices(setup: Setup, axes: Axes, libtpu: bool) -> tuple[Sequence[Any], Axes, str]:
    """(devices, axes, target) to compile a role's programs for.

    With ``libtpu`` TPU chips are described by it; a role that is no whole slice is then
    compiled with fewer shards of the data axis.
    """
    chip = setup.topology.chip
    if libtpu:
        if not chip.dimensions or importlib.util.find_spec("libtpu") is None:
            raise ConfigError(f"'--compile=libtpu' needs a TPU topology and the package libtpu; got {setup.topology.name}; say --compile=yes")
        from jax.experimental import topologies

        os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
        os.environ.setdefault("TPU_WORKER_HOSTNAMES", "localhost")
        fixed = axes.devices // axes.data
        data = next((d for d in range(axes.data, 0, -1) if (d * fixed) & (d * fixed - 1) == 0), 0)
        if data * fixed < 4:
            raise ConfigError(
                f"'--compile=libtpu' describes slices of 4, 8, 16, … chips; a role with mesh {axes} ({axes.devices} devices) has no such part; "
                "say --compile=yes, or plan for a larger slice"
            )
        described = topologies.get_topology_desc(f"{chip.name}:{_slice(data * fixed, chip.dimensions)}", platform="tpu")
        return described.devices, dataclasses.replace(axes, data=data), f"{chip.name} (libtpu)"
    return jax.devices("cpu")[: axes.devices], axes, "virtual CPU devices"


def compile_trainer(setup: Setup, names: Sequence[str] = ("accumulate", "apply"), libtpu: bool = False) -> list[Program]:
    """The named programs of the training step."""
    devices, axes, target = target_devices(setup, setup.trainer, libtpu)
    mesh = build_mesh(devices, **dataclasses.asdict(axes))
    setup = without_kernels(dataclasses.replace(setup, trainer=axes), target)
    here, optimizer, state, frozen = train_state(setup, mesh)
    started = time.monotonic()
    lowered = train_programs(setup.config, setup.model, here, optimizer, state, frozen, (setup.rows * axes.shards,))
    spent = time.monotonic() - started
    by_name = {key if isinstance(key, str) else key[0]: program for key, program in lowered.items()}
    programs = []
    for name in names:
        programs.append(_compiled(name, axes, target, by_name[name], spent))
        spent = 0.0
    return programs


def planned_engine(setup: Setup, mesh: Any) -> SamplerEngine:
    """One replica's engine as a run builds it, over a mesh of devices that need not be here."""
    return SamplerEngine(setup.model, mesh, slots=setup.slots, max_length=setup.longest, **engine_settings(setup.config))


def compile_sampler(setup: Setup, names: Sequence[str] = ("decode", "prefill"), libtpu: bool = False, unrolled: int = UNROLLED) -> list[Program]:
    """One replica's decoding of all slots and its largest prefill, which also rebuilds caches after an update; extrapolated beyond ``unrolled`` blocks.

    The TPU's compiler needs several chips: there the replicas of a mesh run the same program, each a whole one.
    """
    devices, axes, target = target_devices(setup, setup.sampler if libtpu else setup.replica, libtpu)
    setup, mesh = without_kernels(setup, target), build_mesh(devices, **dataclasses.asdict(axes))
    whole = setup.model.layers
    if whole <= unrolled:
        return [_sampling(setup, mesh, axes, target, name) for name in names]
    few, more = ([_sampling(with_layers(setup, layers), mesh, axes, target, name) for name in names] for layers in SAMPLED_LAYERS)
    return [extrapolated(one, other, whole) for one, other in zip(few, more, strict=True)]


def _sampling(setup: Setup, mesh: Any, axes: Axes, target: str, name: str) -> Program:
    engine, started = planned_engine(setup, mesh), time.monotonic()
    lowered = {"decode": engine.lower_decode, "prefill": engine.lower_prefill}[name]()
    return _compiled(name, axes, target, lowered, time.monotonic() - started)


def with_layers(setup: Setup, layers: int) -> Setup:
    """The setup of the same policy with so many blocks."""
    return dataclasses.replace(setup, model=dataclasses.replace(setup.model, layers=layers))


def extrapolated(few: Program, more: Program, layers: int) -> Program:
    """A program of ``layers`` equal unrolled blocks, on the line through those of ``SAMPLED_LAYERS``."""
    if few.refusal or more.refusal:
        return dataclasses.replace(more, seconds=few.seconds + more.seconds)
    first, second = SAMPLED_LAYERS

    def line(a: float, b: float) -> float:
        return a + (b - a) / (second - first) * (layers - first)

    sizes = {name: int(line(getattr(few, name), getattr(more, name))) for name in ("argument", "output", "alias", "temporary")}
    sends = more.communication
    if few.communication is not None and sends is not None:
        before = {(c.kind, c.group): c for c in few.communication.collectives}
        joined = []
        for c in sends.collectives:
            old = before.get((c.kind, c.group), c)
            joined.append(dataclasses.replace(c, count=round(line(old.count, c.count)), sent=line(old.sent, c.sent)))
        sends = dataclasses.replace(sends, collectives=tuple(joined))
    return dataclasses.replace(more, seconds=few.seconds + more.seconds, communication=sends, layers=SAMPLED_LAYERS, **sizes)


def without_kernels(setup: Setup, target: str) -> Setup:
    """The setup with attention that the CPU's compiler can compile."""
    if setup.config.model.attention != "kernel" or "CPU" not in target:
        return setup
    config = setup.config.copy_and_resolve_references()
    put(config, "model.attention", "blockwise")
    return dataclasses.replace(setup, config=config)


def _compiled(name: str, axes: Axes, target: str, lowered: jax.stages.Lowered, spent: float) -> Program:
    started = time.monotonic()
    try:
        compiled = lowered.compile()
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        needed = re.search(r"[^.:]*exceeds available HBM[^.]*\.?[0-9]*G?\)?", str(error))
        return Program(name, axes, target, spent + time.monotonic() - started, refusal=needed[0].strip() if needed else str(error).splitlines()[0])
    memory = compiled.memory_analysis()
    if memory is None:
        raise ConfigError(f"'--compile=yes' needs a compiler that tells a program's memory; that of {target} does not; say --compile=no")
    return Program(
        name,
        axes,
        target,
        spent + time.monotonic() - started,
        memory.argument_size_in_bytes,
        memory.output_size_in_bytes,
        memory.alias_size_in_bytes,
        memory.temp_size_in_bytes,
        _communication(compiled),
    )


def _communication(compiled: jax.stages.Compiled) -> Communication | None:
    try:
        text = compiled.as_text()
    except jax.errors.JaxRuntimeError as error:  # libtpu's programs may hold operations that jaxlib's reader does not know
        if "RET_CHECK" not in str(error):
            raise
        return None
    return None if text is None else read_collectives(text)


def _slice(devices: int, dimensions: int) -> str:
    """Sides of a slice, powers of two, as in '8x16'."""
    sides = [1] * dimensions
    while devices > 1:
        sides[sides.index(min(sides))] *= 2
        devices //= 2
    return "x".join(str(side) for side in sorted(sides))
