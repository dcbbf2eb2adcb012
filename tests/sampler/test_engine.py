"""The engine's programs on their own: what they write into the pages, what they leave alone, what a dispatch tells."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import numpy_policy
import pytest

from areal_jax.sampler.engine import CPU_BLOCK as BLOCK
from areal_jax.sampler.state import Insertion

MARK = 7.0
LONG, SHORT = np.array([4, 9, 12, 3, 30, 2, 8, 17, 21, 6, 11], np.int32), np.array([3, 3, 8, 20, 2, 33, 7], np.int32)


def marked(engine):
    """A state whose every entry is ``MARK``."""
    state = engine.new_state()
    keys, values = jax.tree.map(lambda x: jnp.full_like(x, MARK), (state.keys, state.values))
    return jax.device_put(state.replace(keys=keys, values=values), engine.state_shardings)


def blocks(engine, pieces):
    """Pieces (tokens, first position, pages), cut into blocks, in the smallest program that takes them."""
    cut = range(0, engine.max_length, engine.block)
    pieces = [(tokens[i : i + engine.block], start + i, pages) for tokens, start, pages in pieces for i in cut if i < len(tokens)]
    made = engine.no_blocks(next(n for n in engine.block_buckets if n >= len(pieces)))
    for row, (tokens, start, pages) in enumerate(pieces):
        made.tokens[row, : len(tokens)], made.starts[row], made.counts[row] = tokens, start, len(tokens)
        made.tables[row, : len(pages)] = pages
    return made


def insertion(engine, entries):
    """Entries (slot, newest token, its position, tokens generated, limit, stream, sampling)."""
    slots = engine.max_concurrent_decodes
    whole, real, streams = np.zeros((6, slots), np.int32), np.ones((2, slots), np.float32), np.zeros((slots, 2), np.uint32)
    whole[0] = slots
    for i, (slot, token, position, count, limit, stream, sampling) in enumerate(entries):
        temperature, top_k, top_p = sampling
        whole[:, i], real[:, i], streams[i] = (slot, token, position, count, limit, top_k), (temperature, top_p), stream
    slot, tokens, positions, counts, limits, top_k = whole
    return Insertion(slot, tokens, positions, counts, limits, streams, real[0], top_k, real[1])


def entry(slot, sequence, limit, count=0, stream=(1, 0), sampling=(1.0, 0, 1.0)):
    return slot, sequence[-1], len(sequence) - 1, count, limit, stream, sampling


def tables(engine, *pages):
    made = np.zeros((engine.row_buckets[0], engine.sequence_pages), np.int32)
    for row, own in enumerate(pages):
        made[row, : len(own)] = own
    return made


def rows(engine, *slots):
    made = np.full(engine.row_buckets[0], engine.max_concurrent_decodes, np.int32)
    made[: len(slots)] = slots
    return made


def caches(state):
    return [np.asarray(x) for x in (*state.keys, *state.values)]


def held(state, pages, count):
    """The first ``count`` entries of a table [layer and kind, position, kv_head, head_dim]."""
    return np.stack([x[:, pages].reshape(x.shape[0], -1, x.shape[-1])[:, :count].swapaxes(0, 1) for x in caches(state)])


def untouched(state, pages):
    """All pages but these and the scrap page hold the mark."""
    for cache in caches(state):
        others = np.setdiff1d(np.arange(1, cache.shape[1]), pages)
        np.testing.assert_array_equal(cache[:, others], MARK)


def exact(model, params, tokens):
    decoder, params = numpy_policy.Decoder(model), numpy_policy.as_float64(params)
    for token in tokens:
        decoder.step(params, int(token))
    return np.stack([*map(np.stack, decoder.keys), *map(np.stack, decoder.values)])


def test_programs_have_declared_sizes(engine_of):
    assert engine_of(prefill_chunk=16 * BLOCK).block_buckets == (4, 8, 16)
    assert engine_of(prefill_chunk=BLOCK).block_buckets == (1,)
    assert engine_of(slots=32).row_buckets == (4, 8, 16, 24, 32)
    assert engine_of(slots=20).row_buckets == (4, 5, 10, 15, 20)
    assert engine_of(slots=3).row_buckets == (3,)


def test_pages_too_few_for_one_sequence_are_refused(engine_of):
    """32 tokens in pages of 4 are 8 pages; one more for the copy of a shared prompt's last page, one that nobody holds."""
    with pytest.raises(ValueError, match=r"must exceed the 9 .* got 9; raise 'rollout.kv_pages'"):
        engine_of(pages=9)
    assert engine_of(pages=10).pages == 10
    assert engine_of(slots=1).pages == 10 and engine_of(slots=4).pages == 33
    for chunk in (0, BLOCK - 1, BLOCK + 1):
        with pytest.raises(ValueError, match=f"multiple of {BLOCK}; got {chunk}"):
            engine_of(prefill_chunk=chunk)
    with pytest.raises(ValueError, match="needs 33 pages; got 20"):
        engine_of(pages=20).init_decode_state()


