"""Samples of a load, their padded layout, their FLOPs counted by hand, and the peak of memory."""

import jax
import numpy as np
import pytest

from areal_jax.benchmarks.footprint import PeakMemory
from areal_jax.benchmarks.loads import make_load
from areal_jax.benchmarks.samples import padded, padded_rows, real_tokens, trainer_config, training_batch, training_flops
from areal_jax.models.architecture import ModelConfig
from areal_jax.trainer.build import advantages_of

MODEL = ModelConfig("llama", 30, layers=3, hidden_size=8, heads=2, kv_heads=1, head_dim=4, mlp_size=16)
LOAD = make_load(30, 12, "longtail:6:24", (3, 5), group=4)


def test_a_batch_has_the_loads_prompts_and_lengths_whatever_the_step():
    first, again, other = (training_batch(LOAD, 30, step, seed=5) for step in (0, 0, 1))
    samples = [t for group in first.groups for t in group.trajectories]
    assert [t.length for t in samples] == list(LOAD.lengths) and all((a.prompt_tokens == b).all() for a, b in zip(samples, LOAD.prompts, strict=True))
    assert len(first.groups) == 3 and all(len(group.trajectories) == 4 for group in first.groups)
    tokens = [np.concatenate([t.tokens for g in batch.groups for t in g.trajectories]) for batch in (first, again, other)]
    assert (tokens[0] == tokens[1]).all() and (tokens[0] != tokens[2]).any()
    assert real_tokens(LOAD) == sum(len(t.prompt_tokens) + t.length for t in samples)


def test_flops_of_a_step_are_counted_by_hand():
    matrices = 3 * (8 * 8 + 2 * 8 * 4 + 8 * 8 + 3 * 8 * 16) + 8 * 30
    total = 0
    for prompt, length in zip(LOAD.prompts, LOAD.lengths, strict=True):
        for position in range(len(prompt) + length - 1):
            total += 6 * matrices + 3 * (2 + 2) * 3 * 2 * 4 * (position + 1)
    assert training_flops(MODEL, LOAD) == pytest.approx(total)


@pytest.mark.parametrize(("micro_batches", "shards"), [(1, 1), (5, 1), (3, 2)])
def test_without_packing_each_sample_has_a_row_padded_to_the_longest(micro_batches, shards):
    batch = training_batch(LOAD, 30, 0, seed=5)
    advantages = advantages_of(batch, trainer_config("float32"))
    packed = padded(batch, advantages, micro_batches, shards)
    [micros] = packed.minibatches
    assert len(micros) == micro_batches
    assert {m.tokens.shape for m in micros} == {(padded_rows(12, micro_batches, shards), LOAD.longest - 1)} and len(micros[0].tokens) % shards == 0
    rows = np.concatenate([m.segment_ids for m in micros])
    lengths = [len(p) + n - 1 for p, n in zip(LOAD.prompts, LOAD.lengths, strict=True)]
    assert rows.max() == 1 and [int(n) for n in rows.sum(1)] == lengths + [0] * (len(rows) - 12)
    assert packed.metrics["packing/efficiency"] == pytest.approx(sum(lengths) / rows.size)
    trained = [m.advantages[m.loss_mask > 0] for m in micros]
    assert np.allclose(np.concatenate(trained), np.concatenate(advantages)) and packed.tokens == (LOAD.tokens,)
    assert all((m.loss_weights == m.loss_mask).all() for m in micros) and packed.denominators == (LOAD.tokens,), "the mean over tokens"


def test_peak_memory_sees_what_was_held_and_let_go():
    peak = PeakMemory(jax.devices()[0])
    before = peak.bytes()
    if before is None or peak.since != "here":
        pytest.skip("this system does not tell a process's memory, or does not let it be counted anew")
    held = np.ones(60_000_000, np.uint8)
    del held
    after = peak.bytes()
    assert after is not None and after >= before + 50_000_000
