"""The accelerators' attention kernels: their numbers on the CPU by interpreter or by the same library's plain code, and that they compile for a TPU."""

import importlib.util

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from tpu_compiler import run_with_libtpu

from areal_jax.cluster.meshes import build_mesh
from areal_jax.config import ConfigError
from areal_jax.models import attention, kernels
from areal_jax.models.architecture import ModelConfig
from areal_jax.models.attention import chosen_backend, packed_attention, plain_attention, segment_starts
from areal_jax.models.axes import logical_to_mesh
from areal_jax.models.forward import ForwardSettings, packed_logprobs
from areal_jax.models.policy import param_shapes
from areal_jax.models.sharding import named_shardings, param_specs

LENGTH = 512


@pytest.fixture(scope="module")
def inputs():
    random = np.random.default_rng(0)
    query, key, value, weights = (jnp.asarray(random.standard_normal((2, LENGTH, heads, 64)), jnp.float32) for heads in (4, 2, 2, 4))
    segments = np.sort(random.integers(0, 6, (2, LENGTH)), 1)[:, ::-1].copy()
    return query, key, value, jnp.asarray(segments), weights


@pytest.fixture(scope="module")
def wanted(inputs):
    *heads, segments, weights = inputs
    return jax.jit(jax.value_and_grad(lambda *x: jnp.sum(plain_attention(*x, segment_starts(segments), 0) * weights), argnums=(0, 1, 2)))(*heads)


@pytest.fixture
def as_tpu(monkeypatch):
    """Attention as on a TPU, in float32."""
    monkeypatch.setattr(attention, "platform_of", lambda mesh: "tpu")
    monkeypatch.setattr(attention, "obstacle", lambda *_: "")


@pytest.mark.parametrize("axes", [{}, {"context": 2, "tensor": 2}, {"data": 2, "context": 4}, {"tensor": 4}], ids=str)
def test_splash_attention_is_plain_attention(inputs, wanted, as_tpu, monkeypatch, axes):
    monkeypatch.setattr(kernels, "INTERPRET", True)
    *heads, segments, weights = inputs
    mesh = build_mesh(jax.devices()[: int(np.prod(list(axes.values())))], **axes)
    value, gradient = jax.jit(
        jax.value_and_grad(lambda *x: jnp.sum(packed_attention(*x, segments, "kernel", mesh) * weights), argnums=(0, 1, 2)),
    )(*heads)
    assert float(value) == pytest.approx(float(wanted[0]), rel=1e-5)
    for ours, theirs in zip(gradient, wanted[1], strict=True):
        np.testing.assert_allclose(ours, theirs, atol=1e-5)


@pytest.mark.parametrize("part", [None, 1])
def test_tokamax_attention_is_plain_attention(inputs, monkeypatch, part):
    pytest.importorskip("tokamax")
    monkeypatch.setattr(kernels, "GPU_IMPLEMENTATIONS", ("xla_chunked",))
    query, key, value, segments, _ = inputs
    starts, offset = segment_starts(segments), 0
    if part is not None:  # the second of four devices of a context axis
        offset = part * LENGTH // 4
        query, starts = query[:, offset : offset + LENGTH // 4], starts[:, offset : offset + LENGTH // 4]
    ours = kernels.tokamax_attention(query, key, value, starts, offset)
    np.testing.assert_allclose(ours, plain_attention(query, key, value, starts, offset), atol=2e-5)


def test_auto_takes_a_kernel_where_there_is_one_and_else_what_the_length_allows(monkeypatch):
    half, full = jnp.bfloat16, jnp.float32
    assert chosen_backend("auto", "cpu", 1024, 1024, half) == "plain" and chosen_backend("auto", "cpu", 1025, 1025, half) == "blockwise"
    assert chosen_backend("auto", "tpu", 4096, 1024, half) == "kernel" and chosen_backend("auto", "tpu", 4096, 1024, full) == "blockwise"
    assert chosen_backend("auto", "tpu", 72, 72, half) == "plain" and chosen_backend("plain", "tpu", 4096, 4096, half) == "plain"
    for platform, queries, dtype, words in (("cpu", 512, half, "tpu and gpu.*cpu"), ("tpu", 100, half, "multiples of 128.*100"), ("tpu", 512, full, "float32")):
        with pytest.raises(ConfigError, match=rf"model\.attention=kernel.*{words}.*model\.attention=auto"):
            chosen_backend("kernel", platform, queries, queries, dtype)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"extra 'gpu'.*model\.attention=blockwise"):
        chosen_backend("auto", "gpu", 4096, 4096, half)


