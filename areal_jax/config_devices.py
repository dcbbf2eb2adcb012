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


def mesh_sizes(config: Config, role: str, count: int) -> dict[str, int]:
    """Sizes of all axes of a role's mesh over ``count`` devices; 'data' takes what the named axes leave.

    Raises:
      ConfigError: the axes do not multiply to a divisor of the devices, the sampler has a context axis, or the trainer's does not divide a row.
    """
    sizes = parse_mesh(f"cluster.mesh.{role}", config.cluster.mesh[role])
    product = math.prod(sizes.values())
    if count % product or ("data" in sizes and product != count):
        raise ConfigError(
            f"'cluster.mesh.{role}' must multiply to a divisor of its {count} devices (exactly {count} when data is given); "
            f"got '{config.cluster.mesh[role]}' = {product}"
        )
    context = sizes.get("context", 1)
    if role == "sampler" and context > 1:
        raise ConfigError(f"'cluster.mesh.sampler': a sampler has no context axis (it decodes one token a sequence); got context={context}; use tensor")
    for key in ("trainer.micro_batch_tokens", "sft.row_tokens"):
        if get(config, key) % context:
            raise ConfigError(f"'{key}' must be a multiple of the trainer's context axis = {context}; got {get(config, key)}; or set it to 0")
    return dict.fromkeys(MESH_AXES, 1) | {"data": count // product} | sizes


def check_heads(config: Config, heads: int, whose: str) -> None:
    """Refuses meshes over whose tensor axis the query heads of a policy cannot be divided.

    Raises:
      ConfigError: naming the axis, the heads (``whose``) and the next size that divides them.
    """
    for role in ("trainer", "sampler"):
        tensor = parse_mesh(f"cluster.mesh.{role}", config.cluster.mesh[role]).get("tensor", 1)
        if heads % tensor:
            lower = max(n for n in range(1, tensor) if heads % n == 0)
            raise ConfigError(f"'cluster.mesh.{role}': the tensor axis must divide {whose} = {heads}; got {tensor}; take {lower}")


def row_capacity(config: Config, longest: int) -> int:
    """Positions of a packed row: what the configuration says or, where that is 0, enough for the longest sequence and a multiple of the context axis."""
    step = math.lcm(64, parse_mesh("cluster.mesh.trainer", config.cluster.mesh.trainer).get("context", 1))
    return config.trainer.micro_batch_tokens or -(-max(192, longest) // step) * step


def fewest_pages(longest: int, page_size: int) -> int:
    """The smallest KV cache with which an engine runs: one longest sequence, one page beside it, and the scrap page."""
    return -(-longest // page_size) + 2


def check_pages(config: Config, longest: int) -> None:
    """Refuses a KV cache that cannot hold one sequence of ``longest`` tokens.

    Raises:
      ConfigError: naming the fewest pages.
    """
    fewest = fewest_pages(longest, config.rollout.page_size)
    if 0 < config.rollout.kv_pages < fewest:
        raise ConfigError(
            f"'rollout.kv_pages' must be at least {fewest} for sequences of up to {longest} tokens in pages of {config.rollout.page_size}; "
            f"got {config.rollout.kv_pages}; raise it, or set it to 0"
        )


def check_devices(config: Config, available: int) -> tuple[int, int, bool]:
    """``divide_devices``, with the meshes, rows and slots checked against them.

    Raises:
      ConfigError: more devices are asked for than there are, or a mesh does not fit.
    """
    sampler, trainer, shared = divide_devices(config, available)
    if not config.model.path:
        check_heads(config, config.model.heads, "'model.heads'")
    for role, count, key in (("trainer", trainer, "trainer.micro_batch_rows"), ("sampler", sampler, "rollout.slots")):
        sizes = mesh_sizes(config, role, count)
        shards = sizes["data"] * (sizes["fsdp"] if role == "trainer" else 1)
        if get(config, key) % shards:
            parts = "data-parallel shards" if role == "trainer" else "replicas (its data axis)"
            raise ConfigError(f"'{key}' must be a multiple of the {role}'s {shards} {parts}; got {get(config, key)}")
    return sampler, trainer, shared