def test_prefill_writes_every_token_into_its_page(engine_of, update_of, host_params, model):
    """A sequence in three pieces, two of them in one program, beside another; in pages of no order."""
    engine = engine_of()
    params, state = update_of(engine).params, marked(engine)
    long, short = (9, 2, 30), (17, 5)
    state = engine.prefill_blocks(params, state, blocks(engine, [(LONG[:3], 0, long)]))
    untouched(state, long)
    state = engine.prefill_blocks(params, state, blocks(engine, [(LONG[5:], 5, long), (SHORT, 0, short), (LONG[3:5], 3, long)]))
    untouched(state, [*long, *short])
    np.testing.assert_allclose(held(state, long, 11), exact(model, host_params(0), LONG), atol=1e-5)
    np.testing.assert_allclose(held(state, short, 7), exact(model, host_params(0), SHORT), atol=1e-5)
    for pages, length in ((long, 11), (short, 7)):
        np.testing.assert_array_equal(held(state, pages, len(pages) * 4)[:, length:], MARK)


def test_copies_go_where_they_are_sent(engine_of):
    engine = engine_of()
    state = engine.new_state()
    random = np.random.default_rng(0)
    filled = jax.tree.map(lambda x: random.standard_normal(x.shape).astype(x.dtype), (state.keys, state.values))
    state = jax.device_put(state.replace(keys=filled[0], values=filled[1]), engine.state_shardings)
    before = caches(state)
    after = caches(engine.copy_pages(state, np.array([6, 6, 0, 31], np.int32), np.array([8, 32, 0, 1], np.int32)))
    for old, new in zip(before, after, strict=True):
        wanted = old.copy()
        wanted[:, [8, 32, 1]] = old[:, [6, 6, 31]]
        np.testing.assert_array_equal(new, wanted)


def test_requests_enter_their_slots_and_no_other(engine_of):
    engine = engine_of()
    state = engine.enter(engine.new_state(), insertion(engine, [entry(3, LONG, 9), entry(1, SHORT, 12, 4, (2, 1)), entry(0, LONG, 9, 0, (1, 1))]), 5)
    assert np.asarray(state.live).tolist() == [True, True, False, True]
    assert np.asarray(state.tokens).tolist() == [11, 7, 0, 11] and np.asarray(state.positions).tolist() == [10, 6, 0, 10]
    assert np.asarray(state.counts).tolist() == [0, 4, 0, 0] and np.asarray(state.limits).tolist() == [9, 12, 0, 9]
    keys = np.asarray(state.request_keys)
    assert len({row.tobytes() for row in keys[[0, 1, 3]]}) == 3
    other = engine.enter(engine.new_state(), insertion(engine, [entry(2, SHORT, 12, 0, (2, 1))]), 5)
    np.testing.assert_array_equal(np.asarray(other.request_keys)[2], keys[1])
    state = engine.enter(state, insertion(engine, [entry(2, SHORT, 3)]), 5)
    assert np.asarray(state.live).all() and np.asarray(state.limits).tolist() == [9, 12, 3, 9]


