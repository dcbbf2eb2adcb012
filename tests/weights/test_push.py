"""The weight push: exact values, no host memory, no recompilation, no aliasing."""

import contextlib
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from areal_jax.models.architecture import ModelConfig
from areal_jax.models.policy import param_shapes
from areal_jax.models.sharding import named_shardings, param_specs
from areal_jax.weights import push

MODEL = ModelConfig("qwen2", vocab_size=96, layers=2, hidden_size=48, heads=8, kv_heads=4, head_dim=6, mlp_size=96)
AXES = ("data", "fsdp", "tensor")


def mesh(first, shape):
    count = int(np.prod(shape))
    return Mesh(np.array(jax.devices()[first : first + count]).reshape(shape), AXES, axis_types=(AxisType.Auto,) * 3)


@functools.cache
def host_params():
    random = np.random.default_rng(0)
    params = jax.tree.map(lambda leaf: random.normal(size=leaf.shape).astype(np.float32), param_shapes(MODEL))
    return params | {"odd": {"scale": np.arange(7, dtype=np.float32)}, "steps": {"scale": np.arange(5, dtype=np.int32)}}


def specs():
    return param_specs(MODEL) | {"odd": {"scale": P("tensor")}, "steps": {"scale": P()}}


def on(target):
    return jax.device_put(host_params(), named_shardings(target, specs(), host_params()))


@pytest.fixture
def compiled():
    names = []

    def listener(name, duration, **kwargs):
        if name == "/jax/core/compile/backend_compile_duration":
            names.append(name)

    jax.monitoring.register_event_duration_secs_listener(listener)
    yield names
    jax.monitoring.unregister_event_duration_listener(listener)


def no_host():
    """Any transfer between device and host raises, explicit ones too; between devices they are allowed."""
    stack = contextlib.ExitStack()
    stack.enter_context(jax.transfer_guard_device_to_host("disallow_explicit"))
    stack.enter_context(jax.transfer_guard_host_to_device("disallow_explicit"))
    return stack


CASES = [
    ((1, 1, 1), (1, 1, 1)),
    ((2, 1, 1), (1, 1, 2)),
    ((1, 2, 1), (2, 1, 1)),
    ((1, 2, 1), (1, 1, 2)),
    ((1, 1, 1), (3, 1, 1)),
    ((1, 1, 1), (1, 1, 4)),
    ((1, 4, 1), (1, 1, 2)),
    ((1, 2, 2), (1, 2, 1)),
    ((1, 2, 2), (2, 1, 2)),
    ((1, 2, 1), (3, 1, 2)),
    ((2, 1, 1), (1, 3, 2)),
    ((1, 1, 2), (1, 1, 6)),
    ((1, 3, 1), (1, 2, 2)),
    ((1, 4, 1), (1, 2, 2)),
    ((1, 2, 1), (1, 1, 4)),
]


@pytest.mark.parametrize(("trainer", "sampler"), CASES, ids=str)
def test_exact_and_device_only(trainer, sampler, compiled):
    here, there = mesh(0, trainer), mesh(int(np.prod(trainer)), sampler)
    pusher = push.WeightPusher(here, there, specs())
    params = on(here)
    expected = named_shardings(there, specs(), host_params())
    with no_host():
        update = pusher.push(params, 3)
        before = len(compiled)
        again = pusher.push(params, 4)
        assert len(compiled) == before
    assert (update.version, again.version) == (3, 4)
    assert update.bytes == sum(leaf.nbytes for leaf in jax.tree.leaves(host_params()))
    assert update.transfer_s > 0
    for name in (update, again):
        jax.tree.map(np.testing.assert_array_equal, jax.tree.map(np.asarray, name.params), host_params())
    jax.tree.map(lambda leaf, sharding: np.testing.assert_equal(leaf.sharding == sharding, True), update.params, expected)
    for leaf, reference in zip(jax.tree.leaves(update.params), jax.tree.leaves(host_params()), strict=True):
        for shard in leaf.addressable_shards:
            np.testing.assert_array_equal(np.asarray(shard.data), reference[shard.index])


def test_the_guard_catches_a_plain_device_put():
    here, there = mesh(0, (1, 2, 1)), mesh(2, (1, 1, 2))
    params = on(here)
    shardings = named_shardings(there, specs(), host_params())
    with no_host(), pytest.raises(Exception, match=r"Disallowed (device-to-host|host-to-device) transfer"):
        jax.block_until_ready(jax.device_put(params, shardings))


