"""Algorithm 1, the balanced allocation and rows dealt to shards, against the original's cases, plain loops and exhaustive search."""

import itertools
import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from areal_jax.models.architecture import ModelConfig
from areal_jax.models.work import attention_span
from areal_jax.trainer.allocation import Work, allocate, balanced, best_fit, deal_rows

LENGTHS = st.lists(st.integers(1, 40), max_size=40)
SPANS = st.sampled_from([float("inf"), 30.0, 2.0])


def cases(oracles):
    file = json.loads((oracles / "microbatch_allocation.json").read_text())
    assert len(file["cases"]) >= 10
    return file["cases"]


def test_every_allocation_of_the_original(oracles):
    for case in cases(oracles):
        lengths, p = case["inputs"]["lengths"], case["params"]
        bins = allocate(lengths, p["capacity"], p["k_min"])
        assert sorted(i for b in bins for i in b) == list(range(len(lengths))), case["name"]
        totals = sorted((sum(lengths[i] for i in b) for b in bins), reverse=True)
        assert (len(bins), totals) == (case["outputs"]["count"], case["outputs"]["token_totals"]), case["name"]


def test_balanced_needs_no_more_and_is_no_worse_on_the_originals_cases(oracles):
    compared = 0
    for case in cases(oracles):
        lengths, capacity = case["inputs"]["lengths"], case["params"]["capacity"]
        if not lengths or max(lengths) > capacity:
            continue
        compared += 1
        count, totals = case["outputs"]["count"], case["outputs"]["token_totals"]
        bins = balanced(lengths, capacity, Work(), lambda needed, least=count: max(needed, least))
        assert len(bins) == count and max(sum(lengths[i] for i in b) for b in bins) <= totals[0], case["name"]
    assert compared >= 5


def slow(lengths, capacity, k_min):
    """Algorithm 1 as printed, in plain loops."""
    bins = []
    for index in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        fits = [b for b in bins if sum(lengths[i] for i in b) + lengths[index] <= capacity]
        if len(bins) < k_min or not fits:
            bins.append([index])
        else:
            min(fits, key=lambda b: (len(b), sum(lengths[i] for i in b))).append(index)
    return bins


@given(LENGTHS, st.integers(1, 60), st.integers(1, 5))
@settings(max_examples=150, deadline=None)
def test_allocation_is_the_printed_algorithm(lengths, capacity, k_min):
    assert sorted(map(sorted, allocate(lengths, capacity, k_min))) == sorted(map(sorted, slow(lengths, capacity, k_min)))


def work_of(length, span):
    """Of one sequence, token by token: its products, and the positions it attends to."""
    return sum(1.0 + seen / span for seen in range(1, length + 1))


@given(LENGTHS, st.integers(40, 100), SPANS, st.integers(0, 3))
@settings(max_examples=150, deadline=None)
def test_balanced_places_all_within_capacity_in_as_few_bins_and_never_worse(lengths, capacity, span, more):
    plain = allocate(lengths, capacity)
    bins = balanced(lengths, capacity, Work(span), lambda needed: needed + more)
    assert sorted(i for b in bins for i in b) == list(range(len(lengths)))
    assert all(sum(lengths[i] for i in b) <= capacity for b in bins)
    assert len(bins) == more + min(len(plain), len(best_fit(lengths, capacity)))
    if len(plain) <= len(bins) and lengths:
        greatest = max(sum(work_of(lengths[i], span) for i in b) for b in plain)
        assert max(sum(work_of(lengths[i], span) for i in b) for b in bins) <= greatest * (1 + 1e-9)


@given(st.lists(st.integers(1, 40), min_size=1, max_size=7), st.integers(1, 3), SPANS)
@settings(max_examples=60, deadline=None)
def test_without_a_bound_balanced_is_within_4_thirds_of_the_best(lengths, count, span):
    bins = balanced(lengths, sum(lengths), Work(span), lambda _: count)
    each = [work_of(n, span) for n in lengths]
    best = min(
        max(sum(w for w, place in zip(each, places, strict=True) if place == k) for k in range(count))
        for places in itertools.product(range(count), repeat=len(lengths))
    )
    assert max(sum(each[i] for i in b) for b in bins) <= best * 4 / 3 + 1e-9


def test_attention_moves_a_sequence_that_tokens_alone_would_not():
    lengths = [60, 20, 20, 20]
    assert {tuple(sorted(b)) for b in balanced(lengths, 100, Work(), lambda _: 2)} == {(0,), (1, 2, 3)}
    assert {tuple(sorted(b)) for b in balanced([60, 50, 20], 100, Work(), lambda _: 2)} == {(0,), (1, 2)}
    long, short = Work(10.0).of([60, 20])
    assert long > 3 * short, "one long sequence is more work than as many tokens of short ones"
    by_tokens, by_work = (balanced([48, 24, 24, 24], 96, work, lambda _: 2) for work in (Work(), Work(4.0)))
    assert sorted(sum([48, 24, 24, 24][i] for i in b) for b in by_tokens) == [48, 72]
    assert sorted(map(sorted, by_work)) == [[0], [1, 2, 3]]


@given(st.lists(st.floats(0.0, 100.0), min_size=1, max_size=24), st.sampled_from([1, 2, 4]))
@settings(max_examples=100, deadline=None)
def test_shards_have_as_many_rows_and_nearly_equal_work(work, shards):
    work = np.asarray(work + [0.0] * (-len(work) % (2 * shards)))
    sizes = [2 * shards] * (len(work) // (2 * shards))
    dealt = deal_rows(work, sizes, shards)
    assert sorted(row for part in dealt for row in part) == list(range(len(work)))
    for part, size in zip(dealt, sizes, strict=True):
        loads = work[part].reshape(shards, -1).sum(1)
        assert len(part) == size and loads.max() - loads.min() <= work[part].max() - work[part].min() + 1e-9


def test_a_token_attends_to_a_span_for_as_much_as_its_products():
    model = ModelConfig("qwen2", 48, layers=4, hidden_size=256, heads=4, kv_heads=2, head_dim=64, mlp_size=768)
    products = 2 * (4 * (256 * 64 * (4 + 2 + 2 + 4) + 3 * 256 * 768) + 256 * 48)
    assert attention_span(model) == pytest.approx(products / (4 * 4 * 4 * 64))
    assert Work(attention_span(model)).of([1000])[0] == pytest.approx(1000 + 1000 * 1001 / 2 / attention_span(model))
