"""Schedules against their formulas, Muon against what it promises."""

import contextlib
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from areal_jax.config import base_config
from areal_jax.trainer.checkpoint import Checkpointer
from areal_jax.trainer.step import MUON_RMS, abstract, float32, make_optimizer, make_schedule, new_state, place, update


@pytest.mark.parametrize("name", ["constant", "cosine", "linear"])
@pytest.mark.parametrize("warm", [0, 1, 4])
def test_schedules_follow_their_formulas(name, warm):
    t = base_config().trainer
    t.learning_rate, t.warmup_steps, t.steps, t.schedule = 0.8, warm, 24, name
    rates = jax.jit(jax.vmap(make_schedule(t)))(jnp.arange(30))
    for step, got in enumerate(rates):
        past = min(1.0, max(0, step - warm) / (24 - warm))
        fall = {"constant": 1.0, "cosine": 0.5 * (1 + math.cos(math.pi * past)), "linear": 1 - past}[name]
        want = 0.8 * ((step + 1) / warm if step < warm else fall)
        assert float(got) == pytest.approx(want, abs=1e-6), step


def test_a_run_shorter_than_its_warm_up_has_a_schedule():
    t = base_config().trainer
    t.steps, t.warmup_steps = 2, 5
    assert float(make_schedule(t)(1)) == pytest.approx(t.learning_rate * 2 / 5)


def muon(**changes):
    section = base_config().trainer
    section.update(optimizer="muon", weight_decay=0.0, grad_clip=1e9, **changes)
    return make_optimizer(section)


def test_muon_orthogonalises_the_blocks_matrices_and_gives_the_rest_to_adam(model, params):
    optimizer, random = muon(), np.random.default_rng(0)

    def gradient_of(leaf):
        drawn = random.standard_normal(leaf.shape)
        if leaf.ndim == 2:  # none of its singular values so small that five iterations would not raise it
            left, values, right = np.linalg.svd(drawn, full_matrices=False)
            drawn = left * np.maximum(values, 0.2 * values[0]) @ right
        return drawn.astype(np.float32)

    gradients = jax.tree.map(gradient_of, params)
    direction, _ = optimizer.update(gradients, optimizer.init(params), params)
    kinds = {"matrix": 0, "other": 0}
    for (path, step), gradient in zip(jax.tree_util.tree_leaves_with_path(direction), jax.tree.leaves(gradients), strict=True):
        matrix = path[0].key == "layers" and step.ndim == 2
        kinds["matrix" if matrix else "other"] += 1
        if matrix:
            values = np.linalg.svd(np.asarray(step, np.float64), compute_uv=False) / (MUON_RMS * math.sqrt(max(step.shape)))
            assert values.min() > 0.5 and values.max() < 1.4, (jax.tree_util.keystr(path), values)
            assert np.sum(np.asarray(step) * gradient) > 0, "downhill"
        else:
            # Adam with Nesterov's momentum: β₁·m + (1 - β₁)·g with the bias corrections of the next and of this step, over |g|
            np.testing.assert_allclose(step, (1 + 0.9 / 1.9) * np.sign(gradient), atol=2e-3, err_msg=jax.tree_util.keystr(path))
    assert kinds["matrix"] == 7 and kinds["other"] > 3


@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_moments_are_float32_lie_like_their_parameters_and_do_not_depend_on_the_mesh(model, params, mesh_of, tmp_path, name):
    section = base_config().trainer
    section.optimizer = name
    optimizer, random = make_optimizer(section), np.random.default_rng(1)
    gradients = jax.tree.map(lambda leaf: random.standard_normal(leaf.shape).astype(np.float32), params)
    ends = []
    for axes in ({}, {"fsdp": 2, "tensor": 2}):
        here = place(model, mesh_of(**axes), optimizer, "bfloat16")
        half = jax.tree.map(lambda leaf, sharding: jax.device_put(jnp.asarray(leaf, jnp.bfloat16), sharding), params, here.state.params)
        state = jax.jit(lambda p: new_state(optimizer, p), out_shardings=here.state)(half)
        placed = jax.device_put(gradients, here.state.params)
        step = jax.jit(lambda s, g: update(optimizer, s, g, 0.1, 1e9)[0], out_shardings=here.state)
        state = step(state, placed)
        floats = [leaf for leaf in jax.tree.leaves(state.opt_state) if leaf.ndim]
        assert {leaf.dtype for leaf in floats} == {jnp.dtype("float32")}
        lies = {jax.tree_util.keystr(path): leaf.sharding for path, leaf in jax.tree_util.tree_leaves_with_path(state.params)}
        moments = [(jax.tree_util.keystr(path), leaf) for path, leaf in jax.tree_util.tree_leaves_with_path(state.opt_state) if leaf.ndim]
        moments = [(where, leaf) for where, leaf in moments if not where.endswith("ns_coeffs")]  # Muon's own constants
        assert len(moments) >= len(lies), "each parameter has one moment at least"
        for where, leaf in moments:
            [sharding] = [sharding for name, sharding in lies.items() if where.endswith(name)]
            assert leaf.sharding.is_equivalent_to(sharding, leaf.ndim), where
        ends.append(jax.device_get(float32(state.params)))
    with contextlib.closing(Checkpointer(tmp_path, keep=1)) as checkpoints:
        checkpoints.save(1, state, {})
        checkpoints.wait(60.0)
        back, _ = checkpoints.restore(1, abstract(state, here.state))
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(back), jax.device_get(state))
    assert jax.tree.structure(back) == jax.tree.structure(state)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=0, atol=0.02), *ends)
