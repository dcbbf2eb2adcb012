"""What the training forward pass promises about memory, asked of the compiler; and rows of 32 thousand tokens."""

import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding

from areal_jax.cluster.meshes import build_mesh
from areal_jax.models import attention
from areal_jax.models.architecture import ModelConfig
from areal_jax.models.attention import segment_starts
from areal_jax.models.axes import logical_to_mesh
from areal_jax.models.blockwise import blockwise_attention
from areal_jax.models.forward import ForwardSettings, packed_logprobs
from areal_jax.models.policy import param_shapes
from areal_jax.models.sharding import named_shardings, param_specs

FLOAT = 4


def compiled(model, settings, rows, length):
    """The program of a gradient; its arguments are shapes."""
    shapes = param_shapes(model)
    row = jax.ShapeDtypeStruct((rows, length), jnp.int32)
    shardings = None
    if settings.mesh is not None:
        shardings = named_shardings(settings.mesh, param_specs(model), shapes)
        shapes = jax.tree.map(lambda shape, where: jax.ShapeDtypeStruct(shape.shape, shape.dtype, sharding=where), shapes, shardings)
        row = jax.ShapeDtypeStruct(row.shape, row.dtype, sharding=NamedSharding(settings.mesh, logical_to_mesh("batch", "length")))

    def loss(params, *arrays):
        logprobs, entropy = packed_logprobs(model, params, *arrays, 1.0, settings)
        return jnp.sum(logprobs), jnp.sum(entropy)

    return jax.jit(jax.grad(loss, has_aux=True), out_shardings=None if shardings is None else (shardings, None)).lower(shapes, *[row] * 4).compile()


def temporary(program):
    return program.memory_analysis().temp_size_in_bytes


def largest(program, kind="f32"):
    """Elements of the largest array of a type in the program."""
    return max(math.prod(map(int, dims.split(","))) for dims in re.findall(rf"\b{kind}\[([\d,]+)\]", program.as_text()))


@pytest.fixture(scope="module")
def by_layers():
    """(remat, layers) → bytes."""
    made = {}

    def measure(remat, layers):
        if (remat, layers) not in made:
            model = ModelConfig("llama", 32, layers=layers, hidden_size=32, heads=2, kv_heads=2, head_dim=16, mlp_size=128)
            made[remat, layers] = temporary(compiled(model, ForwardSettings("plain", True, remat, chunk=64), 4, 256))
        return made[remat, layers]

    return measure


def test_rematerialisation_leaves_of_a_block_its_input_or_its_products(by_layers):
    residual = 4 * 256 * 32 * FLOAT
    parameters = (4 * 32 * 32 + 3 * 32 * 128 + 64) * FLOAT
    grown = {remat: (by_layers(remat, 6) - by_layers(remat, 2)) / 4 for remat in ("none", "dots", "full")}
    assert grown["full"] == pytest.approx(residual + 2 * parameters, rel=0.5), "a block's input and its parameters and gradients in the stack"
    assert grown["full"] < 0.5 * grown["dots"] < 0.5 * grown["none"]


