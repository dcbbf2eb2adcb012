"""The engine's programs on their own: state that is left alone, one prefix in many slots, dtype, buckets."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from areal_jax.config import ConfigError
from areal_jax.sampler import caches
from areal_jax.sampler.state import Insertion


def insertion(engine, entries, width=4):
    """Columns of ``entries`` (row, slot, last token, position, count, limit, group, sample), the rest out of range."""
    columns = np.zeros((8, width), np.int32)
    columns[1] = engine.max_concurrent_decodes
    for i, entry in enumerate(entries):
        columns[:, i] = entry
    return Insertion(*columns)


def test_buckets_end_at_the_longest_sequence(engine_of):
    engine = engine_of(buckets=(24, 8, 40))
    assert engine.buckets == (8, 24, 32)
    assert engine_of(widths=(40, 12, 8)).widths == (8, 12, 32)
    assert [engine.bucket(n) for n in (1, 8, 9, 24, 25, 32)] == [8, 8, 24, 24, 32, 32]


def test_prefix_goes_into_many_slots_and_touches_no_other(engine_of, update_of):
    engine = engine_of()
    params, state = update_of(engine).params, engine.new_state(16)
    marked = jax.tree.map(lambda x: jnp.full_like(x, 7), (state.keys, state.values))
    state = jax.device_put(state.replace(keys=marked[0], values=marked[1]), engine.state_shardings)
    sequences = np.zeros((2, 16), np.int32)
    sequences[0, :3], sequences[1, :5] = [4, 9, 12], [3, 3, 8, 20, 2]
    entries = [(0, 3, 12, 2, 0, 9, 1, 0), (1, 1, 2, 4, 0, 9, 2, 0), (0, 0, 12, 2, 0, 9, 1, 1)]
    state = engine.enter(params, state, sequences, insertion(engine, entries), 5)
    assert np.asarray(state.live).tolist() == [True, True, False, True]
    assert np.asarray(state.positions)[[0, 1, 3]].tolist() == [2, 4, 2]
    for cache in (*state.keys, *state.values):
        cache = np.asarray(cache)
        np.testing.assert_array_equal(cache[0], cache[3])
        assert not np.array_equal(cache[0], cache[1]) and np.all(cache[2] == 7)
    assert len({row.tobytes() for row in np.asarray(state.request_keys)[[0, 1, 3]]}) == 3


@pytest.mark.parametrize("mesh", [(1, 1, 1), (2, 1, 2)], ids=str)
def test_copies_into_slots_are_made_in_parts(model, engine_of, host_params, monkeypatch, mesh):
    """The compiled program needs less memory for it, and writes the same."""
    random = np.random.default_rng(0)
    sequences = random.integers(1, 20, (2, 256)).astype(np.int32)
    new = insertion(engine_of(slots=32), [(0, 32, 0, 0, 0, 0, 0, 0)] * 256, 256)
    for i, place in enumerate(random.choice(256, 23, replace=False)):
        new.rows[place], new.slots[place], new.positions[place], new.limits[place], new.group_ids[place] = i % 2, (i + 5) % 32, 200, 9, i
    states, needed = [], []
    for tokens in (1 << 20, 1024, 3 * 256):
        monkeypatch.setattr(caches, "PROGRAM_TOKENS", tokens)
        engine = engine_of(mesh=mesh, slots=32, max_length=256, buckets=(), widths=(), seed=tokens)
        assert engine.enter_shape(256, 2, 128) == (2, 256)
        needed.append(engine.lower_enter(256, 256, 2, 128).compile().memory_analysis().temp_size_in_bytes)
        states.append(jax.device_get(engine.enter(engine.load_params(host_params(0)), engine.new_state(256), sequences, new, 5)))
    assert states[0].live.sum() == 23
    for state in states[1:]:
        jax.tree.map(lambda one, other: np.testing.assert_allclose(one, other, atol=1e-6), states[0], state)
    keys_of_all = 256 * 256 * model.kv_heads // mesh[2] * model.head_dim * 4
    assert max(needed[1:]) < needed[0] - keys_of_all // 4 and needed[0] > keys_of_all, needed


def test_setting_of_attention_is_the_prefills(engine_of):
    engine = engine_of(attention="kernel")
    with pytest.raises(ConfigError, match="attention"):
        engine.lower_enter(16, 16, 1, 1)
    with pytest.raises(ConfigError, match="attention"):
        engine.lower_rebuild(16, 16)
    engine.lower_generate(16)


def test_dispatch_reports_the_valid_tokens_of_each_slot(engine_of, update_of):
    """Limits 2 and 6 with 4 steps a dispatch: the counts, the liveness and what is left in the arrays."""
    engine = engine_of()
    params = update_of(engine).params
    sequences = np.array([[4, 9, 12, *[0] * 13], [3, 3, 8, *[0] * 13]], np.int32)
    state = engine.enter(params, engine.new_state(16), sequences, insertion(engine, [(0, 0, 12, 2, 0, 2, 1, 0), (1, 2, 8, 2, 0, 6, 2, 0)]), 3)
    state, chunk = engine.generate_chunk(params, state)
    tokens, logprobs, valid, live = chunk.unpack()
    assert tokens.shape == logprobs.shape == (4, 4) and logprobs.dtype == np.float32
    assert valid.tolist() == [2, 0, 4, 0] and live.tolist() == [False, False, True, False], "no end token falls here with this seed"
    assert np.all(logprobs[0, :2] < 0) and np.all(logprobs[0, 2:] == 0) and np.all(logprobs[[1, 3]] == 0)
    assert np.asarray(state.positions).tolist() == [4, 0, 6, 0] and np.asarray(state.counts).tolist() == [2, 0, 4, 0]
    state = engine.free_resource(state, np.array([False, False, True, False]))
    state, chunk = engine.generate_chunk(params, state)
    assert chunk.unpack()[2].tolist() == [0, 0, 0, 0]


def test_resize_keeps_what_is_in_the_cache(engine_of):
    engine = engine_of()
    random = np.random.default_rng(0)
    state = jax.tree.map(lambda x: jnp.asarray(random.integers(0, 2, x.shape), x.dtype), engine.new_state(16))
    state = jax.device_put(state, engine.state_shardings)
    longer = engine.resize(state, 32)
    assert longer.length == 32 and engine.resize(state, 16) is state
    for short, long, axis in [(*pair, 3) for pair in zip(state.keys, longer.keys, strict=True)] + [
        (*pair, 2) for pair in zip(state.values, longer.values, strict=True)
    ]:
        front, back = np.split(np.asarray(long), [16], axis)
        np.testing.assert_array_equal(front, np.asarray(short))
        assert not back.any()
    jax.tree.map(np.testing.assert_array_equal, engine.resize(longer, 16), state)


def test_bfloat16_parameters_are_cast_on_the_way_and_required_after(engine_of, host_params):
    engine = engine_of(dtype="bfloat16")
    params = engine.load_params(host_params(0))
    assert {leaf.dtype for leaf in jax.tree.leaves(params)} == {jnp.dtype("bfloat16")}
    engine.check_params(params)
    with pytest.raises(ValueError, match=r"bfloat16.*got float32"):
        engine.check_params(engine_of().load_params(host_params(0)))


def test_more_tensor_shards_than_key_heads(engine_of, host_params, model):
    """Query heads are divided over tensor; keys and values, which are fewer, are on every device."""
    assert model.kv_heads < model.heads
    sequences = np.random.default_rng(0).integers(1, 20, (1, 12)).astype(np.int32)
    caches = []
    for mesh in ((1, 1, 1), (1, 1, model.heads)):
        engine = engine_of(mesh=mesh)
        state = engine.rebuild(engine.load_params(host_params(0)), engine.new_state(16), sequences, np.zeros(1, np.int32))
        caches.append(jax.device_get((state.keys, state.values)))
    jax.tree.map(lambda one, other: np.testing.assert_allclose(one, other, atol=1e-5), *caches)
