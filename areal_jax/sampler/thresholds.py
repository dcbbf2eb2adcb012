"""The thresholds of top-k and top-p over a large vocabulary, exact and without a sort.

Invariants:
* A threshold is the largest float32 t at which (number | mass) of the values ≥ t reaches the target, so ties with the last kept value are kept.
* It is found by bisection of float32's ordered integer image, which ends when one value is left between the bounds; at most 32 rounds.
* A row's threshold comes of that row and its target alone: a row that is done stays as it is, whatever the others need.
* Counts are exact; a mass is a float32 sum, so which tokens top-p keeps is exact up to that sum's rounding.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp

ROW_BY_ROW = 4096
SUM = 128


def kth_largest(values: jax.Array, maximum: jax.Array, k: jax.Array) -> jax.Array:
    """The k-th largest value of every row.

    Args:
      values: float32 [rows, vocab], no NaN.
      maximum: float32 [rows], the rows' largest values.
      k: int32 [rows], at most vocab; a row with k ≤ 0 keeps all.

    Returns:
      float32 [rows]: a t for which ``values >= t`` are the k largest and what ties with the last of them; −∞ where k ≤ 0.
    """
    lowest = jnp.full_like(maximum, -jnp.inf)
    everything = jnp.full_like(maximum, values.shape[-1])
    target = jnp.where(k > 0, k.astype(jnp.float32), everything)  # a count below 2²⁴ is exact in float32
    return _by_rows(_search_count, values, target, _ordered(lowest), _ordered(maximum) + 1)


def nucleus_weight(weights: jax.Array, top_p: jax.Array) -> jax.Array:
    """The least weight of the smallest set of likeliest tokens whose mass reaches top_p of the row's.

    Args:
      weights: float32 [rows, vocab], from 0 to 1.
      top_p: float32 [rows]; a row with 1 or more keeps all.

    Returns:
      float32 [rows]: a t for which ``weights >= t`` are that set and what ties with the last of it; 0 where top_p ≥ 1.
    """
    zero = jnp.zeros(top_p.shape, jnp.int32)
    return _by_rows(_search_mass, weights, top_p, zero, zero + _ordered(jnp.float32(1.0)) + 1)


def block_maxima(values: jax.Array, width: int) -> tuple[jax.Array, jax.Array]:
    """Largest value of every block of neighbours.

    Args:
      values: [rows, vocab].
      width: entries a block.

    Returns:
      (maxima [rows, blocks], the values as [rows, blocks, width], −∞ behind the last).
    """
    rows, vocab = values.shape
    padded = jnp.pad(values, ((0, 0), (0, -vocab % width)), constant_values=-jnp.inf).reshape(rows, -1, width)
    return padded.max(-1), padded


def _ordered(values: jax.Array) -> jax.Array:
    """float32 to int32 of the same order."""
    bits = jax.lax.bitcast_convert_type(values, jnp.int32)
    return jnp.where(bits < 0, bits ^ 0x7FFFFFFF, bits)


def _value(ordered: jax.Array) -> jax.Array:
    """The float32 whose ordered image this is; 0 for a subnormal, which some devices compare as 0."""
    value = jax.lax.bitcast_convert_type(jnp.where(ordered < 0, ordered ^ 0x7FFFFFFF, ordered), jnp.float32)
    return jnp.where(jnp.abs(value) < jnp.finfo(jnp.float32).tiny, 0.0, value)


def _by_rows(search: Callable[..., jax.Array], values: jax.Array, *arguments: jax.Array) -> jax.Array:
    """A CPU core searches row by row, so that a long row stays in its cache over the rounds; other devices search all rows at once."""
    if values.shape[-1] < ROW_BY_ROW:
        return search(values, *arguments)

    def one_at_a_time(*operands: jax.Array) -> jax.Array:
        return jax.lax.map(lambda row: search(*(x[None] for x in row))[0], operands)

    return jax.lax.platform_dependent(values, *arguments, cpu=one_at_a_time, default=search)


def _search_count(values: jax.Array, target: jax.Array, low: jax.Array, high: jax.Array) -> jax.Array:
    def reached(threshold: jax.Array) -> jax.Array:
        return jnp.sum(jnp.where(values >= threshold[:, None], 1.0, 0.0), -1)

    return _bisect(reached, jnp.full_like(target, values.shape[-1]), jnp.ones_like, target, low, high)


def _search_mass(weights: jax.Array, top_p: jax.Array, low: jax.Array, high: jax.Array) -> jax.Array:
    blocks = jnp.pad(weights, ((0, 0), (0, -weights.shape[-1] % SUM))).reshape(weights.shape[0], -1, SUM)

    def reached(threshold: jax.Array) -> jax.Array:
        return jnp.sum(jnp.sum(jnp.where(blocks >= threshold[:, None, None], blocks, 0.0), -1), -1)  # short sums round less

    total = reached(_value(low))
    return _bisect(reached, total, lambda weight: weight, jnp.where(top_p < 1.0, top_p * total, total), low, high)


def _bisect(
    reached: Callable[[jax.Array], jax.Array],
    total: jax.Array,
    least: Callable[[jax.Array], jax.Array],
    target: jax.Array,
    low: jax.Array,
    high: jax.Array,
) -> jax.Array:
    """Largest threshold that reaches the target; low reaches it, high does not.

    Args:
      reached: what the values ≥ a threshold [rows] add up to.
      total: reached at low.
      least: from a threshold, the least that one value at or above it adds.
      target, low, high: [rows]; low and high in the ordered image.
    """

    def open_rows(low: jax.Array, high: jax.Array, at_low: jax.Array, at_high: jax.Array) -> jax.Array:
        several = at_low - at_high >= 1.5 * least(_value(low))
        return (high - 1 > low) & several & (at_low != target)

    def halve(state: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        low, high, at_low, at_high = state
        middle = (low & high) + ((low ^ high) >> 1)
        at_middle = reached(_value(middle))
        unfinished = open_rows(*state)
        up, down = unfinished & (at_middle >= target), unfinished & (at_middle < target)
        return jnp.where(up, middle, low), jnp.where(down, middle, high), jnp.where(up, at_middle, at_low), jnp.where(down, at_middle, at_high)

    start = (low, high, total, jnp.zeros_like(total))
    return _value(jax.lax.while_loop(lambda state: jnp.any(open_rows(*state)), halve, start)[0])
