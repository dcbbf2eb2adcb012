"""Milliseconds of a decode step with every slot in use: over pages, over dense caches, and at least.

Invariants:
* Both sides hold the same lengths and random keys and values, decode in dispatches of K steps, enqueue a dispatch before they fetch the tokens
  of the one before, and count the time from fetch to fetch.
* They are measured in turn; a step is the median of its side's dispatches.
"""

from __future__ import annotations

import dataclasses
import functools
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from areal_jax.benchmarks.dense import DenseState, dense_decode
from areal_jax.benchmarks.generation import Subject
from areal_jax.benchmarks.loads import Load
from areal_jax.benchmarks.machine import Machine, decode_floor_s
from areal_jax.models.architecture import ModelConfig
from areal_jax.sampler.engine import SamplerEngine
from areal_jax.sampler.state import DecodeState, Insertion

DISPATCHES = 8
"""Of a measurement; the first is not counted."""
BUCKET = 64
"""Dense caches are allocated at multiples of so many positions."""


def measured_tokens(steps: int) -> int:
    """Tokens that each slot samples in a measurement."""
    return steps * DISPATCHES


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


def paged_state(engine: SamplerEngine, starts: Sequence[int], tokens: int, seed: int) -> tuple[DecodeState, np.ndarray]:
    """(state, tables) with all slots live, random keys and values, and pages for ``tokens`` more of each, scattered over the cache."""
    slots, size = engine.max_concurrent_decodes, engine.page_size
    pages = iter(1 + np.random.default_rng(seed).permutation(engine.pages - 1))
    tables = np.zeros((slots, engine.sequence_pages), np.int32)
    for row, start in enumerate(starts):
        for column in range(-(-(start + tokens) // size)):
            tables[row, column] = next(pages)
    state = engine.new_state()
    normal = jax.jit(lambda key: jax.random.normal(key, state.keys[0].shape, state.keys[0].dtype), out_shardings=engine.state_shardings.keys[0])
    numbers = iter(range(2 * engine.model.layers))
    keys, values = (tuple(normal(jax.random.key(next(numbers))) for _ in state.keys) for _ in range(2))
    whole, ones = np.zeros(slots, np.int32), np.ones(slots, np.float32)
    names = np.stack([np.arange(slots), np.zeros(slots)], 1).astype(np.uint32)
    insertion = Insertion(np.arange(slots, dtype=np.int32), whole + 2, np.asarray(starts, np.int32), whole, whole + 2 * tokens, names, ones, whole, ones)
    return engine.enter(dataclasses.replace(state, keys=keys, values=values), insertion, seed), tables


def arrivals(dispatch: Callable[[], Any], fetch: Callable[[Any], Any], steps: int) -> Iterator[float]:
    """Seconds a step, dispatch by dispatch; the next one is enqueued before the last one's tokens are fetched."""
    on_the_way, last = dispatch(), 0.0
    for number in range(DISPATCHES):
        more = dispatch() if number < DISPATCHES - 1 else None
        fetch(on_the_way)
        now = time.perf_counter()
        if number:
            yield (now - last) / steps
        on_the_way, last = more, now


def paged_step_seconds(subject: Subject, params: Any, starts: Sequence[int], tokens: int) -> list[float]:
    """Seconds of decode steps of the engine with every slot in use, for ``DISPATCHES`` dispatches from these lengths on."""
    engine = subject.engine
    state, tables = paged_state(engine, starts, tokens, subject.seed)
    rows = np.argsort(-np.asarray(starts), kind="stable").astype(np.int32)  # the driver's order, longest first
    tables = tables[rows]

    def dispatch() -> Any:
        nonlocal state
        state, chunk = engine.decode(params, state, rows, tables)
        return chunk

    return list(arrivals(dispatch, lambda chunk: chunk.unpack(), subject.steps))


def dense_step_seconds(subject: Subject, params: Any, starts: Sequence[int], tokens: int) -> list[float]:
    """Seconds of decode steps of the dense baseline, likewise."""
    length = -(-(max(starts) + tokens) // BUCKET) * BUCKET
    state = dense_state(subject.model, starts, length, subject.seed)

    def dispatch() -> Any:
        nonlocal state
        state, made, logprobs = dense_decode(subject.model, params, state, subject.steps)
        return made, logprobs

    return list(arrivals(dispatch, jax.device_get, subject.steps))


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
        paged_step_seconds(subject, params, starts, tokens)
        dense_step_seconds(subject, params, starts, tokens)
        for _ in range(repeats):
            paged += paged_step_seconds(subject, params, starts, tokens)
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
            "dense_roofline_share": floor / dense_s,
            "steps_measured": len(paged) * subject.steps,
        }
    return results
