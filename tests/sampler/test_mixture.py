"""Decoding with a mixture of experts: every token's log-prob is the packed forward pass's, on any mesh."""

import jax
import numpy as np
import pytest

from areal_jax.models.architecture import ModelConfig
from areal_jax.models.policy import packed_logits, param_shapes
from areal_jax.sampler.driver import RolloutDriver
from areal_jax.types import WeightUpdate

LENGTH, SEED = 32, 5


@pytest.fixture(scope="module")
def mixture():
    sizes = {"vocab_size": 40, "layers": 2, "hidden_size": 32, "heads": 4, "kv_heads": 2, "head_dim": 8, "mlp_size": 48, "eos_ids": (1, 5)}
    return ModelConfig("qwen3_moe", **sizes, experts=8, experts_per_token=2, expert_mlp_size=16)


@pytest.fixture(scope="module")
def params(mixture):
    random = np.random.default_rng(0)

    def leaf(shape):
        if len(shape.shape) == 1:
            return (1.0 + 0.3 * random.standard_normal(shape.shape)).astype(np.float32)
        return (1.2 * shape.shape[-2] ** -0.5 * random.standard_normal(shape.shape)).astype(np.float32)

    return jax.tree.map(leaf, param_shapes(mixture))


@pytest.mark.parametrize("mesh", [(1, 1, 1), (2, 1, 2), (1, 2, 1)])
def test_every_token_is_the_policys(mesh, mixture, params, engine_of, run, requests, judge):
    engine = engine_of(mesh=mesh, model=mixture)
    trajectories = run(RolloutDriver(engine, WeightUpdate(0, engine.load_params(params)), seed=SEED), requests[:6])
    forward = jax.jit(packed_logits, static_argnums=0)
    for request in requests[:6]:
        trajectory = trajectories[request.key]
        sequence = np.zeros((1, LENGTH), np.int32)
        whole = np.concatenate([request.prompt_tokens, trajectory.tokens])
        sequence[0, : len(whole)] = whole
        positions, segments = np.arange(LENGTH, dtype=np.int32)[None], (np.arange(LENGTH) < len(whole)).astype(np.int32)[None]
        logits = np.asarray(forward(mixture, params, sequence, positions, segments))[0].astype(np.float64)
        judge(request, trajectory, logits=lambda _, logits=logits: logits)
