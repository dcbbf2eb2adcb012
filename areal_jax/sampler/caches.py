"""Writing keys and values into slots: where new ones go, and how many at once.

Invariants:
* Caches have the layouts of ``state.DecodeState``; rows whose slot is out of range are not written.
* What one program computes or copies beside the caches is bounded by ``PROGRAM_TOKENS``, whatever the number of slots.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from areal_jax.sampler.state import DecodeState, Insertion

PROGRAM_TOKENS = 32768
"""Most tokens that one program prefills, copies into slots at once, or rebuilds for a shard, but for a single longer sequence: it bounds their memory."""


def together(width: int) -> int:
    """Sequences of a width that one program computes, or copies at once."""
    return max(1, PROGRAM_TOKENS // width)


def shared(state: DecodeState, keys: Any, values: Any, new: Insertion) -> DecodeState:
    """The state with each request's row of ``keys`` and ``values`` [rows, ...] at the beginning of its slot's cache.

    A row goes into several slots, and its copies for them are made in parts, one after the other, where they exceed the bound.
    """
    length, entries = keys[0].shape[3], new.slots.shape[0]
    parts = -(-entries // together(length))
    size = -(-entries // parts)
    padding = (0, parts * size - entries)
    rows, slots = (jnp.pad(x, padding, constant_values=fill).reshape(parts, size) for x, fill in ((new.rows, 0), (new.slots, state.slots)))

    def place(part: Any, caches: tuple[Any, Any]) -> tuple[Any, Any]:
        row, slot = rows[part], slots[part]
        return (
            tuple(c.at[slot, :, :, :length].set(k[row], mode="drop") for c, k in zip(caches[0], keys, strict=True)),
            tuple(c.at[slot, :, :length].set(v[row], mode="drop") for c, v in zip(caches[1], values, strict=True)),
        )

    caches = (tuple(state.keys), tuple(state.values))
    written = place(0, caches) if parts == 1 else jax.lax.fori_loop(0, parts, place, caches)
    return dataclasses.replace(state, keys=written[0], values=written[1])


def within_shards(state: DecodeState, keys: Any, values: Any, slots: jax.Array, shards: int) -> DecodeState:
    """The state with row i of ``keys`` and ``values`` in slot ``slots[i]`` of the row's own shard, so that no shard sends its caches to another."""
    length = keys[0].shape[3]

    def by_shard(x: jax.Array) -> jax.Array:
        return x.reshape(shards, -1, *x.shape[1:])

    def placed(cache: jax.Array, new: jax.Array, place: Any) -> jax.Array:
        return jax.vmap(place)(by_shard(cache), by_shard(new), by_shard(slots)).reshape(cache.shape)

    return dataclasses.replace(
        state,
        keys=tuple(placed(c, k, lambda c, k, s: c.at[s, :, :, :length].set(k, mode="drop")) for c, k in zip(state.keys, keys, strict=True)),
        values=tuple(placed(c, v, lambda c, v, s: c.at[s, :, :length].set(v, mode="drop")) for c, v in zip(state.values, values, strict=True)),
    )
