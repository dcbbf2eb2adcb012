"""Training adapters: they alone move, and a checkpoint of them goes with its base."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from areal_jax.config import base_config
from areal_jax.config_fields import LORA_TARGETS
from areal_jax.models.adapters import add, merge
from areal_jax.models.architecture import Lora
from areal_jax.models.forward import ForwardSettings
from areal_jax.models.policy import packed_logits
from areal_jax.trainer.checkpoint import CheckpointError
from areal_jax.trainer.supervised import SupervisedTrainer, pack_demonstrations
from areal_jax.trainer.trainer import Trainer

LORA = Lora(4, 8.0, LORA_TARGETS)


@pytest.fixture(scope="module")
def adapted(model, params):
    """(architecture with adapters, the base with fresh ones)."""
    with_lora = dataclasses.replace(model, lora=LORA)
    return with_lora, add(with_lora, params, jax.random.key(0))


def leaf_names(tree):
    return {jax.tree_util.keystr(path, simple=True, separator="/").rsplit("/", 1)[-1] for path, _ in jax.tree_util.tree_leaves_with_path(tree)}


@pytest.mark.parametrize("axes, param_dtype", [({}, "float32"), ({"fsdp": 2, "tensor": 2}, "bfloat16")])
def test_a_step_moves_the_adapters_alone(config, adapted, params, mesh_of, batch_of, axes, param_dtype):
    model, start = adapted
    config.model.param_dtype = param_dtype
    trainer = Trainer(config, model, mesh_of(**axes), start)
    before, base = jax.device_get(trainer.params), trainer.base
    assert leaf_names(before) == {"lora_a", "lora_b"} and {leaf.dtype for leaf in jax.tree.leaves(before)} == {jnp.dtype("float32")}
    moments = sum(leaf.size for leaf in jax.tree.leaves(trainer.state.opt_state) if leaf.ndim)
    assert moments == 2 * sum(leaf.size for leaf in jax.tree.leaves(before))
    jax.tree.map(lambda got, want: np.testing.assert_array_equal(got, np.asarray(want).astype(param_dtype)), jax.device_get(trainer.frozen), params)
    for step in range(2):
        metrics = trainer.step(trainer.build(batch_of(step)))
        assert metrics["grad_norm"] > 0
    jax.tree.map(lambda got, want: np.testing.assert_array_equal(got, np.asarray(want).astype(param_dtype)), jax.device_get(trainer.frozen), params)
    assert all(np.abs(a - b).max() > 1e-4 for a, b in zip(jax.tree.leaves(jax.device_get(trainer.params)), jax.tree.leaves(before), strict=True))
    assert trainer.base == base


def test_warm_up_of_adapters_learns_and_merges(adapted, params, mesh_of):
    model, start = adapted
    random = np.random.default_rng(0)
    pairs = [
        (prompt, np.r_[prompt[::-1], 1].astype(np.int32)) for prompt in (random.integers(2, 24, random.integers(2, 6)).astype(np.int32) for _ in range(60))
    ]
    section = base_config().sft
    section.steps, section.rows, section.warmup_steps, section.learning_rate = 40, 8, 4, 2e-2
    mesh = mesh_of(fsdp=2)
    trainer = SupervisedTrainer(section, model, mesh, start, pack_demonstrations(pairs, 32), seed=0, forward=ForwardSettings(mesh=mesh))
    losses = [float(trainer.step()["loss"]) for _ in range(30)]
    assert np.mean(losses[-5:]) < 0.8 * losses[0]
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(trainer.frozen), params)
    row = (random.integers(2, 24, (2, 8)).astype(np.int32), np.broadcast_to(np.arange(8, dtype=np.int32), (2, 8)), np.ones((2, 8), np.int32))
    forward = jax.jit(packed_logits, static_argnums=0)
    plain, merged = merge(model, jax.device_get(trainer.policy))
    np.testing.assert_allclose(forward(plain, merged, *row), forward(model, trainer.policy, *row), atol=1e-5)


def test_adapters_of_other_weights_are_refused(config, adapted, mesh_of):
    model, start = adapted
    trainer = SupervisedTrainer(
        base_config().sft, model, mesh_of(), start, pack_demonstrations([(np.array([2, 3], np.int32), np.array([4, 1], np.int32))], 8), 0, ForwardSettings()
    )
    trainer.check_base({"base": trainer.base})
    with pytest.raises(CheckpointError, match=r"weights they were trained on.*model\.path"):
        trainer.check_base({"base": "12345678"})
    with pytest.raises(CheckpointError, match="none"):
        trainer.check_base({})