def started(engine, params):
    """LONG in slot 3 with 2 tokens to go, SHORT in slot 1 with 6; tables with room for them."""
    pages = ((9, 2, 30, 31), (17, 5, 6, 7))
    state = engine.prefill_blocks(params, marked(engine), blocks(engine, [(LONG[:-1], 0, pages[0]), (SHORT[:-1], 0, pages[1])]))
    return engine.enter(state, insertion(engine, [entry(3, LONG, 2), entry(1, SHORT, 6, stream=(2, 0))]), 3), pages


def test_a_dispatch_tells_the_valid_tokens_of_its_rows(engine_of, update_of, host_params, model):
    """Limits 2 and 6 with 4 steps a dispatch: the counts, the liveness, what is left in the arrays, and where entries were put."""
    engine = engine_of()
    params = update_of(engine).params
    state, (long, short) = started(engine, params)
    state, chunk = engine.decode(params, state, rows(engine, 3, 1), tables(engine, long, short))
    decoded = chunk.unpack()
    assert decoded.tokens.shape == decoded.logprobs.shape == (4, 4) and decoded.logprobs.dtype == np.float32 and decoded.raw_logprobs is None
    assert decoded.valid.tolist() == [2, 4, 0, 0] and decoded.live.tolist() == [False, True, False, False], "no end token falls here with this seed"
    assert np.all(decoded.logprobs[0, :2] < 0) and np.all(decoded.logprobs[0, 2:] == 0) and np.all(decoded.logprobs[2:] == 0)
    assert np.asarray(state.positions).tolist() == [0, 10, 0, 12] and np.asarray(state.counts).tolist() == [0, 4, 0, 2]
    assert np.asarray(state.tokens)[[1, 3]].tolist() == [decoded.tokens[1, 3], decoded.tokens[0, 1]]
    untouched(state, [*long, *short])
    for pages, prompt, made in ((long, LONG, decoded.tokens[0, :1]), (short, SHORT, decoded.tokens[1, :3])):  # the newest token is not fed
        sequence = np.concatenate([prompt, made])
        np.testing.assert_allclose(held(state, pages, len(sequence)), exact(model, host_params(0), sequence), atol=1e-5)
        np.testing.assert_array_equal(held(state, pages, 16)[:, len(sequence) :], MARK)
    state, chunk = engine.decode(params, state, rows(engine, 3), tables(engine, long))
    assert chunk.unpack().valid.tolist() == [0, 0, 0, 0], "it has ended; the other is not asked for"
    assert np.asarray(state.positions).tolist() == [0, 10, 0, 12] and np.asarray(state.live).tolist() == [False, True, False, False]


def test_a_dispatch_ends_early_with_few_live_rows(engine_of, update_of):
    engine = engine_of()
    params = update_of(engine).params
    state, (long, short) = started(engine, params)
    state, chunk = engine.decode(params, state, rows(engine, 1, 3), tables(engine, short, long), stop_below=2)
    assert chunk.unpack().valid.tolist() == [2, 2, 0, 0] and chunk.unpack().live.tolist() == [True, False, False, False]
    state, chunk = engine.decode(params, state, rows(engine, 1, 3), tables(engine, short, long), stop_below=2)
    assert chunk.unpack().valid.tolist() == [0, 0, 0, 0]
    state, chunk = engine.decode(params, state, rows(engine, 1, 3), tables(engine, short, long), stop_below=1)
    assert chunk.unpack().valid.tolist() == [4, 0, 0, 0]