def test_the_kernel_is_in_the_program_for_a_tpu(inputs, as_tpu):
    *heads, segments, weights = inputs
    mesh = build_mesh(jax.devices()[:4], context=2, tensor=2)
    gradient = jax.jit(jax.grad(lambda *x: jnp.sum(packed_attention(*x, segments, "auto", mesh).astype(jnp.float32) * weights), argnums=(0, 1, 2)))
    lowered = gradient.trace(*(x.astype(jnp.bfloat16) for x in heads)).lower(lowering_platforms=("tpu",))
    assert lowered.as_text().count("tpu_custom_call") >= 3  # forward, gradient of queries, gradient of keys and values


PROGRAM = """
import jax, jax.numpy as jnp
from jax.experimental import topologies
from jax.sharding import NamedSharding
from areal_jax.cluster.meshes import build_mesh
from areal_jax.models.architecture import ModelConfig
from areal_jax.models.axes import logical_to_mesh
from areal_jax.models.forward import ForwardSettings, packed_logprobs
from areal_jax.models.policy import param_shapes
from areal_jax.models.sharding import named_shardings, param_specs

jax.config.update("jax_platforms", "cpu")
mesh = build_mesh(topologies.get_topology_desc(platform="tpu", topology_name="v5e:2x2").devices, fsdp=2, context=2)
model = ModelConfig("qwen2", 1024, layers=1, hidden_size=128, heads=2, kv_heads=1, head_dim=64, mlp_size=128, dtype="bfloat16")
shapes = param_shapes(model)
shardings = named_shardings(mesh, param_specs(model), shapes)
params = jax.tree.map(lambda s, where: jax.ShapeDtypeStruct(s.shape, s.dtype, sharding=where), shapes, shardings)
row = jax.ShapeDtypeStruct((2, 512), jnp.int32, sharding=NamedSharding(mesh, logical_to_mesh("batch", "length")))
settings = ForwardSettings(remat="dots", chunk=128, mesh=mesh)
step = jax.jit(jax.grad(lambda p, *rows: packed_logprobs(model, p, *rows, 1.0, settings)[0].sum()), out_shardings=shardings)
text = step.lower(params, row, row, row, row).compile().as_text()
print("kernels", text.count("splash_mha_fwd"), text.count("splash_mha_dq"), text.count("splash_mha_dkv"))
"""


def test_the_training_forward_compiles_for_a_tpu():
    """Ahead of time, without a TPU."""
    printed = run_with_libtpu(PROGRAM)
    assert all(int(count) > 0 for count in printed.split("kernels")[1].split()), printed


@pytest.mark.parametrize("platform", ["tpu", "cuda"])
def test_the_training_forward_lowers_for_accelerators(platform):
    """Everything but the kernels is the same program on every platform."""
    model = ModelConfig("qwen3", 64, layers=2, hidden_size=32, heads=4, kv_heads=2, head_dim=8, mlp_size=32, dtype="bfloat16")
    mesh = build_mesh(jax.devices()[:8], fsdp=2, context=2, tensor=2)
    settings = ForwardSettings("blockwise", True, "dots", 16, mesh)
    row = jax.ShapeDtypeStruct((2, 64), jnp.int32, sharding=NamedSharding(mesh, logical_to_mesh("batch", "length")))
    shapes = jax.tree.map(
        lambda s, where: jax.ShapeDtypeStruct(s.shape, s.dtype, sharding=where),
        param_shapes(model),
        named_shardings(mesh, param_specs(model), param_shapes(model)),
    )
    step = jax.jit(jax.grad(lambda p, *rows: packed_logprobs(model, p, *rows, 1.0, settings)[0].sum()))
    text = step.trace(shapes, row, row, row, row).lower(lowering_platforms=(platform,)).as_text()
    assert "stablehlo.while" in text and "manual_computation" in text
