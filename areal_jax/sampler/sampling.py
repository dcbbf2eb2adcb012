"""Drawing a token from logits, with the log-prob of the draw under exactly the distribution it was drawn from.

Invariants:
* Order: temperature, then top-k, then top-p on what top-k kept, then one renormalisation. Ties with the last kept token are kept.
* The draw is an inverse CDF of one uniform number: what the other rows hold and ask for never enters it. A batch of another size is another program, which
  may add in another order: log-probs then agree to float32's rounding, and tokens except where the uniform (or top_p) lies within it of a step.
* A token of probability 0 is never drawn.
* Nothing is sorted: a filter is a threshold, and a threshold is found by bisection (``thresholds.py``).
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from areal_jax.sampler.thresholds import block_maxima, kth_largest, nucleus_weight

BLOCK = 128
LEADERS = 64


def inverse_cdf(weights: jax.Array, uniform: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The index at which the cumulated weights pass uniform · total.

    Two levels, sums of blocks first, so that a large vocabulary costs one pass.

    Args:
      weights: float32 [rows, vocab], not negative, not all 0.
      uniform: [rows] in [0, 1).

    Returns:
      (index int32 [rows], total of the weights float32 [rows]).
    """
    weights = jax.lax.optimization_barrier(weights)  # written once and read by plain sums: no producer decides their order
    rows, vocab = weights.shape
    if vocab <= BLOCK:
        sums = jnp.cumsum(weights, -1)
        return _first_beyond(sums, weights, uniform * sums[:, -1]).astype(jnp.int32), sums[:, -1]
    padded = jnp.pad(weights, ((0, 0), (0, -vocab % BLOCK))).reshape(rows, -1, BLOCK)
    mass = padded.sum(-1)
    sums = jnp.cumsum(mass, -1)
    threshold = uniform * sums[:, -1]
    block = _first_beyond(sums, mass, threshold)
    inside = jnp.take_along_axis(padded, block[:, None, None], 1)[:, 0]
    before = jnp.where(block > 0, jnp.take_along_axis(sums, jnp.maximum(block - 1, 0)[:, None], 1)[:, 0], 0.0)
    return (block * BLOCK + _first_beyond(jnp.cumsum(inside, -1), inside, threshold - before)).astype(jnp.int32), sums[:, -1]


def _first_beyond(cumulated: jax.Array, weights: jax.Array, threshold: jax.Array) -> jax.Array:
    """First index that has weight and cumulated > threshold; rounding at the end falls back to the last index with weight.

    A parallel prefix sum may grow, by rounding, at an index of weight 0, so the weight itself is asked too.
    """
    beyond = (cumulated > threshold[:, None]) & (weights > 0)
    last = weights.shape[-1] - 1 - jnp.argmax((weights > 0)[:, ::-1], -1)
    return jnp.where(jnp.any(beyond, -1), jnp.argmax(beyond, -1), last)


def _greedy(logits: jax.Array) -> jax.Array:
    """The first of the likeliest tokens, int32 [rows]: the block of the maximum, then the place in it (a plain argmax is not vectorised on CPUs)."""
    maxima, padded = block_maxima(logits, BLOCK)
    block = jnp.argmax(maxima, -1)
    inside = jnp.take_along_axis(padded, block[:, None, None], 1)[:, 0]
    return (block * BLOCK + jnp.argmax(inside, -1)).astype(jnp.int32)


def _maximum(logits: jax.Array) -> jax.Array:
    return jnp.max(block_maxima(logits, BLOCK)[0], -1)


def _nucleus(weights: jax.Array, top_p: jax.Array) -> jax.Array:
    """The weights [rows, vocab] with those outside the row's nucleus at 0."""
    weights = jax.lax.optimization_barrier(weights)
    return jnp.where(weights >= nucleus_weight(weights, top_p)[:, None], weights, 0.0)


def _chosen(values: jax.Array, token: jax.Array) -> jax.Array:
    return jnp.take_along_axis(values, token[:, None], -1)[:, 0]


def sample(logits: jax.Array, uniform: jax.Array, temperature: float, top_k: int, top_p: float) -> tuple[jax.Array, jax.Array]:
    """Draws a token a row, all rows with the same parameters, which are part of the program.

    Args:
      logits: [rows, vocab].
      uniform: float32 [rows] in [0, 1).
      temperature: 0 takes the likeliest token, whose log-prob under that distribution is 0.
      top_k: keep so many of the likeliest (ties with the last are kept); 0 keeps all.
      top_p: keep the smallest set of likeliest tokens whose mass reaches top_p; 1 keeps all.

    Returns:
      (token int32 [rows], log-prob float32 [rows]).
    """
    if temperature == 0.0:
        token = _greedy(logits)
        return token, jnp.zeros(token.shape, jnp.float32)
    logits = logits.astype(jnp.float32)
    maximum = _maximum(logits)
    inverse = np.float32(1.0) / np.float32(temperature)
    weights = jnp.exp((logits - maximum[:, None]) * inverse)
    if 0 < top_k < logits.shape[-1]:
        last = kth_largest(logits, maximum, jnp.full(maximum.shape, top_k))
        weights = jnp.where(logits >= last[:, None], weights, 0.0)
    if top_p < 1.0:
        weights = _nucleus(weights, jnp.full(maximum.shape, top_p, jnp.float32))
    token, total = inverse_cdf(weights, uniform)
    return token, (_chosen(logits, token) - maximum) * inverse - jnp.log(total)


