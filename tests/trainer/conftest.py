"""A small policy and batches whose behaviour log-probs are chosen by the test."""

import dataclasses
import math

import jax
import numpy as np
import pytest

from areal_jax.cluster.meshes import build_mesh
from areal_jax.config import base_config
from areal_jax.models.architecture import ModelConfig
from areal_jax.models.policy import param_shapes
from areal_jax.types import Prompt, TrainingBatch, Trajectory, TrajectoryGroup

VOCABULARY = 24


@pytest.fixture(scope="module", autouse=True)
def quick_compilation():
    """Most of these tests' time is XLA's; what it optimises is not their subject."""
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)


@pytest.fixture(scope="session")
def model():
    return ModelConfig("qwen2", vocab_size=VOCABULARY, layers=1, hidden_size=16, heads=4, kv_heads=2, head_dim=4, mlp_size=32)


@pytest.fixture(scope="session")
def params(model):
    random = np.random.default_rng(3)

    def leaf(shape):
        centre = 1.0 if len(shape.shape) == 1 else 0.0
        return (centre + 0.3 * random.standard_normal(shape.shape)).astype(np.float32)

    return jax.tree.map(leaf, param_shapes(model))


@pytest.fixture
def config():
    config = base_config()
    config.trainer.micro_batch_tokens = 24
    config.trainer.micro_batch_rows = 4
    config.trainer.groups_per_step = 4
    config.trainer.minibatches = 2
    config.trainer.warmup_steps = 0
    config.trainer.learning_rate = 1e-2
    config.rollout.group_size = 3
    config.trainer.schedule = "constant"
    config.algorithm.advantage = "batch"
    config.algorithm.skip_zero_advantage = False
    return config


@pytest.fixture(scope="session")
def mesh_of():
    return lambda **axes: build_mesh(jax.devices()[: math.prod(axes.values())], **axes)


@pytest.fixture(scope="session")
def batch_of():
    def make(step=0, groups=4, samples=3, seed=0, ages=(0,), noise=0.3):
        """Random groups; the tokens of sample k are ``ages[k % len(ages)]`` versions old, behaviour log-probs are random."""
        random = np.random.default_rng(seed)
        made = []
        for g in range(groups):
            prompt = random.integers(2, VOCABULARY, random.integers(2, 6)).astype(np.int32)
            trajectories = []
            for k in range(samples):
                length = int(random.integers(1, 13))
                version = step - ages[k % len(ages)]
                logprobs = (-np.log(VOCABULARY) + noise * random.standard_normal(length)).astype(np.float32)
                tokens = random.integers(1, VOCABULARY, length).astype(np.int32)
                versions = np.full(length, version, np.int32)
                reward = float(random.integers(0, 2))
                trajectories.append(Trajectory(100 + g, k, prompt, tokens, logprobs, versions, False, reward, {"correct": reward}))
            made.append(TrajectoryGroup(Prompt(100 + g, f"p{g}", "", prompt, ""), step - max(ages), tuple(trajectories)))
        return TrainingBatch(step, tuple(made), 0)

    return make


@pytest.fixture(scope="session")
def with_trajectories():
    def change(batch, function):
        """The batch with ``function(trajectory)`` in each trajectory's place."""
        groups = tuple(dataclasses.replace(g, trajectories=tuple(function(t) for t in g.trajectories)) for g in batch.groups)
        return dataclasses.replace(batch, groups=groups)

    return change
