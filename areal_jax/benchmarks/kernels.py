"""``launch/benchmark.py kernels``: every attention path against plain attention in float32, forward and backward, and over pages.

Invariants:
* All paths get the same bfloat16 numbers; the reference computes with them in float32.
* An error is the root of the mean squared difference over that of the reference. What a path may have is said beside it.
* A kernel that this machine lacks is a row with the reason, not an omission.
"""

from __future__ import annotations

import functools
import importlib.util
import statistics
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from areal_jax.benchmarks import flags
from areal_jax.benchmarks.report import deliver
from areal_jax.models import kernels, paged_kernels
from areal_jax.models.attention import cached_attention, plain_attention, segment_starts
from areal_jax.models.blockwise import blockwise_attention
from areal_jax.models.paged import paged_attention

DEFAULTS = {
    "rows": "4",
    "length": "2048",
    "heads": "16",
    "kv-heads": "4",
    "head-dim": "128",
    "slots": "64",
    "page-size": "16",
    "repeats": "5",
    "interpret": "no",
    "out": "",
}
LIMIT = 0.02
"""Of the relative error of bfloat16: its rounding, 2⁻⁹, through scores, weights and sums."""


def main(argv: list[str]) -> int:
    """Compares, prints one table and writes JSON to ``--out``; 1 if an error exceeds its limit."""
    values = flags.parse(argv, DEFAULTS)
    sizes = {name: flags.whole(values, name) for name in ("rows", "length", "heads", "kv-heads", "head-dim", "slots", "page-size", "repeats")}
    [interpret] = flags.chosen(values, "interpret", ("yes", "no"))
    file = flags.output(values)
    kernels.INTERPRET = interpret == "yes"
    device = jax.devices()[0]
    results = {
        "machine": {"platform": device.platform, "kind": device.device_kind, "jax": jax.__version__},
        "packed": packed(sizes, device.platform),
        "paged": paged(sizes, device.platform),
    }
    deliver(f"attention: bfloat16 against float32, {device.device_kind}", results, file)
    checked = [row for part in ("packed", "paged") for row in results[part].values() if "within" in row]
    return 0 if all(row["within"] for row in checked) else 1


def relative_error(ours: Any, wanted: Any) -> float:
    """Of the root mean square, over all of an array or the worst of several."""
    pairs = zip(jax.tree.leaves(ours), jax.tree.leaves(wanted), strict=True)
    errors = [np.linalg.norm(np.asarray(a, np.float64) - np.asarray(b, np.float64)) / np.linalg.norm(np.asarray(b, np.float64)) for a, b in pairs]
    return float(max(errors))


def median_ms(call: Callable[[], Any], repeats: int) -> float:
    """Of calls after the first, which compiles."""
    seconds = []
    for _ in range(repeats + 1):
        began = time.perf_counter()
        jax.block_until_ready(call())
        seconds.append(time.perf_counter() - began)
    return statistics.median(seconds[1:]) * 1e3


def compared(path: Callable[..., Any], inputs: tuple[Any, ...], wanted: Any, repeats: int) -> dict[str, Any]:
    """Errors of a path's output and gradients, and its milliseconds."""

    def forward_backward(*inputs: Any) -> Any:
        output, pull = jax.vjp(path, *inputs[:-1])
        return output, pull(inputs[-1])

    run = jax.jit(forward_backward)
    output, gradients = run(*inputs)
    errors = relative_error(output, wanted[0]), relative_error(gradients, wanted[1])
    return {
        "forward_error": errors[0],
        "backward_error": errors[1],
        "limit": LIMIT,
        "within": max(errors) <= LIMIT,
        "forward_ms": median_ms(functools.partial(jax.jit(path), *inputs[:-1]), repeats),
        "forward_backward_ms": median_ms(functools.partial(run, *inputs), repeats),
    }


def guarded(path: Callable[..., Any] | str, measure: Callable[[Any], dict[str, Any]]) -> dict[str, Any]:
    """What is measured of a path; the reason where it was left out (a text) or failed."""
    if isinstance(path, str):
        return {"skipped": path}
    try:
        return measure(path)
    except Exception as error:  # whatever a kernel fails with on this machine is a finding, and the others are still wanted
        return {"failed": f"{type(error).__name__}: {error}".splitlines()[0][:300], "within": False}


