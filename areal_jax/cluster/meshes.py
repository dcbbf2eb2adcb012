"""From the configuration to the meshes of trainer and sampler.

Invariants:
* Every mesh has the axes ('data', 'fsdp', 'context', 'tensor'), all of type Auto; an axis that is not asked for has size 1.
* Trainer and sampler have no device in common, except on a host with a single device, which they share.
* The devices of the trainer come first, so that both meshes are contiguous in the order of ``jax.devices()``.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh

from areal_jax.config import ConfigError
from areal_jax.config_devices import MESH_AXES, check_devices, mesh_sizes


@dataclasses.dataclass(frozen=True)
class Meshes:
    """The meshes of a run.

    Attributes:
      trainer: mesh of the training step.
      sampler: mesh of the decode step.
      everyone: mesh of the supervised warm-up, when nothing is sampled: the trainer's other axes, and as much data parallelism
        as the devices of both roles and ``sft.rows`` allow.
      shared: trainer and sampler are the same single device.
    """

    trainer: Mesh
    sampler: Mesh
    everyone: Mesh
    shared: bool

    def describe(self) -> str:
        """One line for people: 'trainer 2 × cpu (fsdp=2), sampler 1 × cpu'."""

        def one(name: str, mesh: Mesh) -> str:
            axes = ", ".join(f"{axis}={size}" for axis, size in mesh.shape.items() if size > 1)
            return f"{name} {mesh.size} × {mesh.devices.flat[0].platform}" + (f" ({axes})" if axes else "")

        return ", ".join((one("trainer", self.trainer), one("sampler", self.sampler))) + (", one device shared" if self.shared else "")


def set_host_devices(config: Any) -> None:
    """Splits a CPU host into ``cluster.host_devices`` devices; on GPU and TPU it changes nothing that is used.

    Call it before anything touches a device.

    Raises:
      ConfigError: the devices exist already and are fewer.
    """
    wanted = config.cluster.host_devices
    try:
        jax.config.update("jax_num_cpu_devices", wanted)
    except RuntimeError as error:
        if jax.default_backend() == "cpu" and len(jax.devices()) < wanted:
            raise ConfigError(
                f"'cluster.host_devices' must be set before JAX's first use; asked for {wanted}, but {len(jax.devices())} exist already; "
                f"start a new process or set JAX_NUM_CPU_DEVICES={wanted}"
            ) from error


def visible_devices(config: Any) -> list[Any]:
    """The devices a run may use: all accelerators, or the first ``cluster.host_devices`` of a CPU host."""
    devices = jax.devices()
    return devices[: config.cluster.host_devices] if devices[0].platform == "cpu" else devices


def make_meshes(config: Any, devices: Sequence[Any] | None = None) -> Meshes:
    """Divides the devices among trainer and sampler.

    Args:
      config: a validated ``ConfigDict``; reads ``cluster``, ``trainer.micro_batch_rows``, ``rollout.slots`` and ``sft.rows``.
      devices: those to divide; default ``visible_devices(config)``.

    Raises:
      ConfigError: the devices are too few, or do not fit the meshes, the slots or the rows.
    """
    devices = visible_devices(config) if devices is None else list(devices)
    sampler_count, trainer_count, shared = check_devices(config, len(devices))
    trainer_devices = devices[:trainer_count]
    sampler_devices = devices[:1] if shared else devices[trainer_count : trainer_count + sampler_count]
    trainer = role_mesh(config, "trainer", trainer_devices)
    sampler = role_mesh(config, "sampler", sampler_devices)
    union = trainer_devices if shared else trainer_devices + sampler_devices
    return Meshes(trainer, sampler, _everyone(config, trainer, union), shared)


def role_mesh(config: Any, role: str, devices: Sequence[Any]) -> Mesh:
    """The mesh that ``cluster.mesh.<role>`` describes, over exactly these devices; 'data' takes what the named axes leave."""
    return build_mesh(devices, **mesh_sizes(config, role, len(devices)))


def build_mesh(devices: Sequence[Any], *, data: int = 1, fsdp: int = 1, context: int = 1, tensor: int = 1) -> Mesh:
    """A mesh with the axes ('data', 'fsdp', 'context', 'tensor') of type Auto.

    Args:
      devices: as many as the product of the sizes, in ``jax.devices()`` order; an accelerator's topology may reorder them inside the mesh.
      data, fsdp: over both of which rows are divided; parameters over fsdp.
      context: over which the positions of a row are divided.
      tensor: over which heads, mlp and vocabulary are divided.
    """
    shape = (data, fsdp, context, tensor)
    if math.prod(shape) != len(devices):
        raise ValueError(f"a mesh of shape {shape} needs {math.prod(shape)} devices; got {len(devices)}")
    kinds = (AxisType.Auto,) * len(MESH_AXES)
    if devices[0].platform == "tpu":
        return jax.make_mesh(shape, MESH_AXES, axis_types=kinds, devices=list(devices))
    return Mesh(np.asarray(devices, dtype=object).reshape(shape), MESH_AXES, axis_types=kinds)


def _everyone(config: Any, trainer: Mesh, devices: Sequence[Any]) -> Mesh:
    """The largest warm-up mesh: a multiple of the trainer's fsdp × context × tensor devices whose data shards divide ``sft.rows``."""
    fsdp, context, tensor = (trainer.shape[axis] for axis in ("fsdp", "context", "tensor"))
    block = fsdp * context * tensor
    for data in range(len(devices) // block, 0, -1):
        if config.sft.rows % (data * fsdp) == 0:
            return build_mesh(devices[: data * block], data=data, fsdp=fsdp, context=context, tensor=tensor)
    raise ConfigError(
        f"'sft.rows' must be a multiple of the trainer's fsdp axis = {fsdp}; got {config.sft.rows}; take a multiple or a smaller fsdp in 'cluster.mesh.trainer'"
    )
