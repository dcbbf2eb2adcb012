"""Packed rows, micro-batches and minibatches."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from areal_jax.trainer.allocation import Work
from areal_jax.trainer.packing import POLICIES, PackedSequence, Packing, micro_batches, pack, pack_rows, row_counts, split_groups, split_rows


def sequences(lengths, seed=0):
    random = np.random.default_rng(seed)
    made = []
    for n in lengths:
        k = int(random.integers(0, n))
        tokens, logprobs = random.integers(1, 1000, n).astype(np.int32), random.random(k).astype(np.float32)
        made.append(PackedSequence(tokens, logprobs, np.full(k, n, np.int32), random.random(k)))
    return made


@given(st.lists(st.integers(2, 17), min_size=1, max_size=30), st.integers(1, 4), st.sampled_from(["algorithm1", "balanced"]))
@settings(max_examples=60, deadline=None)
def test_every_token_is_packed_once_and_aligned(lengths, k_min, policy):
    given_sequences = sequences(lengths)
    packed = pack_rows(given_sequences, 16, k_min, packing=Packing(policy, work=Work(8.0)))
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


@pytest.mark.parametrize("policy", ["algorithm1", "balanced"])
def test_shards_do_equal_work_under_the_declared_shapes(batch_of, policy):
    batch = batch_of(groups=8, samples=4)
    advantages = [np.full(t.length, g.group_id) for g in batch.groups for t in g.trajectories]
    packing, counts = Packing(policy, 2, Work(4.0)), (4, 2)
    packed = pack(batch, advantages, 24, counts, 2, packing=packing)
    every = [m for part in packed.minibatches for m in part]
    assert {m.tokens.shape for m in every} <= {(rows, 24) for rows in counts}
    shares = []
    for micro in every:
        shards = np.split(np.asarray(micro.segment_ids), 2)
        shares.append([ids.size + sum(n * (n + 1) / 2 / 4.0 for row in ids for n in np.bincount(row)[1:]) for ids in shards])
    wanted = sum(np.mean(pair) for pair in shares) / sum(max(pair) for pair in shares)
    assert packed.metrics["packing/balance"] == pytest.approx(wanted) and 0.9 < wanted <= 1.0
    assert sum(m.loss_mask.sum() for m in every) == sum(packed.tokens)


@pytest.mark.parametrize("policy", POLICIES)
def test_each_sample_keeps_its_weight_and_each_minibatch_its_denominator(batch_of, policy):
    batch = batch_of(groups=8, samples=4)
    samples = [t for g in batch.groups for t in g.trajectories]
    advantages = [np.full(t.length, number % 3) for number, t in enumerate(samples)]
    weights, shares = 2.0 + np.arange(len(samples)), 0.25 * np.arange(len(samples)) ** 2
    packed = pack(batch, advantages, 24, (4, 2), 2, True, (weights, shares), Packing(policy, 2, Work(4.0)))
    seen = set()
    for part, denominator in zip(packed.minibatches, packed.denominators, strict=True):
        trained = set()
        for micro in part:
            assert not micro.loss_weights[micro.loss_mask == 0].any()
            for row, ids in enumerate(micro.segment_ids):
                for segment in range(1, ids.max() + 1):
                    here = (ids == segment) & (micro.loss_mask[row] > 0)
                    [weight] = np.unique(micro.loss_weights[row, here])
                    np.testing.assert_array_equal(micro.targets[row, here], samples[int(weight) - 2].tokens)
                    trained.add(int(weight) - 2)
        groups = {number // 4 for number in trained}
        assert denominator == pytest.approx(sum(shares[number] for number in range(len(samples)) if number // 4 in groups))
        seen |= trained
    assert seen >= {number for number in range(len(samples)) if number % 3}, "only samples without an advantage may be left out"
    assert sum(packed.denominators) == pytest.approx(shares.sum())


def test_balanced_packs_a_long_tail_as_tightly():
    random = np.random.default_rng(0)
    given_sequences = sequences(np.minimum(256, 20 + np.exp(3.4 + 0.8 * random.standard_normal(200))).astype(int))
    packed = {policy: micro_batches(given_sequences, 256, (4, 2), packing=Packing(policy, 2, Work(300.0))) for policy in ("algorithm1", "balanced")}
    computed = {policy: sum(m.tokens.size for m in micros) for policy, micros in packed.items()}
    assert computed["balanced"] <= computed["algorithm1"]
    heaviest = {policy: max(Packing(policy, 2, Work(300.0)).row_work(m.segment_ids).max() for m in micros) for policy, micros in packed.items()}
    assert heaviest["balanced"] <= heaviest["algorithm1"]


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