def sample_rows(logits: jax.Array, uniform: jax.Array, temperature: jax.Array, top_k: jax.Array, top_p: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Draws a token a row, each row with its own parameters; a filter that no row asks for is not computed.

    Args:
      logits: [rows, vocab].
      uniform: float32 [rows] in [0, 1).
      temperature: float32 [rows]; 0 takes the row's likeliest token, whose log-prob under that distribution is 0.
      top_k: int32 [rows]; 0 keeps all.
      top_p: float32 [rows]; 1 keeps all.

    Returns:
      (token int32 [rows], log-prob float32 [rows]): for a row what ``sample`` returns with the row's parameters.
    """
    logits = logits.astype(jnp.float32)
    maximum = _maximum(logits)
    greedy = temperature == 0.0
    inverse = 1.0 / jnp.where(greedy, 1.0, temperature)
    wanted = jnp.where(greedy | (top_k >= logits.shape[-1]), 0, top_k)
    least = jax.lax.cond(jnp.any(wanted > 0), kth_largest, lambda _, m, k: jnp.full_like(m, -jnp.inf), logits, maximum, wanted)
    least = jnp.where(greedy, maximum, least)
    mass = jnp.where(greedy, 1.0, top_p)
    kept = logits >= least[:, None]
    weights = jnp.where(kept, jnp.exp((logits - maximum[:, None]) * inverse[:, None]), 0.0)
    # a loop of one round or none: unlike cond's untaken branch, no round copies nothing
    _, weights = jax.lax.while_loop(lambda state: state[0], lambda state: (jnp.zeros((), bool), _nucleus(state[1], mass)), (jnp.any(mass < 1.0), weights))
    # the first of the likeliest tokens is the draw of 0 from those equal to the maximum
    token, total = inverse_cdf(weights, jnp.where(greedy, 0.0, uniform))
    logprob = (_chosen(logits, token) - maximum) * inverse - jnp.log(total)
    return token, jnp.where(greedy, 0.0, logprob)


def raw_logprobs(logits: jax.Array, tokens: jax.Array, count: int) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Log-probs under temperature 1 and no filter: of the chosen tokens, and of the likeliest.

    Args:
      logits: [rows, vocab].
      tokens: int32 [rows].
      count: how many of the likeliest, 0 to vocab.

    Returns:
      (chosen's log-prob float32 [rows], ids int32 [rows, count], their log-probs float32 [rows, count]); likeliest first, of equal ones the lower id.
    """
    if not 0 <= count <= logits.shape[-1]:
        raise ValueError(f"count of likeliest tokens must be from 0 to the vocabulary's {logits.shape[-1]}; got {count}: ask for fewer")
    logits = logits.astype(jnp.float32)
    maximum = _maximum(logits)
    total = _block_sums(jax.lax.optimization_barrier(jnp.exp(logits - maximum[:, None]))).sum(-1)
    normaliser = maximum + jnp.log(total)
    ids, values = _likeliest(logits, count)
    return _chosen(logits, tokens) - normaliser, ids, values - normaliser[:, None]


def _block_sums(weights: jax.Array) -> jax.Array:
    return jnp.pad(weights, ((0, 0), (0, -weights.shape[-1] % BLOCK))).reshape(weights.shape[0], -1, BLOCK).sum(-1)


def _likeliest(logits: jax.Array, count: int) -> tuple[jax.Array, jax.Array]:
    """Ids int32 and logits [rows, count] of the largest, descending, of equal ones the lower id.

    They lie in the ``count`` blocks of largest maxima: each of these holds a value at least as large as any outside, and of equal maxima ``top_k`` takes the
    lower block. The blocks are searched in order of ids.
    """
    maxima, padded = block_maxima(jnp.where(logits == 0.0, 0.0, logits), LEADERS)  # top_k orders −0 below 0
    blocks = jnp.sort(jax.lax.top_k(maxima, min(count, maxima.shape[-1]))[1], -1)
    candidates = jnp.take_along_axis(padded, blocks[:, :, None], 1)
    values, places = jax.lax.top_k(candidates.reshape(logits.shape[0], -1), count)
    return jnp.take_along_axis(blocks, places // LEADERS, -1) * LEADERS + places % LEADERS, values


def request_keys(seed: jax.Array, group_ids: jax.Array, sample_indices: jax.Array) -> jax.Array:
    """Key data uint32 [batch, 2] of requests: a function of (seed, group id, sample index)."""
    base = jax.random.key(seed)
    keys = jax.vmap(lambda g, s: jax.random.fold_in(jax.random.fold_in(base, g), s))(group_ids, sample_indices)
    return jax.random.key_data(keys)


def uniforms(key_data: jax.Array, counts: jax.Array) -> jax.Array:
    """Uniform numbers float32 [batch] for the ``counts``-th token of requests with ``key_data`` [batch, 2]."""
    keys = jax.random.wrap_key_data(key_data)
    return jax.vmap(lambda k, t: jax.random.uniform(jax.random.fold_in(k, t)))(keys, counts)