def test_per_request_rows_tell_raw_and_likeliest_logprobs(engine_of, update_of, host_params, full_logits):
    engine = engine_of(per_request=True, top_logprobs=3, prefill_chunk=BLOCK * 4)
    params = update_of(engine).params
    pages, samplings = ((9, 2, 30, 31), (17, 5, 6, 7)), ((0.5, 4, 1.0), (1.5, 0, 0.7))
    state = engine.prefill_blocks(params, engine.new_state(), blocks(engine, [(LONG[:-1], 0, pages[0]), (SHORT[:-1], 0, pages[1])]))
    new = [entry(0, LONG, 6, 0, (1, 0), samplings[0]), entry(2, SHORT, 6, 0, (2, 0), samplings[1])]
    state, chunk = engine.decode(params, engine.enter(state, insertion(engine, new), 3), rows(engine, 0, 2), tables(engine, *pages))
    decoded = chunk.unpack()
    assert decoded.valid.tolist()[:2] == [4, 4] and decoded.top_ids.shape == decoded.top_logprobs.shape == (4, 4, 3)
    for row, (prompt, (temperature, top_k, top_p)) in enumerate(zip((LONG, SHORT), samplings, strict=True)):
        logits = full_logits(host_params(0), np.concatenate([prompt, decoded.tokens[row]]))[len(prompt) - 1 :][:4]
        raw = logits - np.log(np.exp(logits - logits.max(-1, keepdims=True)).sum(-1, keepdims=True)) - logits.max(-1, keepdims=True)
        order = np.argsort(-raw, -1)
        np.testing.assert_array_equal(decoded.top_ids[row], order[:, :3])
        np.testing.assert_allclose(decoded.top_logprobs[row], np.take_along_axis(raw, order[:, :3], -1), atol=1e-5)
        for step, token in enumerate(decoded.tokens[row]):
            assert abs(decoded.raw_logprobs[row, step] - raw[step, token]) < 1e-5
            weights = np.exp((raw[step] - raw[step].max()) / temperature)[order[step]]
            kept = weights[:top_k] if top_k else weights[: 1 + np.searchsorted(np.cumsum(weights), top_p * weights.sum())]
            place = int(np.flatnonzero(order[step] == token)[0])
            assert place < len(kept)
            assert abs(decoded.logprobs[row, step] - np.log(kept[place] / kept.sum())) < 1e-5


def test_every_program_takes_the_caches_over(engine_of, update_of):
    """Donated: the pages that went in are gone, so that never two caches lie on the device."""
    engine, slots = engine_of(), engine_of().max_concurrent_decodes
    params, pairs = update_of(engine).params, np.zeros((2, slots), np.int32)
    nobody, tables = np.full(engine.row_buckets[0], slots, np.int32), np.zeros((engine.row_buckets[0], engine.sequence_pages), np.int32)
    programs = {
        "prefill": lambda state: engine.prefill_blocks(params, state, engine.no_blocks(engine.block_buckets[0])),
        "copy": lambda state: engine.copy_pages(state, *pairs),
        "enter": lambda state: engine.enter(state, insertion(engine, []), 0),
        "decode": lambda state: engine.decode(params, state, nobody, tables)[0],
    }
    state = engine.new_state()
    for name, program in programs.items():
        before, state = state, program(state)
        assert all(page.is_deleted() for page in (*before.keys, *before.values)), name


def test_decoding_copies_no_page(engine_of):
    """The pool is changed in place: of its shape there is no copy in the compiled program."""
    engine = engine_of()
    text = engine.lower_decode().compile().as_text()
    shape = re.escape(f"f32[{engine.model.kv_heads},{engine.pages},{engine.page_size},{engine.model.head_dim}]")
    assert re.search(shape, text), "the pool's shape is read from the program"
    copies = [line for line in text.splitlines() if re.search(rf"= {shape}\S* copy\(", line)]
    assert not copies, copies


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
    engine = engine_of(mesh=(1, 1, model.heads), prefill_chunk=4 * BLOCK)
    state = engine.prefill_blocks(engine.load_params(host_params(0)), engine.new_state(), blocks(engine, [(LONG, 0, (9, 2, 30))]))
    assert state.keys[0].is_fully_replicated
    np.testing.assert_allclose(held(state, (9, 2, 30), 11), exact(model, host_params(0), LONG), atol=1e-5)
