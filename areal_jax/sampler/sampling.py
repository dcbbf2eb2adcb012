"""Drawing a token from logits, with the log-prob of the draw under exactly the distribution it was drawn from.

Invariants:
* Order: temperature, then top-k, then top-p on what top-k kept, then one renormalisation.
* The draw is an inverse CDF of one uniform number: a function of (logits, uniform) alone, never of the batch.
* A token of probability 0 is never drawn.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

BLOCK = 256
REMOVED = -1e30


def filtered_logits(logits: jax.Array, temperature: float, top_k: int, top_p: float) -> jax.Array:
    """Logits [batch, vocab] of the sampling distribution; removed tokens are at −1e30.

    Args:
      temperature: greater than 0.
      top_k: keep so many of the likeliest (ties with the last are kept); 0 keeps all.
      top_p: keep the smallest set of likeliest tokens whose mass reaches top_p; 1 keeps all.
    """
    scaled = logits.astype(jnp.float32) / temperature
    if 0 < top_k < scaled.shape[-1]:
        last = jax.lax.top_k(scaled, top_k)[0][..., -1:]
        scaled = jnp.where(scaled >= last, scaled, REMOVED)
    if top_p < 1.0:
        ordered = jnp.sort(scaled, axis=-1, descending=True)
        mass = jax.nn.softmax(ordered, -1)
        before = jnp.cumsum(mass, -1) - mass
        kept = jnp.sum(before < top_p, -1, keepdims=True)
        last = jnp.take_along_axis(ordered, kept - 1, -1)
        scaled = jnp.where(scaled >= last, scaled, REMOVED)
    return scaled


def inverse_cdf(weights: jax.Array, uniform: jax.Array) -> jax.Array:
    """The index at which the cumulated weights pass uniform · total.

    Two levels, sums of blocks first, so that a large vocabulary costs one pass.

    Args:
      weights: [batch, vocab], not negative, not all 0.
      uniform: [batch] in [0, 1).

    Returns:
      int32 [batch].
    """
    batch, vocab = weights.shape
    blocks = -(-vocab // BLOCK)
    padded = jnp.pad(weights, ((0, 0), (0, blocks * BLOCK - vocab))).reshape(batch, blocks, BLOCK)
    sums = jnp.cumsum(padded.sum(-1), -1)
    threshold = uniform * sums[:, -1]
    block = _first_beyond(sums, padded.sum(-1), threshold)
    inside = jnp.take_along_axis(padded, block[:, None, None], 1)[:, 0]
    before = jnp.where(block > 0, jnp.take_along_axis(sums, jnp.maximum(block - 1, 0)[:, None], 1)[:, 0], 0.0)
    return (block * BLOCK + _first_beyond(jnp.cumsum(inside, -1), inside, threshold - before)).astype(jnp.int32)


def _first_beyond(cumulated: jax.Array, weights: jax.Array, threshold: jax.Array) -> jax.Array:
    """First index that has weight and cumulated > threshold; rounding at the end falls back to the last index with weight.

    A parallel prefix sum may grow, by rounding, at an index of weight 0, so the weight itself is asked too.
    """
    beyond = (cumulated > threshold[:, None]) & (weights > 0)
    last = weights.shape[-1] - 1 - jnp.argmax((weights > 0)[:, ::-1], -1)
    return jnp.where(jnp.any(beyond, -1), jnp.argmax(beyond, -1), last)


def sample(logits: jax.Array, uniform: jax.Array, temperature: float, top_k: int, top_p: float) -> tuple[jax.Array, jax.Array]:
    """Draws a token a row.

    Args:
      logits: [batch, vocab].
      uniform: float32 [batch] in [0, 1).
      temperature: 0 takes the likeliest token, whose log-prob under that distribution is 0.

    Returns:
      (token int32 [batch], log-prob float32 [batch]).
    """
    if temperature == 0.0:
        token = jnp.argmax(logits, -1).astype(jnp.int32)
        return token, jnp.zeros(token.shape, jnp.float32)
    scaled = filtered_logits(logits, temperature, top_k, top_p)
    shifted = jnp.exp(scaled - jnp.max(scaled, -1, keepdims=True))
    token = inverse_cdf(shifted, uniform)
    chosen = jnp.take_along_axis(scaled, token[:, None], -1)[:, 0]
    return token, chosen - jax.nn.logsumexp(scaled, -1)


def request_keys(seed: jax.Array, group_ids: jax.Array, sample_indices: jax.Array) -> jax.Array:
    """Key data uint32 [batch, 2] of requests: a function of (seed, group id, sample index)."""
    base = jax.random.key(seed)
    keys = jax.vmap(lambda g, s: jax.random.fold_in(jax.random.fold_in(base, g), s))(group_ids, sample_indices)
    return jax.random.key_data(keys)


def uniforms(key_data: jax.Array, counts: jax.Array) -> jax.Array:
    """Uniform numbers float32 [batch] for the ``counts``-th token of requests with ``key_data`` [batch, 2]."""
    keys = jax.random.wrap_key_data(key_data)
    return jax.vmap(lambda k, t: jax.random.uniform(jax.random.fold_in(k, t)))(keys, counts)
