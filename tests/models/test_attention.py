"""Packed and cached attention against loops in float64."""

import jax.numpy as jnp
import numpy as np
import pytest

from areal_jax.models.attention import cached_attention, packed_attention


def reference(query, key, value, visible):
    """[rows, length, heads, head_dim] by loops; ``visible(row, query, key)`` says what is seen."""
    rows, length, heads, dim = query.shape
    group = heads // key.shape[2]
    out = np.zeros(query.shape)
    for r in range(rows):
        for h in range(heads):
            for q in range(length):
                seen = [k for k in range(key.shape[1]) if visible(r, q, k)]
                scores = np.array([query[r, q, h] @ key[r, k, h // group] for k in seen]) / dim**0.5
                weights = np.exp(scores - scores.max())
                out[r, q, h] = (weights / weights.sum()) @ value[r, seen, h // group]
    return out


def random_heads(*shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 2), (4, 1), (3, 3), (6, 2)])
def test_packed_attention_is_causal_within_segments(heads, kv_heads):
    query = 3 * random_heads(2, 9, heads, 4, seed=1)
    key, value = random_heads(2, 9, kv_heads, 4, seed=2), random_heads(2, 9, kv_heads, 4, seed=3)
    segments = np.array([[1, 1, 1, 2, 2, 2, 2, 0, 0], [0, 5, 5, 5, 5, 5, 5, 5, 7]])
    ours = packed_attention(jnp.asarray(query), jnp.asarray(key), jnp.asarray(value), jnp.asarray(segments))
    theirs = reference(query.astype(np.float64), key, value, lambda r, q, k: k <= q and segments[r, q] == segments[r, k])
    np.testing.assert_allclose(np.asarray(ours), theirs, atol=1e-5)


@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 2), (4, 1), (3, 3)])
def test_cached_attention_sees_the_places_up_to_the_new_token(heads, kv_heads):
    slots, length, dim = 5, 8, 4
    query = 3 * random_heads(slots, heads, dim, seed=1)
    key, value = random_heads(slots, length, kv_heads, dim, seed=2), random_heads(slots, length, kv_heads, dim, seed=3)
    positions = np.array([0, 1, 4, 6, 7])
    ours = cached_attention(jnp.asarray(query), jnp.asarray(key.transpose(0, 2, 3, 1)), jnp.asarray(value.transpose(0, 2, 1, 3)), jnp.asarray(positions))
    theirs = reference(query[:, None].astype(np.float64), key, value, lambda r, q, k: k <= positions[r])[:, 0]
    np.testing.assert_allclose(np.asarray(ours), theirs, atol=1e-5)
    junk = key.copy()
    for slot, position in enumerate(positions):
        junk[slot, position + 1 :] = 1e6
    again = cached_attention(jnp.asarray(query), jnp.asarray(junk.transpose(0, 2, 3, 1)), jnp.asarray(value.transpose(0, 2, 1, 3)), jnp.asarray(positions))
    np.testing.assert_array_equal(np.asarray(again), np.asarray(ours))


def test_bfloat16_attention_scores_are_float32():
    """Two keys that are equal in bfloat16 products' rounding but not in float32 must get different weights."""
    query = jnp.full((1, 2, 1, 2), 16.0, jnp.bfloat16)
    key = jnp.asarray([[[[16.0, 0.0]], [[16.0, 0.0625]]]], jnp.bfloat16)  # scores 256 and 257, next bfloat16 after 256 is 258
    value = jnp.asarray([[[[1.0, 0.0]], [[0.0, 1.0]]]], jnp.bfloat16)
    mixed = np.asarray(packed_attention(query, key, value, jnp.ones((1, 2), jnp.int32)).astype(jnp.float32))[0, 1, 0]
    expected = 1 / (1 + np.exp(1.0 / np.sqrt(2.0)))
    np.testing.assert_allclose(mixed[0], expected, atol=5e-3)
