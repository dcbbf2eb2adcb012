"""Checkpoints: exact, on other meshes, safe from donation, from kills and from a bad disk."""

import json
import os
import pathlib
import random
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import struct
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from areal_jax.trainer.checkpoint import Checkpointer, CheckpointError, abstract_like


@struct.dataclass
class State:
    params: dict
    opt_state: tuple
    step: jax.Array
    key: jax.Array


def mesh(first, count):
    return Mesh(np.array(jax.devices()[first : first + count]), ("fsdp",), axis_types=(AxisType.Auto,))


def new_state(target, value=1.0, dtype=jnp.bfloat16):
    params = {
        "kernel": jax.device_put(value * jax.random.normal(jax.random.key(1), (12, 6)), NamedSharding(target, P("fsdp"))),
        "norm": {"scale": jax.device_put(jnp.full(5, value, dtype), NamedSharding(target, P()))},
    }
    optimizer = optax.chain(optax.scale_by_adam(), optax.add_decayed_weights(0.1))
    _, opt_state = optimizer.update(params, optimizer.init(params), params)
    return State(params, opt_state, jax.device_put(jnp.int32(7), NamedSharding(target, P())), jax.random.key_data(jax.random.key(3)))


def same(a, b):
    assert jax.tree.structure(a) == jax.tree.structure(b)
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        assert x.dtype == y.dtype
        np.testing.assert_array_equal(np.asarray(x), np.asarray(y))


@pytest.fixture
def checkpointer(tmp_path):
    made = Checkpointer(tmp_path / "checkpoints", keep=2)
    yield made
    made.close()


def test_exact_on_another_mesh(checkpointer):
    assert checkpointer.latest() is None
    state = new_state(mesh(0, 4))
    logprobs = [float(x) for x in np.random.default_rng(0).normal(size=50).astype(np.float32)]
    meta = {"controller": {"logprobs": logprobs, "open": None}, "journal": 123456789012, "text": "η ≤ 4"}
    assert checkpointer.save(7, state, meta)
    checkpointer.wait(60.0)
    target = mesh(4, 3)
    abstract = jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=NamedSharding(target, P("fsdp") if leaf.shape == (12, 6) else P())), state
    )
    restored, facts = checkpointer.restore(checkpointer.latest(), abstract)
    same(restored, state)
    assert isinstance(restored, State) and isinstance(restored.opt_state[0], optax.ScaleByAdamState)
    assert restored.params["kernel"].sharding == NamedSharding(target, P("fsdp"))
    assert facts == meta == checkpointer.meta(7)
    assert [np.float32(x) for x in facts["controller"]["logprobs"]] == [np.float32(x) for x in logprobs]


def test_the_state_may_be_donated_at_once(checkpointer):
    step = jax.jit(lambda tree: jax.tree.map(lambda x: x * 0 - 1, tree), donate_argnums=0)
    tree = {f"w{i}": jnp.full((400, 500 + i), float(i)) for i in range(6)}
    abstract = abstract_like(tree)
    for number in (1, 2):
        checkpointer.save(number, tree, {})
        for _ in range(4):
            tree = step(tree)
        jax.block_until_ready(tree)
        tree = {f"w{i}": leaf * 0 + i for i, leaf in enumerate(tree.values())}
    for number in (1, 2):
        restored, _ = checkpointer.restore(number, abstract)
        for i in range(6):
            np.testing.assert_array_equal(np.asarray(restored[f"w{i}"]), i)


def test_the_newest_are_kept_and_none_is_written_twice(checkpointer):
    state = new_state(mesh(0, 1))
    for step in (1, 2, 5):
        assert checkpointer.save(step, state, {"step": step})
    assert not checkpointer.save(5, state, {"step": "another"})
    checkpointer.wait()
    assert checkpointer.steps() == [2, 5] and checkpointer.latest() == 5
    assert checkpointer.meta(5) == {"step": 5}
    again = Checkpointer(checkpointer.directory, keep=2)
    assert again.steps() == [2, 5]
    again.close()


