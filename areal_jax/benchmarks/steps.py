"""Milliseconds of a decode step with every slot in use: over pages, over dense caches, and at least.

Invariants:
* Both sides hold the same lengths, sample the same number of tokens in dispatches of K steps and bring them to the host.
* They are measured in turn; a step is the median of its side's dispatches.
"""

from __future__ import annotations

import functools
import statistics
import time
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from areal_jax.benchmarks.dense import DenseState, dense_decode
from areal_jax.benchmarks.generation import Subject, paged_step_seconds
from areal_jax.benchmarks.loads import Load
from areal_jax.benchmarks.machine import Machine, decode_floor_s
from areal_jax.models.architecture import ModelConfig

DISPATCHES = 6
"""Full ones of a measurement, at least."""
BUCKET = 64
"""Dense caches are allocated at multiples of so many positions."""


def measured_tokens(steps: int) -> int:
    """Tokens that each slot samples in a measurement."""
    return steps * (DISPATCHES + 2)


def held_lengths(load: Load, slots: int, seed: int) -> list[int]:
    """Lengths of the sequences that a busy sampler holds at a moment: long ones are met in proportion to their length, anywhere in it."""
    random = np.random.default_rng(seed)
    lengths = np.asarray(load.lengths, float)
    met = random.choice(len(lengths), slots, p=lengths / lengths.sum())
    return [len(load.prompts[i]) + int(random.uniform(0.0, lengths[i])) for i in met]


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def _random_caches(model: ModelConfig, slots: int, length: int, key: jax.Array) -> Any:
    keys = jax.random.split(key, 2 * model.layers)
    shapes = (slots, model.kv_heads, model.head_dim, length), (slots, model.kv_heads, length, model.head_dim)
    return tuple(tuple(jax.random.normal(keys[2 * i + part], shape, model.dtype) for i in range(model.layers)) for part, shape in enumerate(shapes))


def dense_state(model: ModelConfig, starts: Sequence[int], length: int, seed: int) -> DenseState:
    """A state with random keys and values, for its speed alone."""
    slots = len(starts)
    tokens, counts = (jnp.zeros(slots, jnp.int32) for _ in range(2))  # each its own: the state is donated
    keys, values = _random_caches(model, slots, length, jax.random.key(seed))
    return DenseState(keys, values, tokens, jnp.asarray(starts, jnp.int32), counts, jnp.zeros((slots, 2), jnp.uint32))


def dense_step_seconds(subject: Subject, params: Any, starts: Sequence[int], tokens: int) -> list[float]:
    """Seconds of decode steps of the dense baseline, as of ``paged_step_seconds``."""
    length = -(-(max(starts) + tokens) // BUCKET) * BUCKET
    seconds = []
    for measured in (False, True):
        state = dense_state(subject.model, starts, length, subject.seed)
        for _ in range(tokens // subject.steps if measured else 1):
            began = time.perf_counter()
            state, made, logprobs = dense_decode(subject.model, params, state, subject.steps)
            jax.device_get((made, logprobs))
            seconds.append((time.perf_counter() - began) / subject.steps)
    return seconds[1:]


def step_times(subject: Subject, machine: Machine, load: Load, lengths: Sequence[int], repeats: int) -> dict[str, Any]:
    """For every cache length, and for the lengths that a busy sampler holds of the load: milliseconds, floor and share.

    Args:
      subject: its sampler.
      machine: measured in the same process.
      load: for the mixed lengths.
      lengths: positions in use when half of the measured steps are done.
      repeats: alternations of the two sides.
    """
    tokens = measured_tokens(subject.steps)
    cases = {f"{length}_positions": [length] * subject.slots for length in lengths}
    cases["lengths_of_the_load"] = held_lengths(load, subject.slots, subject.seed)
    params = subject.engine.load_params(subject.params)
    results: dict[str, Any] = {}
    for name, middle in cases.items():
        starts = [max(1, length - tokens // 2) for length in middle]
        paged, dense = [], []
        for _ in range(repeats):
            paged += paged_step_seconds(subject, starts, tokens)
            dense += dense_step_seconds(subject, params, starts, tokens)
        paged_s, dense_s = statistics.median(paged), statistics.median(dense)
        floor = decode_floor_s(machine, subject.model, [start + tokens // 2 for start in starts])
        results[name] = {
            "paged_ms": paged_s * 1e3,
            "dense_ms": dense_s * 1e3,
            "paged_over_dense": paged_s / dense_s,
            "decode_tokens_per_s": subject.slots / paged_s,
            "floor_ms": floor * 1e3,
            "roofline_share": floor / paged_s,
            "steps_measured": len(paged) * subject.steps,
        }
    return results
