"""What the device can do at most, measured in the same process as what is compared with it, and the least time of a piece of work.

Invariants:
* Limits are the best of several tries (what the machine reached once it can do); measured work is compared by its median.
* The floor of a piece of work is max(bytes / read bandwidth, FLOPs / matmul peak): reading and computing overlap perfectly, nothing else costs.
"""

from __future__ import annotations

import dataclasses
import os
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from areal_jax.models.architecture import ModelConfig
from areal_jax.models.layers import precision
from areal_jax.models.work import matrices
from areal_jax.planner.counts import item, kv_bytes_per_token

TRIES = 12
SIZES = {"cpu": (1 << 28, 1536), "gpu": (1 << 32, 8192), "tpu": (1 << 31, 8192)}
"""By platform: bytes of the array that is read, rows and columns of the matrices that are multiplied."""


@dataclasses.dataclass(frozen=True)
class Machine:
    """A device and its measured limits.

    Attributes:
      platform, kind: as JAX names them.
      threads: processor cores this process may use; what computes where the platform is cpu.
      dtype: of the matmul.
      read_bytes_per_s: of reductions over one large array.
      matmul_flops: a second, of one large square product in ``dtype`` on each of the devices that were measured, together.
    """

    platform: str
    kind: str
    threads: int
    dtype: str
    read_bytes_per_s: float
    matmul_flops: float

    def floor_s(self, size: float, flops: float) -> float:
        """Least seconds of work that reads ``size`` bytes and computes ``flops``."""
        return max(size / self.read_bytes_per_s, flops / self.matmul_flops)

    def described(self) -> dict[str, Any]:
        """For a report."""
        return {
            "platform": self.platform,
            "kind": self.kind,
            "threads": self.threads,
            "read_GB_per_s": self.read_bytes_per_s / 1e9,
            f"matmul_{self.dtype}_GFLOP_per_s": self.matmul_flops / 1e9,
            "how": "limits are the best of several tries; everything measured against them is a median",
            "jax": jax.__version__,
        }


def cores() -> int:
    """Processor cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def best_seconds(call: Callable[[], Any], tries: int = TRIES) -> float:
    """Of the fastest of some calls, after one that compiles."""
    jax.block_until_ready(call())
    seconds = []
    for _ in range(tries):
        began = time.perf_counter()
        jax.block_until_ready(call())
        seconds.append(time.perf_counter() - began)
    return min(seconds)


def measure_machine(dtype: str, *, tiny: bool = False, devices: int = 1) -> Machine:
    """Measures the first device; several of them together where they multiply.

    Args:
      dtype: of the products, the policy's compute type.
      tiny: small arrays, for a check that the program works; the limits are then those of the caches.
      devices: that compute one product each at the same time.
    """
    device = jax.devices()[0]
    size, side = SIZES.get(device.platform, SIZES["gpu"])
    if tiny:
        size, side = 1 << 22, 256
    large = jax.jit(lambda: jnp.ones((size // 4096, 1024), jnp.float32))()
    readers = [jax.jit(jnp.sum), jax.jit(lambda x: jnp.sum(x, 0)), jax.jit(lambda x: jnp.sum(x, 1))]
    read = min(best_seconds(lambda reader=reader: reader(large)) for reader in readers)
    bytes_read = large.nbytes
    large.delete()
    kind = jnp.dtype(dtype)
    each = NamedSharding(jax.make_mesh((devices,), ("each",), axis_types=(AxisType.Auto,), devices=jax.devices()[:devices]), P("each"))
    left, right = (jax.device_put(jax.random.normal(jax.random.key(i), (devices, side, side), kind), each) for i in range(2))
    product = jax.jit(lambda a, b: jnp.matmul(a, b, precision=precision(kind)), out_shardings=each)
    flops = devices * 2.0 * side**3 / best_seconds(lambda: product(left, right))
    return Machine(device.platform, device.device_kind, cores(), dtype, bytes_read / read, flops)


def decode_floor_s(machine: Machine, model: ModelConfig, positions: list[int]) -> float:
    """Least seconds of one decode step.

    Bytes: the matrices once, and the keys and values in use. FLOPs: 2 a row and matrix parameter, and 4 · heads · head_dim a layer and position.

    Args:
      machine: measured in the policy's compute type, in which its parameters lie too.
      model: the architecture.
      positions: keys that each row attends to.
    """
    w, held = matrices(model), sum(positions)
    size = (model.layers * w.block + w.head) * item(machine.dtype) + held * kv_bytes_per_token(model)
    flops = len(positions) * 2.0 * (model.layers * w.block_active + w.head) + 4.0 * model.layers * model.heads * model.head_dim * held
    return machine.floor_s(size, flops)


def prefill_floor_s(machine: Machine, model: ModelConfig, lengths: list[int], programs: int = 1) -> float:
    """Least seconds of prefilling prompts whole, without the LM head, in so many programs that read the matrices once each."""
    w = matrices(model)
    tokens, seen = sum(lengths), sum(length * (length + 1) / 2 for length in lengths)
    flops = tokens * 2.0 * model.layers * w.block_active + 4.0 * model.layers * model.heads * model.head_dim * seen
    return machine.floor_s(programs * model.layers * w.block * item(machine.dtype) + tokens * kv_bytes_per_token(model), flops)