def packed(sizes: dict[str, int], platform: str) -> dict[str, Any]:
    """The training side: causal attention within segments."""
    random = np.random.default_rng(0)
    rows, length, head_dim = sizes["rows"], sizes["length"], sizes["head-dim"]
    heads = (sizes["heads"], sizes["kv-heads"], sizes["kv-heads"], sizes["heads"])
    inputs = tuple(jnp.asarray(random.standard_normal((rows, length, n, head_dim)), jnp.bfloat16) for n in heads)
    segments = jnp.asarray(np.sort(random.integers(1, 5, (rows, length)), 1), jnp.int32)
    starts = segment_starts(segments)

    def splash(query: jax.Array, key: jax.Array, value: jax.Array) -> jax.Array:
        kernel, _ = kernels.splash_kernel(sizes["heads"], length, None, None)
        return kernels.splash_attention(kernel, query, key, value, segments, segments)

    paths: dict[str, Callable[..., Any] | str] = {
        "plain": lambda q, k, v: plain_attention(q, k, v, starts, 0),
        "blockwise": lambda q, k, v: blockwise_attention(q, k, v, starts, 0),
        "tokamax": lambda q, k, v: kernels.tokamax_attention(q, k, v, starts, 0),
        "splash": splash,
    }
    if platform != "gpu":
        paths["tokamax"] = f"tokamax' kernels are for a gpu; the device is a {platform}"
    elif importlib.util.find_spec("tokamax") is None:
        paths["tokamax"] = "tokamax is not installed (extra 'gpu')"
    if platform != "tpu" and not kernels.INTERPRET:
        paths["splash"] = f"splash attention is for a tpu; the device is a {platform} (--interpret=yes runs it by Pallas' interpreter)"

    full = tuple(x.astype(jnp.float32) for x in inputs)

    @jax.jit
    def reference(*inputs: Any) -> Any:
        output, pull = jax.vjp(lambda q, k, v: plain_attention(q, k, v, starts, 0), *inputs[:-1])
        return output, pull(inputs[-1])

    wanted = jax.device_get(reference(*full))
    return {name: guarded(path, lambda run: compared(run, inputs, wanted, sizes["repeats"])) for name, path in paths.items()}


def paged(sizes: dict[str, int], platform: str) -> dict[str, Any]:
    """The sampler's side: one new token a slot over pages of different lengths, against dense caches in float32."""
    random = np.random.default_rng(1)
    slots, length, size, head_dim, kv_heads = (sizes[name] for name in ("slots", "length", "page-size", "head-dim", "kv-heads"))
    pages = -(-length // size)
    tables = jnp.asarray(1 + random.permutation(slots * pages).reshape(slots, pages), jnp.int32)
    shape = (kv_heads, slots * pages + 1, size, head_dim)
    keys, values = (jnp.asarray(random.standard_normal(shape, np.float32), jnp.bfloat16) for _ in range(2))
    query = jnp.asarray(random.standard_normal((slots, sizes["heads"], head_dim)), jnp.bfloat16)
    starts = jnp.asarray(np.sort(random.integers(0, length, slots))[::-1].copy(), jnp.int32)

    def dense(whole: jax.Array) -> jax.Array:
        return whole[:, tables].astype(jnp.float32).reshape(kv_heads, slots, pages * size, head_dim).swapaxes(0, 1)

    wanted = cached_attention(query.astype(jnp.float32), dense(keys).swapaxes(2, 3), dense(values), starts)
    reason = paged_kernels.obstacle(platform, (slots, 1, sizes["heads"], head_dim), size, tables.shape, query.dtype)
    paths: dict[str, Callable[[jax.Array], jax.Array] | str] = {
        "plain": lambda q: paged_attention(q[:, None], keys, values, tables, starts, "plain")[:, 0],
        "kernel": reason or (lambda q: paged_attention(q[:, None], keys, values, tables, starts, "kernel")[:, 0]),
    }
    if reason and kernels.INTERPRET:
        paths["kernel"] = lambda q: paged_kernels.decode("gpu", q, keys, values, tables, starts)
    read = 4.0 * kv_heads * head_dim * float(jnp.sum(starts + 1))

    def row(path: Callable[[jax.Array], jax.Array]) -> dict[str, Any]:
        run = jax.jit(path)
        error = relative_error(run(query), wanted)
        milliseconds = median_ms(lambda: run(query), sizes["repeats"])
        return {"forward_error": error, "limit": LIMIT, "within": error <= LIMIT, "forward_ms": milliseconds, "read_GB_per_s": read / milliseconds / 1e6}

    return {name: guarded(path, row) for name, path in paths.items()}