def test_what_does_not_fit_is_refused_by_name(checkpointer):
    state = new_state(mesh(0, 1))
    checkpointer.save(1, state, {})
    checkpointer.wait()
    good = abstract_like(state)
    with pytest.raises(CheckpointError, match=r"'params/norm/scale' as float32\[5\]; it holds bfloat16\[5\]"):
        checkpointer.restore(1, good.replace(params=abstract_like(new_state(mesh(0, 1), dtype=jnp.float32)).params))
    wider = jax.ShapeDtypeStruct((13, 6), jnp.float32, sharding=good.params["kernel"].sharding)
    with pytest.raises(CheckpointError, match=r"'params/kernel' as float32\[13, 6\]; it holds float32\[12, 6\]"):
        checkpointer.restore(1, good.replace(params=good.params | {"kernel": wider}))
    with pytest.raises(CheckpointError, match=r"'params/more' as .*; it holds none"):
        checkpointer.restore(1, good.replace(params=good.params | {"more": wider}))
    with pytest.raises(CheckpointError, match="'params/norm/scale' as absent"):
        checkpointer.restore(1, good.replace(params={"kernel": good.params["kernel"]}))
    with pytest.raises(CheckpointError, match=r"step 3; it holds \[1\]"):
        checkpointer.restore(3, good)


def test_meta_must_be_json(checkpointer):
    with pytest.raises(TypeError, match="int32"):
        checkpointer.save(1, new_state(mesh(0, 1)), {"tokens": np.int32(3)})
    assert checkpointer.latest() is None


def test_a_place_that_cannot_be_written(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="could not open the checkpoints under"):
        Checkpointer(tmp_path / "file" / "checkpoints")


FULL_DISK = """
import pathlib, resource, signal, sys
import numpy as np
from areal_jax.trainer.checkpoint import Checkpointer, CheckpointError
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
checkpointer = Checkpointer(sys.argv[1], keep=1)
checkpointer.save(1, {"w": np.ones(10)}, {"step": 1})
checkpointer.wait()
resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, resource.RLIM_INFINITY))
try:
    checkpointer.save(2, {"w": np.random.default_rng(0).normal(size=1_000_000)}, {"step": 2})
    checkpointer.wait(60.0)
except CheckpointError as error:
    print("refused:", error)
print("latest:", checkpointer.latest())
again = Checkpointer(sys.argv[1], keep=1)
print("reopened:", again.latest(), again.meta(1))
sys.stdout.flush()
import os; os._exit(0)
"""


def test_a_full_disk_is_named_and_the_older_checkpoint_stays(tmp_path):
    """A limit on file sizes stands in for the full disk: the write fails in the middle."""
    done = subprocess.run([sys.executable, "-c", FULL_DISK, str(tmp_path / "checkpoints")], capture_output=True, text=True, timeout=100, check=True)
    assert f"under '{tmp_path / 'checkpoints'}'" in done.stdout and "refused: could not" in done.stdout, done.stdout + done.stderr
    assert "latest: 1" in done.stdout and "reopened: 1 {'step': 1}" in done.stdout


def test_killed_at_twenty_moments_of_a_save(tmp_path):
    """Each life must resume from the newest checkpoint that was whole, or from the one that became so as it died."""
    directory = tmp_path / "checkpoints"
    directory.mkdir()
    moments = random.Random(0)
    delays = ["2.0"] + [f"{moments.uniform(0.0, 0.4):.3f}" for _ in range(21)]
    environment = {k: v for k, v in os.environ.items() if k != "XLA_FLAGS"} | {"JAX_PLATFORMS": "cpu"}
    victim = pathlib.Path(__file__).with_name("checkpoint_victim.py")
    done = subprocess.run([sys.executable, str(victim), str(directory), *delays], capture_output=True, text=True, timeout=170, env=environment)
    assert done.returncode == 0, done.stderr
    lives = json.loads(done.stdout)
    whole, begun = 0, 0
    for number, life in enumerate(lives):
        assert life["restored"] is not None, f"life {number} did not resume: {done.stderr[-2000:]}"
        step, verdict = life["restored"]
        assert verdict == "OK" and whole <= step <= begun, f"life {number} resumed from {step}; {whole} was whole and {begun} begun"
        whole = max(step, life["whole"] or 0)
        begun = life["begun"]
    assert whole >= 1
    assert sum(bool(life["half_written"]) for life in lives[1:21]) >= 5, "too few kills fell into a save: the test shows nothing"
