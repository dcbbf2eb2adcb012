"""Meshes against counts worked out by hand."""

import subprocess
import sys

import jax
import pytest
from jax.sharding import AxisType

from areal_jax import config as configuration
from areal_jax.cluster import meshes

AXES = ("data", "fsdp", "context", "tensor")


def run_config(**cluster):
    config = configuration.base_config()
    for key, value in cluster.items():
        configuration.put(config, key.replace("__", "."), value)
    return configuration.validate(config)


@pytest.mark.parametrize(
    ("host", "trainer_axes", "sampler_axes", "counts", "trainer", "sampler"),
    [
        (1, "", "", (0, 0), (1, 1, 1, 1), (1, 1, 1, 1)),
        (2, "", "", (0, 0), (1, 1, 1, 1), (1, 1, 1, 1)),
        (4, "", "", (0, 0), (2, 1, 1, 1), (2, 1, 1, 1)),
        (4, "fsdp=2", "tensor=2", (2, 2), (1, 2, 1, 1), (1, 1, 1, 2)),
        (8, "fsdp=2,tensor=2", "", (4, 4), (1, 2, 1, 2), (4, 1, 1, 1)),
        (8, "tensor=2", "tensor=2", (2, 4), (2, 1, 1, 2), (1, 1, 1, 2)),
        (8, "context=2,tensor=2", "tensor=4", (4, 4), (1, 1, 2, 2), (1, 1, 1, 4)),
        (5, "", "", (1, 4), (4, 1, 1, 1), (1, 1, 1, 1)),
    ],
)
def test_shapes(host, trainer_axes, sampler_axes, counts, trainer, sampler):
    config = run_config(cluster__host_devices=host, cluster__sampler_devices=counts[0], cluster__trainer_devices=counts[1])
    configuration.put(config, "cluster.mesh.trainer", trainer_axes)
    configuration.put(config, "cluster.mesh.sampler", sampler_axes)
    made = meshes.make_meshes(config)
    assert tuple(made.trainer.shape.values()) == trainer
    assert tuple(made.sampler.shape.values()) == sampler
    for mesh in (made.trainer, made.sampler, made.everyone):
        assert mesh.axis_names == AXES
        assert mesh.axis_types == (AxisType.Auto,) * 4
    ours, theirs = set(made.trainer.devices.flat), set(made.sampler.devices.flat)
    assert made.shared == (host == 1)
    assert (ours == theirs) if made.shared else not ours & theirs
    assert set(made.everyone.devices.flat) <= ours | theirs
    assert config.sft.rows % (made.everyone.shape["data"] * made.everyone.shape["fsdp"]) == 0
    assert tuple(made.everyone.shape[axis] for axis in AXES[1:]) == trainer[1:]
    assert "trainer" in made.describe()


def test_everyone_takes_as_many_devices_as_the_rows_allow():
    config = run_config(cluster__host_devices=6, trainer__micro_batch_rows=9, rollout__slots=63)
    assert meshes.make_meshes(config).everyone.size == 4  # 16 rows: 6 and 5 do not divide them
    configuration.put(config, "sft.rows", 18)
    assert meshes.make_meshes(config).everyone.size == 6


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"cluster__host_devices": 2, "cluster__sampler_devices": 2, "cluster__trainer_devices": 1}, "cluster.sampler_devices"),
        ({"cluster__host_devices": 6, "cluster__trainer_devices": 3, "cluster__sampler_devices": 2}, "trainer.micro_batch_rows"),
        ({"cluster__host_devices": 4, "sft__rows": 3, "cluster__mesh__trainer": "fsdp=2"}, "sft.rows"),
        ({"cluster__host_devices": 4, "cluster__mesh__trainer": "fsdp=3"}, "cluster.mesh.trainer"),
    ],
)
def test_what_does_not_fit_is_refused_by_name(changes, words):
    config = configuration.base_config()
    for key, value in changes.items():
        configuration.put(config, key.replace("__", "."), value)
    with pytest.raises(configuration.ConfigError, match=words):
        meshes.make_meshes(config)


def test_host_devices_after_the_first_use():
    assert len(jax.devices()) == 8
    meshes.set_host_devices(run_config(cluster__host_devices=3))
    with pytest.raises(configuration.ConfigError, match="JAX_NUM_CPU_DEVICES=9"):
        meshes.set_host_devices(run_config(cluster__host_devices=9))


def test_a_new_process_gets_its_devices():
    program = (
        "import os, jax; os.environ.pop('XLA_FLAGS', None); from areal_jax import config as c; from areal_jax.cluster import meshes;"
        "x = c.base_config(); c.put(x, 'cluster.host_devices', 3); x = c.validate(x); meshes.set_host_devices(x); print(len(jax.devices('cpu')))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=100, check=True)
    assert done.stdout.strip() == "3"
