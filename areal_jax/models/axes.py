"""From logical axes of parameters and activations to mesh axes.

Invariant: an axis of a mesh is named here and nowhere else but where it is computed with; an axis that does not divide its dimension is left out.
"""

from __future__ import annotations

import math
from typing import Any

import jax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

MESH_RULES: dict[str, Any] = {
    "vocab": "tensor",
    "heads": "tensor",
    "kv_heads": "tensor",
    "mlp": "tensor",
    "hidden": "fsdp",
    "experts": None,
    "norm": None,
    "rank": None,
    "batch": ("data", "fsdp"),
    "length": "context",
    "slots": ("data", "fsdp"),
}


def logical_to_mesh(*axes: str | None) -> P:
    """The partition spec of logical axes; None is replicated."""
    return P(*(None if axis is None else MESH_RULES[axis] for axis in axes))


def names_of(part: Any) -> tuple[str, ...]:
    """The mesh axes of one part of a partition spec."""
    return part if isinstance(part, tuple) else (part,) if part else ()


def fitting(mesh: Mesh, spec: P, shape: tuple[int, ...]) -> P:
    """The spec for an array of a shape; an axis that does not divide its dimension is replicated instead."""
    parts = tuple(spec) + (None,) * (len(shape) - len(spec))
    fits = (size % math.prod(mesh.shape[name] for name in names_of(part)) == 0 for size, part in zip(shape, parts, strict=True))
    return P(*(part if fit else None for part, fit in zip(parts, fits, strict=True)))


def divided(mesh: Mesh | None) -> bool:
    """Whether there is more than one device to divide anything among."""
    return mesh is not None and mesh.size > 1


def platform_of(mesh: Mesh | None) -> str:
    """The platform of a mesh's devices; of None, the default one."""
    return jax.default_backend() if mesh is None else mesh.devices.flat[0].platform