@pytest.mark.parametrize("axes", [{}, {"fsdp": 2, "context": 2, "tensor": 2}], ids=str)
def test_no_logits_of_all_tokens_exist(axes):
    tokens, vocabulary, chunk = 4096, 2048, 64
    model = ModelConfig("qwen2", vocabulary, layers=1, hidden_size=16, heads=2, kv_heads=2, head_dim=8, mlp_size=16)
    mesh = build_mesh(jax.devices()[:8], **axes) if axes else None
    logits = tokens * vocabulary // (8 if axes else 1)
    head = vocabulary * 16
    sizes = {}
    for size in (tokens, chunk):
        program = compiled(model, ForwardSettings("blockwise", chunk=size, mesh=mesh), 2, tokens // 2)
        sizes[size] = (largest(program), temporary(program))
    assert sizes[tokens][0] == logits and sizes[tokens][1] > logits * FLOAT
    # What remains is attention's blocks, a chunk of logits, the head and its gradient.
    assert sizes[chunk][0] <= max(logits // 4, head) and sizes[chunk][1] < 0.6 * sizes[tokens][1]


def test_blockwise_attentions_memory_is_linear_in_the_length():
    model = ModelConfig("llama", 32, layers=1, hidden_size=16, heads=2, kv_heads=1, head_dim=8, mlp_size=16)
    sizes = {length: temporary(compiled(model, ForwardSettings("blockwise", chunk=256), 1, length)) for length in (4096, 16384)}
    assert sizes[16384] < 4.5 * sizes[4096] and sizes[16384] < 0.1 * 2 * 16384**2 * FLOAT


def segments_of(length, sizes):
    segments = np.zeros((1, length), np.int32)
    for number, end in enumerate(np.cumsum(sizes)):
        segments[0, end - sizes[number] : end] = number + 1
    return segments


def test_a_row_of_32_thousand_tokens(monkeypatch):
    """Forward against plain attention row block by row block; backward runs, within memory that all scores would fill many times."""
    length = 32768
    model = ModelConfig("qwen2", 24, layers=1, hidden_size=8, heads=2, kv_heads=1, head_dim=4, mlp_size=8)
    random = np.random.default_rng(0)
    params = jax.tree.map(lambda s: random.standard_normal(s.shape).astype(np.float32), param_shapes(model))
    tokens = random.integers(0, 24, (1, length)).astype(np.int32)
    segments = segments_of(length, [12000, 300, 20000])
    positions = np.arange(length)[None] - np.asarray(segment_starts(jnp.asarray(segments)))
    arrays = (tokens, positions.astype(np.int32), segments, np.roll(tokens, -1, 1))

    def logprobs(params, backend):
        return packed_logprobs(model, params, *arrays, 1.0, ForwardSettings(backend))[0]

    program = (
        jax.jit(jax.value_and_grad(lambda p: (lambda x: (jnp.sum(x * (segments > 0)), x))(logprobs(p, "blockwise")), has_aux=True)).lower(params).compile()
    )
    assert temporary(program) < 100e6
    (_, ours), gradient = program(params)
    assert all(np.isfinite(leaf).all() and np.abs(leaf).max() > 0 for leaf in jax.tree.leaves(gradient))
    plain, block = attention.plain_attention, 256

    def by_rows(query, key, value, starts, offset):
        parts = jax.lax.map(
            lambda i: plain(
                *(jax.lax.dynamic_slice_in_dim(x, i * block, block, 1) if x is query else x for x in (query, key, value)),
                jax.lax.dynamic_slice_in_dim(starts, i * block, block, 1),
                offset + i * block,
            ),
            jnp.arange(length // block),
        )
        return parts.swapaxes(0, 1).reshape(query.shape)

    monkeypatch.setattr(attention, "plain_attention", by_rows)
    theirs = jax.jit(logprobs, static_argnums=1)(params, "plain")
    np.testing.assert_allclose(np.asarray(ours)[segments > 0], np.asarray(theirs)[segments > 0], atol=2e-4)


@pytest.mark.parametrize(("heads", "kv_heads", "length", "block"), [(4, 2, 2048, 512), (2, 1, 700, 256), (3, 3, 40, 512)])
def test_blockwise_attention_is_plain_attention(heads, kv_heads, length, block):
    random = np.random.default_rng(1)
    query, key, value, weights = (jnp.asarray(random.standard_normal((1, length, n, 8)), jnp.float32) for n in (heads, kv_heads, kv_heads, heads))
    starts = segment_starts(jnp.asarray(segments_of(length, [length // 3, 1, length // 2])))

    def gradient(attend, **options):
        return jax.jit(jax.value_and_grad(lambda *x: jnp.sum(attend(*x, starts, 0, **options) * weights), argnums=(0, 1, 2)))(query, key, value)

    (ours, by_ours), (theirs, by_theirs) = gradient(blockwise_attention, block=block), gradient(attention.plain_attention)
    assert float(ours) == pytest.approx(float(theirs), rel=1e-5)
    for mine, other in zip(by_ours, by_theirs, strict=True):
        np.testing.assert_allclose(mine, other, atol=1e-5)


def test_a_block_s_gathered_parameters_are_not_kept_for_the_backward_pass():
    model = ModelConfig("qwen2", 64, 8, 256, 4, 2, 64, 1024)
    mesh = build_mesh(jax.devices(), fsdp=8)
    shapes = param_shapes(model)
    shardings = named_shardings(mesh, param_specs(model), shapes)
    params = jax.tree.map(lambda leaf, sharding: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding), shapes, shardings)
    row = jax.ShapeDtypeStruct((8, 64), jnp.int32, sharding=NamedSharding(mesh, logical_to_mesh("batch", "length")))
    blocks = 4 * sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(shapes["layers"]))

    def needed(remat):
        settings = ForwardSettings("plain", True, remat, 1024, mesh)
        gradient = jax.grad(lambda p, t: packed_logprobs(model, p, t, t, t, t, 1.0, settings)[0].sum())
        return jax.jit(gradient).lower(params, row).compile().memory_analysis().temp_size_in_bytes

    assert needed("none") - needed("full") < 0.8 * blocks
