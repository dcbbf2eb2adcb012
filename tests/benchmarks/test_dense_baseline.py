"""The dense baseline samples what the paged sampler samples, under the same keys."""

import dataclasses

import jax
import numpy as np
import pytest
from random_policy import params_of

from areal_jax.benchmarks.dense import dense_decode, dense_start
from areal_jax.benchmarks.generation import Subject, random_prompts
from areal_jax.benchmarks.policies import RANDOM
from areal_jax.types import GenerationRequest

TOKENS, SEED = 12, 7


@pytest.fixture(scope="module")
def subject():
    model = dataclasses.replace(RANDOM["tiny"], eos_ids=())
    return Subject("tiny", model, jax.device_put(params_of(model)), "float32", slots=4, max_length=40, page_size=8, prefill_chunk=32, steps=4, seed=SEED)


def test_dense_tokens_are_the_paged_samplers(subject):
    prompts = random_prompts(subject.model, [5, 17, 9, 1], seed=1)
    names = [(3, 0), (4, 1), (8, 0), (9, 2)]
    finished = {}
    driver = subject.driver(subject.engine, on_progress=lambda progress: finished.update({(t.group_id, t.sample_index): t for t in progress.finished}))
    driver.submit([GenerationRequest(*name, prompt, TOKENS) for name, prompt in zip(names, prompts, strict=True)])
    driver.run_until_done(60.0)
    state = dense_start(subject.model, subject.params, prompts, 40, names, SEED)
    made = []
    for _ in range(TOKENS // 4):
        state, tokens, logprobs = dense_decode(subject.model, subject.params, state, 4)
        made.append((np.asarray(tokens), np.asarray(logprobs)))
    tokens, logprobs = (np.concatenate(part, 1) for part in zip(*made, strict=True))
    for row, name in enumerate(names):
        np.testing.assert_array_equal(tokens[row], finished[name].tokens)
        np.testing.assert_allclose(logprobs[row], finished[name].behaviour_logprobs, atol=1e-5)
    assert len({tuple(row) for row in tokens}) == 4, "four random streams"
