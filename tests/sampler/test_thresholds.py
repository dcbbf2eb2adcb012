"""Top-k's and top-p's thresholds against a sort in NumPy, over values that hypothesis invents."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from areal_jax.sampler.thresholds import ROW_BY_ROW, kth_largest, nucleus_weight

VOCAB, ROWS = 40, 3
least_logit = jax.jit(lambda logits, k: kth_largest(logits, logits.max(-1), k))
least_weight = jax.jit(nucleus_weight)

spread = st.floats(-80, 80, width=32, allow_subnormal=False)
logit = st.one_of(spread, st.sampled_from([-np.inf, -3e38, -1e30, -1e-30, -0.0, 0.0, 1e-30, 1.0, np.nextafter(np.float32(1), np.float32(2)), 3e38]))
logits_of_rows = st.lists(st.lists(logit, min_size=VOCAB, max_size=VOCAB), min_size=ROWS, max_size=ROWS)
tied = st.lists(st.lists(st.integers(-3, 3).map(float), min_size=VOCAB, max_size=VOCAB), min_size=ROWS, max_size=ROWS)


def check_top_k(logits, k):
    kept = logits >= np.asarray(least_logit(logits, k))[:, None]
    for row, number, mask in zip(logits, k, kept, strict=True):
        wanted = row >= np.sort(row)[::-1][number - 1] if number > 0 else np.ones(len(row), bool)
        np.testing.assert_array_equal(mask, wanted)


def check_top_p(weights, top_p, rounding=2e-6):
    """The kept are the smallest set, by whole groups of ties, whose float64 mass reaches top_p: ± the rounding of a float32 sum."""
    least = np.asarray(least_weight(weights, top_p))
    for row, p, bound in zip(weights.astype(np.float64), top_p.astype(np.float64), least, strict=True):
        kept = row >= bound
        if p >= 1:
            assert np.all(kept)
            continue
        last = row[kept].min()
        assert kept[row.argmax()] and np.all(kept == (row >= last))
        assert row[kept].sum() >= (p - rounding) * row.sum()
        before = row[row > last].sum()
        assert before <= (p + rounding) * row.sum() if before else True


@settings(max_examples=60, deadline=None)
@given(st.one_of(logits_of_rows, tied), st.lists(st.integers(0, VOCAB), min_size=ROWS, max_size=ROWS))
def test_top_k_keeps_what_a_sort_keeps(logits, k):
    check_top_k(np.array(logits, np.float32), np.array(k, np.int32))


@settings(max_examples=60, deadline=None)
@given(st.one_of(logits_of_rows, tied), st.lists(st.one_of(st.floats(0, 1, width=32), st.sampled_from([1e-12, 1.0])), min_size=ROWS, max_size=ROWS))
def test_top_p_keeps_the_smallest_set_that_reaches_the_mass(logits, top_p):
    logits = np.array(logits, np.float32)
    logits[:, 0] = np.maximum(logits[:, 0], -1e30)  # a row of −∞ alone has no distribution
    with np.errstate(over="ignore"):
        weights = np.exp(logits - logits.max(-1, keepdims=True)).astype(np.float32)
    weights[weights < np.finfo(np.float32).tiny] = 0.0
    check_top_p(weights, np.array(top_p, np.float32))


@pytest.mark.parametrize("vocab", [ROW_BY_ROW - 1, ROW_BY_ROW])
@pytest.mark.parametrize("step", [0.0, 0.25], ids=["distinct", "tied"])
def test_long_rows_are_filtered_as_short_ones_are(vocab, step):
    logits = 3 * np.random.default_rng(vocab).standard_normal((12, vocab)).astype(np.float32)
    logits = np.round(logits / step) * np.float32(step) if step else logits
    logits[1, ::2] = -np.inf
    logits[2] = 0.5
    check_top_k(logits, np.array([1, 5, 50, 0, 1000, vocab, vocab - 1, 2, 3, 128, 129, 4000], np.int32))
    weights = np.exp(logits - logits.max(-1, keepdims=True)).astype(np.float32)
    check_top_p(weights, np.array([0.9, 0.5, 0.5, 1e-9, 0.0, 1.0, 0.999, 0.99, 0.1, 0.95, 1 - 2.0**-24, 0.7], np.float32))


def test_top_p_of_a_flat_row_counts_exactly():
    """Powers of two add without rounding: the boundary itself decides, and only a mass that falls short takes one token more."""
    weights = np.array([[1.0, 0.5, 0.25, 0.125, 0.125]] * 5, np.float32)
    top_p = np.array([0.5, 0.75, 0.875, np.nextafter(np.float32(0.5), np.float32(1)), np.nextafter(np.float32(0.5), np.float32(0))], np.float32)
    np.testing.assert_array_equal((weights >= np.asarray(least_weight(weights, top_p))[:, None]).sum(-1), [1, 2, 3, 2, 1])


@pytest.mark.parametrize("vocab", [VOCAB, ROW_BY_ROW + 5])
def test_a_threshold_does_not_know_its_neighbours(vocab):
    logits = 3 * np.random.default_rng(0).standard_normal((9, vocab)).astype(np.float32)
    logits[4] = np.round(logits[4])
    weights = np.exp(logits - logits.max(-1, keepdims=True)).astype(np.float32)
    k, top_p = np.arange(0, 36, 4, dtype=np.int32), np.linspace(0.2, 1.0, 9, dtype=np.float32)
    together = np.asarray(least_logit(logits, k)), np.asarray(least_weight(weights, top_p))
    for n in range(9):
        alone = slice(n, n + 1)
        np.testing.assert_array_equal(logits[n] >= together[0][n], logits[n] >= np.asarray(least_logit(logits[alone], k[alone])))
        np.testing.assert_array_equal(weights[n] >= together[1][n], weights[n] >= np.asarray(least_weight(weights[alone], top_p[alone])))


def test_filters_do_not_sort():
    text = jax.jit(lambda x, k, p: (kth_largest(x, x.max(-1), k), nucleus_weight(x, p))).lower(jnp.ones((2, 5000)), jnp.ones(2, int), jnp.ones(2)).as_text()
    assert "while" in text and "sort" not in text and "top_k" not in text