@pytest.mark.parametrize("first", [0, 2], ids=["shared", "apart"])
@pytest.mark.parametrize("dtype", [None, jnp.float32, jnp.bfloat16])
def test_pushed_arrays_outlive_the_trainers(first, dtype):
    here, there = mesh(0, (1, 1, 1)), mesh(first, (1, 1, 1))
    pusher = push.WeightPusher(here, there, specs(), dtype)
    params = on(here)
    with no_host():
        update = pusher.push(params, 0)
    step = jax.jit(lambda tree: jax.tree.map(lambda x: x * 0 - 1, tree), donate_argnums=0)
    for _ in range(3):
        params = step(params)
    jax.block_until_ready(params)
    expected = jax.tree.map(lambda x: x.astype(dtype) if dtype and x.dtype == np.float32 else x, host_params())
    jax.tree.map(np.testing.assert_array_equal, jax.tree.map(np.asarray, update.params), expected)
    assert update.params["steps"]["scale"].dtype == jnp.int32


def test_a_mesh_of_several_devices_may_be_shared():
    here = mesh(0, (1, 4, 1))
    there = Mesh(here.devices.reshape(1, 1, 4), AXES, axis_types=(AxisType.Auto,) * 3)
    pusher = push.WeightPusher(here, there, specs(), jnp.bfloat16)
    params = on(here)
    with no_host():
        update = pusher.push(params, 0)
    expected = jax.tree.map(lambda x: x.astype(jnp.bfloat16) if x.dtype == np.float32 else x, host_params())
    jax.tree.map(np.testing.assert_array_equal, jax.tree.map(np.asarray, update.params), expected)


def test_devices_in_part_common_are_refused():
    with pytest.raises(ValueError, match="all devices or none"):
        push.WeightPusher(mesh(0, (1, 2, 1)), mesh(1, (1, 2, 1)), specs())


def test_another_tree_is_refused_by_name():
    here, there = mesh(0, (1, 1, 1)), mesh(1, (1, 1, 1))
    pusher = push.WeightPusher(here, there, specs())
    params = on(here)
    pusher.push(params, 0)
    with pytest.raises(ValueError, match=r"'odd/scale' \(7,\) bfloat16, before 'odd/scale' \(7,\) float32"):
        pusher.push(params | {"odd": {"scale": params["odd"]["scale"].astype(jnp.bfloat16)}}, 1)


def test_chunks_bound_the_staging_and_change_nothing():
    here, there = mesh(0, (1, 2, 1)), mesh(2, (1, 1, 4))
    sizes = [leaf.nbytes for leaf in jax.tree.leaves(host_params())]
    assert push._divide(sizes, max(sizes)) != [tuple(range(len(sizes)))]
    for limit in (1, max(sizes), sum(sizes)):
        parts = push._divide(sizes, limit)
        assert [i for part in parts for i in part] == list(range(len(sizes)))
        assert all(len(part) == 1 or sum(sizes[i] for i in part) <= limit for part in parts)
    params = on(here)
    with no_host():
        update = push.WeightPusher(here, there, specs(), chunk_bytes=max(sizes)).push(params, 0)
    jax.tree.map(np.testing.assert_array_equal, jax.tree.map(np.asarray, update.params), host_params())


@pytest.mark.parametrize(("trainer", "sampler"), [((1, 1, 1), (1, 1, 4)), ((1, 2, 1), (1, 1, 4)), ((2, 1, 1), (1, 3, 2)), ((1, 3, 1), (1, 2, 2))], ids=str)
def test_nothing_communicates_on_the_sampler(trainer, sampler):
    here, there = mesh(0, trainer), mesh(int(np.prod(trainer)), sampler)
    pusher = push.WeightPusher(here, there, specs())
    pusher.push(on(here), 0)
    finishing = [chunk.finish for chunk in pusher._plan.chunks if chunk.finish is not None]
    assert finishing
    collectives = ("all-gather", "all-reduce", "all-to-all", "collective-permute", "reduce-scatter")
    for program in finishing:
        assert not [word for word in collectives if word in program.as_text()]
    crossing = jax.jit(lambda x: x, out_shardings=NamedSharding(there, P(None, ("fsdp", "tensor"))))
    naive = crossing.lower(jax.ShapeDtypeStruct((12, 12), jnp.float32, sharding=NamedSharding(there, P(("fsdp", "tensor"), None)))).compile()
    assert [word for word in collectives if word in naive.as_text()]
