"""A decode step over dense caches, one of a fixed length a slot: what the paged sampler's step is compared with.

Invariants:
* The policy, the sampling and the random keys are the sampler's own; only the cache and its attention differ.
* The caches are allocated at one length for all slots, donated, and written in place; K steps are one program.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from areal_jax.models.architecture import ModelConfig
from areal_jax.models.attention import cached_attention, packed_attention
from areal_jax.models.policy import bind
from areal_jax.sampler.sampling import request_keys, sample, uniforms


@struct.dataclass
class DenseState:
    """Keys [slots, kv_heads, head_dim, length] and values [slots, kv_heads, length, head_dim] a layer; the rest [slots]."""

    keys: Any
    values: Any
    tokens: Any
    positions: Any
    counts: Any
    request_keys: Any


@functools.partial(jax.jit, static_argnums=(0, 4))
def _start(model: ModelConfig, params: Any, prompts: jax.Array, lengths: jax.Array, length: int, names: jax.Array, seed: jax.Array) -> DenseState:
    policy, slots = bind(model, params), jnp.arange(prompts.shape[0])
    keys, values, segments = [], [], jnp.ones_like(prompts)
    room = length - prompts.shape[1]

    def attend(_: int, query: jax.Array, key: jax.Array, value: jax.Array) -> jax.Array:
        keys.append(jnp.pad(key.transpose(0, 2, 3, 1), ((0, 0),) * 3 + ((0, room),)))
        values.append(jnp.pad(value.transpose(0, 2, 1, 3), ((0, 0), (0, 0), (0, room), (0, 0))))
        return packed_attention(query, key, value, segments)

    policy.hidden(prompts, jnp.broadcast_to(jnp.arange(prompts.shape[1]), prompts.shape), attend)
    last = prompts[slots, lengths - 1]
    return DenseState(tuple(keys), tuple(values), last, lengths - 1, jnp.zeros_like(last), request_keys(seed, names[:, 0], names[:, 1]))


def dense_start(model: ModelConfig, params: Any, prompts: list[np.ndarray], length: int, names: list[tuple[int, int]], seed: int) -> DenseState:
    """The state in which every slot holds one prompt.

    Args:
      model: the architecture.
      params: its parameters.
      prompts: int32 [n] each, n at most ``length``.
      length: positions of every cache.
      names: (group_id, sample_index) of each, which name its random stream.
      seed: of the run.
    """
    padded = np.zeros((len(prompts), max(map(len, prompts))), np.int32)
    for row, prompt in enumerate(prompts):
        padded[row, : len(prompt)] = prompt
    sizes = np.asarray([len(prompt) for prompt in prompts], np.int32)
    return _start(model, params, padded, sizes, length, np.asarray(names, np.int32), np.uint32(seed))


@functools.partial(jax.jit, static_argnums=(0, 3, 4), donate_argnums=2)
def dense_decode(model: ModelConfig, params: Any, state: DenseState, steps: int, temperature: float = 1.0) -> tuple[DenseState, jax.Array, jax.Array]:
    """``steps`` decode steps of all slots: (state, tokens int32 [slots, steps], log-probs float32 [slots, steps])."""
    policy, slots = bind(model, params), jnp.arange(state.tokens.shape[0])

    def decode(carry: tuple[Any, ...]) -> tuple[Any, ...]:
        step, state, tokens, logprobs = carry
        keys, values = list(state.keys), list(state.values)

        def attend(layer: int, query: jax.Array, key: jax.Array, value: jax.Array) -> jax.Array:
            keys[layer] = keys[layer].at[slots, :, :, state.positions].set(key)
            values[layer] = values[layer].at[slots, :, state.positions].set(value)
            return cached_attention(query, keys[layer], values[layer], state.positions)

        logits = policy.logits(policy.hidden(state.tokens, state.positions, attend))
        token, logprob = sample(logits, uniforms(state.request_keys, state.counts), temperature, 0, 1.0)
        state = dataclasses.replace(state, keys=tuple(keys), values=tuple(values), tokens=token, positions=state.positions + 1, counts=state.counts + 1)
        return step + 1, state, tokens.at[:, step].set(token), logprobs.at[:, step].set(logprob)

    made = (len(slots), steps)
    carry = (jnp.int32(0), state, jnp.zeros(made, jnp.int32), jnp.zeros(made, jnp.float32))
    _, state, tokens, logprobs = jax.lax.while_loop(lambda c: c[0] < steps, decode, carry)
    return state, tokens, logprobs
