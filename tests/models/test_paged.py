"""Attention over pages: against its definition in NumPy, independence of a row from everything that is not its own, kernels, meshes, memory."""

import contextlib
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.experimental.pallas import tpu as pltpu
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from tpu_compiler import run_with_libtpu

from areal_jax.cluster.meshes import build_mesh
from areal_jax.config import ConfigError
from areal_jax.models import kernels, paged
from areal_jax.models.paged import paged_attention, write_pages

attend = jax.jit(paged_attention, static_argnames=("backend", "mesh"))


def definition(query, key_pages, value_pages, tables, starts):
    """Causal softmax attention in float64, a row, a head and a query at a time, over no more than what each sees."""
    query, key_pages, value_pages = (np.asarray(x, np.float64) for x in (query, key_pages, value_pages))
    mixed = np.zeros(query.shape)
    page_size, group = key_pages.shape[2], query.shape[2] // key_pages.shape[0]
    for row, place, head in np.ndindex(query.shape[:3]):
        where = [(tables[row][p // page_size], p % page_size) for p in range(starts[row] + place + 1)]
        key, value = (np.stack([x[head // group, page, at] for page, at in where]) for x in (key_pages, value_pages))
        scores = key @ query[row, place, head] / np.sqrt(query.shape[3])
        weights = np.exp(scores - scores.max())
        mixed[row, place, head] = weights @ value / weights.sum()
    return mixed


def problem(seed, starts, queries=1, page_size=4, heads=4, kv_heads=2, head_dim=8, wider=0, shared=0, dtype=jnp.float32):
    """Queries, pages full of large junk but for what the rows hold, tables in any order whose first ``shared`` whole pages are the same, and starts."""
    random = np.random.default_rng(seed)
    starts = np.asarray(starts, np.int32)
    needed = -(-(starts + queries) // page_size)
    shared = min(shared, int((starts // page_size).min()))  # shared pages are those before every row's first query
    width = int(needed.max()) + wider
    ids = 1 + random.permutation(int(needed.sum()) + width)
    tables = ids[random.integers(0, len(ids), (len(starts), width))].astype(np.int32)  # beyond a row's end: any page
    junk = random.choice([-3e4, 3e4], (2, kv_heads, len(ids) + 1, page_size, head_dim)).astype(np.float32)
    taken = shared
    for row, count in enumerate(needed):
        own = count - shared
        tables[row, :count] = np.concatenate([ids[:shared], ids[taken : taken + own]])
        taken += own
        for place in range(starts[row] + queries):
            junk[:, :, tables[row, place // page_size], place % page_size] = random.standard_normal((2, kv_heads, head_dim))
    query = random.standard_normal((len(starts), queries, heads, head_dim))
    return jnp.asarray(query, dtype), jnp.asarray(junk[0], dtype), jnp.asarray(junk[1], dtype), tables, starts


@settings(max_examples=14, deadline=None)
@given(
    seed=st.integers(0, 2**31),
    starts=st.sampled_from([1, 3, 11]).flatmap(lambda rows: st.lists(st.integers(0, 90), min_size=rows, max_size=rows)),
    queries=st.sampled_from([1, 5]),
    page_size=st.sampled_from([1, 3, 8, 32]),
    heads=st.sampled_from([(4, 2), (3, 1)]),
    wider=st.integers(0, 3),
    shared=st.integers(0, 3),
)
def test_it_is_attention_over_what_the_row_holds(seed, starts, queries, page_size, heads, wider, shared):
    arrays = problem(seed, starts, queries, page_size, *heads, wider=wider, shared=shared)
    np.testing.assert_allclose(attend(*arrays), definition(*arrays), atol=2e-5)


@pytest.mark.parametrize("queries", [1, 6])
@pytest.mark.parametrize("page_size", [4, 16])
def test_a_row_is_the_same_to_the_last_bit_whatever_the_others_and_the_tables_width(queries, page_size):
    starts = np.random.default_rng(1).integers(0, 300, 24)
    query, key_pages, value_pages, tables, starts = problem(2, starts, queries, page_size)
    ours = np.asarray(attend(query, key_pages, value_pages, tables, starts))
    wide = np.pad(tables, ((0, 0), (0, 41)), constant_values=3)
    np.testing.assert_array_equal(attend(query, key_pages, value_pages, wide, starts), ours)
    order = np.random.default_rng(3).permutation(24)
    np.testing.assert_array_equal(attend(query[order], key_pages, value_pages, tables[order], starts[order]), ours[order])
    lonely = np.where(np.arange(24) == 5, starts, 0)  # the others end at once, with less to see
    np.testing.assert_array_equal(attend(query, key_pages, value_pages, tables, lonely)[5], ours[5])


def test_a_block_of_queries_sees_what_single_ones_see():
    query, key_pages, value_pages, tables, starts = problem(4, [0, 9, 70], 5)
    block = attend(query, key_pages, value_pages, tables, starts)
    for place in range(5):
        single = attend(query[:, place : place + 1], key_pages, value_pages, tables, starts + place)
        np.testing.assert_allclose(single[:, 0], block[:, place], atol=1e-6)


@settings(max_examples=15, deadline=None)
@given(seed=st.integers(0, 2**31), page_size=st.sampled_from([1, 3, 8]), queries=st.sampled_from([1, 5]), rows=st.integers(1, 5))
def test_new_keys_go_where_the_table_says_and_nothing_else_changes(seed, page_size, queries, rows):
    random = np.random.default_rng(seed)
    width = 6
    tables = 1 + random.permutation(rows * width).reshape(rows, width).astype(np.int32)
    starts = random.integers(0, width * page_size - queries + 1, rows).astype(np.int32)
    counts = random.integers(0, queries + 1, rows).astype(np.int32)
    before = random.standard_normal((2, rows * width + 1, page_size, 4)).astype(np.float32)
    new = random.standard_normal((rows, queries, 2, 4)).astype(np.float32)
    wanted = before.copy()
    for row, count in enumerate(counts):
        for place in range(count):
            at = starts[row] + place
            wanted[:, tables[row, at // page_size], at % page_size] = new[row, place]
    after = np.asarray(jax.jit(write_pages)(jnp.asarray(before), jnp.asarray(new), tables, starts, counts))
    np.testing.assert_array_equal(after[:, 1:], wanted[:, 1:])  # page 0 is scrap


def decode_loop(key_pages, value_pages, query, tables, starts, mesh=None):
    """Three tokens a row, the pages in the loop's carry."""

    def step(carry):
        index, keys, values, query, starts = carry
        new, ones = query[:, :, : keys.shape[0]], jnp.ones_like(starts)
        keys, values = (write_pages(x, new, tables, starts, ones) for x in (keys, values))
        return index + 1, keys, values, query + paged_attention(query, keys, values, tables, starts, mesh=mesh), starts + 1

    return jax.lax.while_loop(lambda carry: carry[0] < 3, step, (0, key_pages, value_pages, query, starts))


def test_a_decode_loop_holds_the_pages_once():
    query, key_pages, value_pages, tables, starts = problem(5, [3, 40, 17, 30, 60, 61], page_size=16, head_dim=16, wider=2)
    key_pages, value_pages = (jnp.pad(x, ((0, 0), (0, 500), (0, 0), (0, 0))) for x in (key_pages, value_pages))
    compiled = jax.jit(decode_loop, donate_argnums=(0, 1)).lower(key_pages, value_pages, query, tables, starts).compile()
    shape = ",".join(map(str, key_pages.shape))
    assert f"[{shape}]" in compiled.as_text() and not re.search(rf"\[{shape}\]\S* copy(-start)?\(", compiled.as_text())
    pool = key_pages.nbytes
    assert compiled.memory_analysis().temp_size_in_bytes < pool, (compiled.memory_analysis().temp_size_in_bytes, pool)


@pytest.mark.parametrize(("heads", "divides"), [((4, 2), True), ((3, 1), False)])
def test_heads_divided_over_tensor_are_those_of_one_device(heads, divides):
    query, key_pages, value_pages, tables, starts = problem(6, [3, 40, 17], page_size=16, heads=heads[0], kv_heads=heads[1], wider=2)
    mesh = build_mesh(jax.devices()[:2], tensor=2)
    own = NamedSharding(mesh, P("tensor") if divides else P())
    wanted = jax.jit(decode_loop)(key_pages, value_pages, query, tables, starts)
    arrays = (*(jax.device_put(x, own) for x in (key_pages, value_pages)), query, tables, starts)
    compiled = jax.jit(decode_loop, donate_argnums=(0, 1), static_argnames="mesh").lower(*arrays, mesh=mesh).compile()
    if divides:
        pool = rf"\[{','.join(map(str, key_pages.shape))}\]"
        assert not re.search(pool, compiled.as_text())  # no device holds all heads
    for ours, theirs in zip(compiled(*arrays)[1:4], wanted[1:4], strict=True):
        np.testing.assert_allclose(ours, theirs, atol=1e-6)


@pytest.mark.parametrize("mesh", [None, {"tensor": 2}], ids=str)
@pytest.mark.parametrize("platform", ["tpu", "gpu"])
def test_the_kernels_are_the_plain_path(monkeypatch, platform, mesh):
    monkeypatch.setattr(paged, "platform_of", lambda mesh: platform)
    monkeypatch.setattr(kernels, "INTERPRET", True)
    mesh = mesh and build_mesh(jax.devices()[:2], **mesh)
    arrays = problem(7, [0, 15, 16, 300], page_size=16, heads=6, kv_heads=2, head_dim=128, wider=1, shared=1, dtype=jnp.bfloat16)
    with pltpu.force_tpu_interpret_mode() if platform == "tpu" else contextlib.nullcontext():
        ours = jax.jit(lambda *x: paged_attention(*x, "kernel", mesh))(*arrays)
    np.testing.assert_allclose(np.asarray(ours, np.float64), definition(*arrays), atol=0.02)


def test_auto_takes_a_kernel_for_decoding_where_there_is_one(monkeypatch):
    def text(platform, **changes):
        monkeypatch.setattr(paged, "platform_of", lambda mesh: platform)
        options = {"queries": 1, "page_size": 16, "head_dim": 128, "dtype": jnp.bfloat16} | changes
        arrays = problem(8, [3, 20], **options)
        traced = jax.jit(lambda *x: paged_attention(*x)).trace(*arrays)
        return traced.lower(lowering_platforms=({"gpu": "cuda"}.get(platform, platform),)).as_text()

    for platform, mark in (("tpu", "tpu_custom_call"), ("gpu", "triton")):
        assert mark in text(platform)
        assert mark not in text(platform, queries=4) and mark not in text(platform, dtype=jnp.float32)
    assert "tpu_custom_call" not in text("tpu", head_dim=64) and "triton" in text("gpu", head_dim=64) and "triton" not in text("gpu", page_size=12)


@pytest.mark.parametrize(
    ("platform", "changes", "words"),
    [
        ("cpu", {}, "tpu and gpu.*cpu"),
        ("tpu", {"dtype": jnp.float32}, "bfloat16.*float32"),
        ("tpu", {"head_dim": 64}, "multiples of 128.*64"),
        ("tpu", {"wider": 2**16}, f"{2**17} pages"),
        ("gpu", {"head_dim": 96}, "power of two.*96"),
        ("gpu", {"page_size": 12}, "power of two.*12"),
    ],
)
def test_a_kernel_that_is_not_there_is_refused_with_the_reason(monkeypatch, platform, changes, words):
    monkeypatch.setattr(paged, "platform_of", lambda mesh: platform)
    options = {"page_size": 16, "head_dim": 128, "dtype": jnp.bfloat16} | changes
    wider = options.pop("wider", 0)
    *arrays, tables, starts = problem(9, [3, 20], **options)
    with pytest.raises(ConfigError, match=rf"'model\.attention=kernel'.*{words}.*model\.attention=auto"):
        paged_attention(*arrays, np.pad(tables, ((0, 0), (0, wider))), starts, backend="kernel")


PROGRAM = """
import jax, jax.numpy as jnp
from jax.experimental import topologies
from jax.sharding import NamedSharding, PartitionSpec as P
from areal_jax.cluster.meshes import build_mesh
from areal_jax.models.paged import paged_attention

jax.config.update("jax_platforms", "cpu")
mesh = build_mesh(topologies.get_topology_desc(platform="tpu", topology_name="v5e:2x2").devices, tensor=4)

def text(queries, heads, kv_heads, head_dim, page_size):
    def shaped(shape, dtype, *spec):
        return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, P(*spec)))

    query = shaped((8, queries, heads, head_dim), jnp.bfloat16, None, None, "tensor")
    pages = shaped((kv_heads, 65, page_size, head_dim), jnp.bfloat16, "tensor")
    step = jax.jit(lambda *x: paged_attention(*x, mesh=mesh))
    return step.lower(query, pages, pages, shaped((8, 40), jnp.int32), shaped((8,), jnp.int32)).compile().as_text()

decode = [text(1, heads, 4, 128, page_size) for heads, page_size in ((4, 16), (12, 32), (32, 1))]
plain = [text(8, 8, 4, 128, 16), text(1, 8, 4, 64, 16)]
print("kernels", *(x.count("tpu_custom_call") for x in decode), "plain", *(x.count("tpu_custom_call") for x in plain))
"""


def test_decoding_compiles_for_a_tpu():
    """Ahead of time, without a TPU."""
    printed = run_with_libtpu(PROGRAM)
    with_kernel, without = printed.split("kernels")[1].split("plain")
    assert all(int(count) > 0 for count in with_kernel.split()) and all(int(count) == 0 for count in without.split()), printed
