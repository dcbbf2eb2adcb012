"""How a configuration divides devices among sampler and trainer, and over the axes of their meshes.

Invariant: nothing here imports JAX or touches a device; it is about numbers of them.
"""

from __future__ import annotations

import difflib
import math

from areal_jax.config import Config, ConfigError, get

MESH_AXES = ("data", "fsdp", "context", "tensor")


def parse_mesh(key: str, text: str) -> dict[str, int]:
    """'fsdp=2,tensor=2' → sizes by axis; axes that are not named are absent."""
    sizes: dict[str, int] = {}
    for part in filter(None, (p.strip() for p in text.split(","))):
        axis, _, size = part.partition("=")
        if axis not in MESH_AXES:
            near = difflib.get_close_matches(axis, MESH_AXES, n=1) or MESH_AXES
            raise ConfigError(f"'{key}': unknown mesh axis '{axis}'; did you mean '{near[0]}'? Axes are {', '.join(MESH_AXES)}, as in fsdp=2,tensor=2")
        if not size.isdigit() or int(size) < 1:
            raise ConfigError(f"'{key}': the size of axis '{axis}' must be a whole number from 1; got '{size}'")
        sizes[axis] = int(size)
    return sizes


def divide_devices(config: Config, available: int) -> tuple[int, int, bool]:
    """(sampler devices, trainer devices, whether both share one device) of a number of devices.

    Raises:
      ConfigError: more are asked for than there are.
    """
    c = config.cluster
    sampler, trainer = c.sampler_devices, c.trainer_devices
    shared = available == 1 and sampler <= 1 and trainer <= 1
    if shared:
        sampler = trainer = 1
    elif not sampler and not trainer:
        sampler = min(max(1, int(available * c.sampler_share)), available - 1)
        trainer = available - sampler
    else:
        sampler = sampler or max(0, available - trainer)
        trainer = trainer or max(0, available - sampler)
        if sampler + trainer > available or not sampler or not trainer:
            raise ConfigError(
                f"'cluster.sampler_devices' + 'cluster.trainer_devices' must be at most the {available} devices there are, each at least 1; "
                f"got {c.sampler_devices or sampler} + {c.trainer_devices or trainer}; on a CPU raise 'cluster.host_devices'"
            )
    return sampler, trainer, shared


def check_devices(config: Config, available: int) -> tuple[int, int, bool]:
    """``divide_devices``, with the meshes, rows and slots checked against them.

    Raises:
      ConfigError: more devices are asked for than there are, or a mesh does not fit.
    """
    c = config.cluster
    sampler, trainer, shared = divide_devices(config, available)
    for role, count in (("trainer", trainer), ("sampler", sampler)):
        sizes = parse_mesh(f"cluster.mesh.{role}", c.mesh[role])
        product = math.prod(sizes.values())
        if count % product or ("data" in sizes and product != count):
            raise ConfigError(
                f"'cluster.mesh.{role}' must multiply to a divisor of its {count} devices (exactly {count} when data is given); "
                f"got '{c.mesh[role]}' = {product}"
            )
        context, tensor = sizes.get("context", 1), sizes.get("tensor", 1)
        if not config.model.path and config.model.heads % tensor:
            raise ConfigError(f"'cluster.mesh.{role}': the tensor axis must divide 'model.heads' = {config.model.heads}; got {tensor}")
        shards = count // (context * tensor)
        if role == "trainer":
            if (config.trainer.micro_batch_rows or shards) % shards:
                raise ConfigError(
                    f"'trainer.micro_batch_rows' must be a multiple of the trainer's {shards} data-parallel shards; got {config.trainer.micro_batch_rows}"
                )
            for key in ("trainer.micro_batch_tokens", "sft.row_tokens"):
                if get(config, key) % context:
                    raise ConfigError(f"'{key}' must be a multiple of the trainer's context axis = {context}; got {get(config, key)}; or set it to 0")
        elif context > 1:
            raise ConfigError(f"'cluster.mesh.sampler': a sampler has no context axis (it decodes one token a sequence); got context={context}; use tensor")
        elif config.rollout.slots % shards:
            raise ConfigError(f"'rollout.slots' must be a multiple of the sampler's {shards} data-parallel shards; got {config.rollout.slots}")
    return sampler, trainer, shared
