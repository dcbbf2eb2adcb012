"""Algorithm 1, packed rows and minibatches."""

import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from areal_jax.trainer.packing import PackedSequence, allocate, micro_batches, pack, pack_rows, row_counts, split_groups, split_rows


def test_every_allocation_of_the_original(oracles):
    file = json.loads((oracles / "microbatch_allocation.json").read_text())
    assert len(file["cases"]) >= 10
    for case in file["cases"]:
        lengths, p = case["inputs"]["lengths"], case["params"]
        bins = allocate(lengths, p["capacity"], p["k_min"])
        assert sorted(i for b in bins for i in b) == list(range(len(lengths))), case["name"]
        totals = sorted((sum(lengths[i] for i in b) for b in bins), reverse=True)
        assert (len(bins), totals) == (case["outputs"]["count"], case["outputs"]["token_totals"]), case["name"]


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


@given(st.lists(st.integers(1, 40), max_size=40), st.integers(1, 60), st.integers(1, 5))
@settings(max_examples=150, deadline=None)
def test_allocation_is_the_printed_algorithm(lengths, capacity, k_min):
    assert sorted(map(sorted, allocate(lengths, capacity, k_min))) == sorted(map(sorted, slow(lengths, capacity, k_min)))


def sequences(lengths, seed=0):
    random = np.random.default_rng(seed)
    made = []
    for n in lengths:
        k = int(random.integers(0, n))
        tokens, logprobs = random.integers(1, 1000, n).astype(np.int32), random.random(k).astype(np.float32)
        made.append(PackedSequence(tokens, logprobs, np.full(k, n, np.int32), random.random(k)))
    return made


@given(st.lists(st.integers(2, 17), min_size=1, max_size=30), st.integers(1, 4))
@settings(max_examples=60, deadline=None)
def test_every_token_is_packed_once_and_aligned(lengths, k_min):
    given_sequences = sequences(lengths)
    packed = pack_rows(given_sequences, 16, k_min)
    assert packed.tokens.shape[0] >= min(k_min, len(lengths))
    found = []
    for row in range(packed.tokens.shape[0]):
        for segment in range(1, packed.segment_ids[row].max() + 1):
            at = np.flatnonzero(packed.segment_ids[row] == segment)
            assert (np.diff(at) == 1).all() and (packed.positions[row, at] == np.arange(at.size)).all()
            whole = np.r_[packed.tokens[row, at], packed.targets[row, at[-1]]]
            assert (packed.targets[row, at[:-1]] == packed.tokens[row, at[1:]]).all()
            trained = at[packed.loss_mask[row, at] > 0]
            values = (packed.behaviour_logprobs, packed.versions, packed.advantages)
            found.append((whole.tolist(), *(v[row, trained].tolist() for v in values)))
    wanted = [(s.tokens.tolist(), s.behaviour_logprobs.tolist(), s.versions.tolist(), s.advantages.astype(np.float32).tolist()) for s in given_sequences]
    assert sorted(found) == sorted(wanted)
    padding = packed.segment_ids == 0
    assert not packed.loss_mask[padding].any() and (packed.versions[packed.loss_mask == 0] == -1).all()


def test_micro_batches_have_static_shapes_only():
    counts = row_counts(4, 1)
    assert counts == (4, 2) and row_counts(4, 4) == (4,) and row_counts(6, 2) == (6,)
    assert split_rows(7, counts) == [4, 2, 2] and split_rows(1, counts) == [2]
    for n in range(1, 30):
        made = micro_batches(sequences([9] * n), 16, counts)
        assert {m.tokens.shape for m in made} <= {(c, 16) for c in counts}
        assert sum(int(m.segment_ids.max(1, initial=0).sum()) for m in made) == n


def test_what_does_not_fit_is_refused_with_the_remedy():
    with pytest.raises(ValueError, match="micro_batch_tokens"):
        pack_rows(sequences([18]), 16)
    with pytest.raises(ValueError, match="shards"):
        row_counts(6, 4)


@given(st.lists(st.integers(1, 500), min_size=1, max_size=32), st.integers(1, 4))
@settings(max_examples=60, deadline=None)
def test_groups_are_dealt_whole_and_evenly(tokens, minibatches):
    parts = split_groups(tokens, minibatches)
    assert sorted(i for p in parts for i in p) == list(range(len(tokens)))
    sizes = [len(p) for p in parts]
    assert max(sizes) - min(sizes) <= 1 and len(parts) == min(minibatches, len(tokens))
    if len(tokens) % len(parts) == 0:
        sums = [sum(tokens[i] for i in p) for p in parts]
        assert max(sums) - min(sums) <= max(tokens)


def test_a_step_is_packed_with_its_efficiency(batch_of):
    batch = batch_of(groups=8, samples=4)
    advantages = [np.full(t.length, g.group_id) for g in batch.groups for t in g.trajectories]
    packed = pack(batch, advantages, 24, (4, 2), 2)
    total = sum(t.length for g in batch.groups for t in g.trajectories)
    assert sum(packed.tokens) == total and len(packed.minibatches) == 2
    groups = [{int(a) for m in part for a in m.advantages[m.loss_mask > 0]} for part in packed.minibatches]
    assert not groups[0] & groups[1] and len(groups[0]) == len(groups[1]) == 4
    real = sum(t.length + len(t.prompt_tokens) - 1 for g in batch.groups for t in g.trajectories)
    computed = sum(m.tokens.size for part in packed.minibatches for m in part)
    assert packed.metrics["packing/efficiency"] == pytest.approx(real / computed)


def held(micro):
    """(tokens of a segment, its advantages) of a packed micro-batch."""
    found = []
    for row in range(micro.tokens.shape[0]):
        for segment in range(1, micro.segment_ids[row].max() + 1):
            here = micro.segment_ids[row] == segment
            found.append((tuple(micro.tokens[row, here].tolist()), tuple(micro.advantages[row, here].tolist())))
    return found


def test_samples_without_gradient_only_fill_the_room_that_is_left():
    trained, idle = sequences([9, 9, 12], seed=1), [PackedSequence(s.tokens, s.behaviour_logprobs, s.versions, 0 * s.advantages) for s in sequences([4] * 20)]
    alone, filled = micro_batches(trained, 16, (4, 2)), micro_batches(trained, 16, (4, 2), idle)
    assert [m.tokens.shape for m in filled] == [m.tokens.shape for m in alone]
    assert {s for m in alone for s in held(m)} <= {s for m in filled for s in held(m)}
    real = sum((m.segment_ids > 0).sum() for m in filled) / sum(m.segment_ids.size for m in filled)
    assert real >= 0.9 > sum((m.segment_ids > 0).sum() for m in alone) / sum(m.segment_ids.size for m in alone)
    assert sum(m.tokens.shape[0] for m in micro_batches([], 16, (4, 2), idle)) == 2, "with no gradient at all, the smallest micro-batch measures"
