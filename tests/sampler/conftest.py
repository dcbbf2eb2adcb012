"""A tiny policy, drivers over shared engines, and a judge that recomputes every token by a whole forward pass."""

import functools

import jax
import numpy as np
import pytest

from areal_jax.cluster.meshes import build_mesh
from areal_jax.models.architecture import ModelConfig
from areal_jax.models.policy import packed_logits, param_shapes
from areal_jax.sampler.driver import RolloutDriver
from areal_jax.sampler.engine import SamplerEngine
from areal_jax.types import GenerationRequest, WeightUpdate

VOCABULARY, LENGTH, SEED = 40, 32, 5
PROMPT_LENGTHS = (3, 5, 9, 4, 7, 6)


@pytest.fixture(scope="session")
def model():
    """Two end tokens, so likely that some samples end early and some at the limit."""
    return ModelConfig("qwen2", VOCABULARY, layers=2, hidden_size=32, heads=4, kv_heads=2, head_dim=8, mlp_size=48, eos_ids=(1, 5))


@pytest.fixture(scope="session")
def host_params(model):
    @functools.cache
    def make(seed=0):
        random = np.random.default_rng(seed)

        def leaf(shape):
            if len(shape.shape) == 1:
                return (1.0 + 0.3 * random.standard_normal(shape.shape)).astype(np.float32)
            return (1.2 * shape.shape[0] ** -0.5 * random.standard_normal(shape.shape)).astype(np.float32)

        return jax.tree.map(leaf, param_shapes(model))

    return make


@pytest.fixture(scope="session")
def engine_of(model):
    """Engines by their options; one and the same for the same options, so that it is compiled once."""

    @functools.cache
    def make(mesh=(1, 1, 1), model=model, **options):
        options = {"slots": 4, "max_length": LENGTH, "page_size": 4, "prefill_chunk": 128, "steps": 4, "temperature": 0.9} | options
        axes = dict(zip(("data", "fsdp", "tensor"), mesh, strict=True))
        return SamplerEngine(model, build_mesh(jax.devices()[: int(np.prod(mesh))], **axes), **options)

    return make


@pytest.fixture(scope="session")
def update_of(host_params):
    """(engine, version) → weights on the engine's mesh; the weights of each version differ."""

    @functools.cache
    def make(engine, version=0, seed=None):
        return WeightUpdate(version, engine.load_params(host_params(version if seed is None else seed)))

    return make


@pytest.fixture(scope="session")
def driver_of(update_of):
    def make(engine, **options):
        return RolloutDriver(engine, update_of(engine), **{"seed": SEED} | options)

    return make


@pytest.fixture(scope="session")
def requests():
    """Three groups of two samples, then six more groups of one, with prompts of several lengths."""
    random = np.random.default_rng(5)
    prompts = [random.integers(2, VOCABULARY, n).astype(np.int32) for n in (*PROMPT_LENGTHS, *PROMPT_LENGTHS[:3])]
    pairs = [(g, s) for g in range(3) for s in range(2)] + [(g, 0) for g in range(3, 9)]
    return [GenerationRequest(70 + g, s, prompts[g], LENGTH - len(prompts[g]) - g % 3) for g, s in pairs]


@pytest.fixture(scope="session")
def run():
    def go(driver, requests, before_round=lambda number: None, deadline_s=60.0):
        """Submits, runs to the end, and returns the trajectories by key; no request may end twice."""
        finished = []
        driver._on_progress = lambda progress: finished.extend(progress.finished)
        driver.submit(requests)
        number = 0
        while driver.unfinished:
            before_round(number)
            driver.run_once(0.0)
            number += 1
            assert number < 500, "the driver does not come to an end"
        keys = [(t.group_id, t.sample_index) for t in finished]
        assert len(set(keys)) == len(keys), "a request ended twice"
        return dict(zip(keys, finished, strict=True))

    return go


@pytest.fixture(scope="session")
def full_logits(model):
    forward = jax.jit(packed_logits, static_argnums=0)

    def logits(params, sequence, length=LENGTH):
        tokens = np.zeros((1, length), np.int32)
        tokens[0, : len(sequence)] = sequence
        positions, segments = np.arange(length, dtype=np.int32)[None], (np.arange(length) < len(sequence)).astype(np.int32)[None]
        return np.asarray(forward(model, params, tokens, positions, segments))[0].astype(np.float64)

    return logits


@pytest.fixture(scope="session")
def uniform_numbers():
    """The numbers that request (group, sample) of a seed draws its tokens with, from the definition."""

    @functools.cache
    def numbers(seed, group, sample):
        key = jax.random.fold_in(jax.random.fold_in(jax.random.key(seed), group), sample)
        return np.asarray(jax.vmap(lambda t: jax.random.uniform(jax.random.fold_in(key, t)))(np.arange(LENGTH)), np.float64)

    return numbers


@pytest.fixture(scope="session")
def judge(model, full_logits, uniform_numbers, host_params):
    def check(request, trajectory, *, temperature=0.9, seed=SEED, logits=None):
        """Each token is the one that the weights of its version give after the tokens before it; ends, flag and budget are right.

        Args:
          logits: function (version) → [length, vocab] in place of the whole forward pass under that version's weights.
        """
        prompt, tokens = len(request.prompt_tokens), trajectory.tokens
        sequence = np.concatenate([request.prompt_tokens, tokens])
        logits = logits or (lambda version: full_logits(host_params(version), sequence))
        by_version = {int(v): logits(int(v)) for v in np.unique(trajectory.versions)}
        np.testing.assert_array_equal(trajectory.prompt_tokens, request.prompt_tokens)
        assert len(tokens) == len(trajectory.versions) == len(trajectory.behaviour_logprobs) <= request.max_new_tokens
        for t, token in enumerate(tokens):
            row = by_version[int(trajectory.versions[t])][prompt - 1 + t]
            where = f"token {t} of {request.key}"
            if temperature == 0:
                assert row[token] >= row.max() - 1e-4, where
                assert trajectory.behaviour_logprobs[t] == 0.0
                continue
            scaled = row / temperature - np.max(row / temperature)
            probabilities = np.exp(scaled) / np.exp(scaled).sum()
            cumulated = np.concatenate([[0.0], np.cumsum(probabilities)])
            drawn = uniform_numbers(seed, *request.key)[t]
            assert cumulated[token] - 1e-5 <= drawn <= cumulated[token + 1] + 1e-5, where
            assert abs(trajectory.behaviour_logprobs[t] - np.log(probabilities[token])) <= 1e-5 * max(1.0, -np.log(probabilities[token])), where
        assert not np.isin(tokens[:-1], model.eos_ids).any(), "went on after an end token"
        stopped = bool(np.isin(tokens[-1], model.eos_ids))
        assert trajectory.truncated == (not stopped)
        assert stopped or len(tokens) == request.max_new_tokens
        assert np.all(np.diff(trajectory.versions) >= 0)

    return check


@pytest.fixture(scope="module")
def plain(engine_of, driver_of, run, requests):
    """All requests, run once without any disturbance."""
    return run(driver_of(engine_of()), requests)
