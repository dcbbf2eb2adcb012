"""Pushing adapters: the whole policy arrives, and only adapters travel."""

import contextlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from areal_jax.cluster.meshes import build_mesh
from areal_jax.models.adapters import join, split
from areal_jax.models.architecture import Lora, ModelConfig
from areal_jax.models.policy import param_shapes
from areal_jax.models.sharding import named_shardings, param_specs
from areal_jax.sampler.engine import SamplerEngine
from areal_jax.weights.adapters import AdapterPusher

MODEL = ModelConfig(
    "qwen3", vocab_size=96, layers=2, hidden_size=48, heads=8, kv_heads=4, head_dim=6, mlp_size=96, lora=Lora(4, 8.0, ("query", "value", "down"))
)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_adapters_travel_and_the_rest_stays(dtype):
    trainer, sampler = build_mesh(jax.devices()[:2], fsdp=2), build_mesh(jax.devices()[2:6], data=2, tensor=2)
    random = np.random.default_rng(0)
    params = jax.tree.map(lambda leaf: random.normal(size=leaf.shape).astype(np.float32), param_shapes(MODEL))
    adapters, frozen = split(MODEL, jax.device_put(params, named_shardings(trainer, param_specs(MODEL), params)))
    pusher = AdapterPusher(trainer, sampler, MODEL, frozen, dtype)
    first = pusher.push(adapters, 3)
    with contextlib.ExitStack() as stack:
        stack.enter_context(jax.transfer_guard_device_to_host("disallow_explicit"))
        stack.enter_context(jax.transfer_guard_host_to_device("disallow_explicit"))
        second = pusher.push(jax.jit(lambda tree: jax.tree.map(jnp.negative, tree))(adapters), 4)
    engine = SamplerEngine(MODEL, sampler, slots=4, max_length=16, dtype=dtype)
    assert (first.version, second.version) == (3, 4)
    for update, sign in ((first, 1.0), (second, -1.0)):
        engine.check_params(update.params)
        wanted = join(jax.tree.map(lambda leaf, sign=sign: sign * leaf, split(MODEL, params)[0]), split(MODEL, params)[1])
        jax.tree.map(lambda got, want: np.testing.assert_array_equal(np.asarray(got), np.asarray(want.astype(dtype))), update.params, wanted)
        assert update.bytes == sum(leaf.size for leaf in jax.tree.leaves(adapters)) * jnp.dtype(dtype).itemsize
    held = [split(MODEL, update.params)[1] for update in (first, second)]
    assert all(a is b for a, b in zip(*map(jax.tree.leaves, held), strict=True)), "the frozen leaves are the same arrays"
