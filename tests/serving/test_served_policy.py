"""The real sampler behind the server: a tiny random policy, judged by whole forward passes; and the soak."""

import concurrent.futures
import http.client
import json

import jax
import numpy as np
import pytest
from random_policy import params_of
from test_soak import REQUESTS, check

from areal_jax.cluster.meshes import build_mesh
from areal_jax.models.architecture import ModelConfig
from areal_jax.models.policy import packed_logits
from areal_jax.sampler.driver import RolloutDriver
from areal_jax.sampler.engine import SamplerEngine
from areal_jax.types import Sampling, WeightUpdate

LONGEST, SLOTS, PAGES = 96, 8, 30
"""Fewer pages than the slots could use, so that sequences are preempted."""


@pytest.fixture(scope="module")
def model(tokenizer):
    return ModelConfig("qwen2", tokenizer.vocab_size, layers=2, hidden_size=32, heads=4, kv_heads=2, head_dim=8, mlp_size=48, eos_ids=(1,))


@pytest.fixture(scope="module")
def params(model):
    return params_of(model, 3)


@pytest.fixture(scope="module")
def server(serve, model, params):
    engine = SamplerEngine(
        model, build_mesh(jax.devices()[:1]), slots=SLOTS, max_length=LONGEST, page_size=16, pages=PAGES, steps=4, per_request=True, top_logprobs=20
    )

    def make(on_progress):
        driver = RolloutDriver(engine, WeightUpdate(0, engine.load_params(params)), seed=5, on_progress=on_progress)
        driver.warm_up()
        return driver

    with serve(make, slots=SLOTS, sampling=Sampling(0.8), pages=lambda driver: (driver.schedule.pool.held, PAGES - 1)) as server:
        yield server


def ask(server, path, **body):
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
    connection.request("POST", path, json.dumps({"model": "tiny", **body}))
    answer = connection.getresponse()
    status, data = answer.status, json.loads(answer.read())
    connection.close()
    assert status == 200, data
    return data


def test_greedy_tokens_and_log_probs_are_the_policys(server, model, params, tokenizer):
    forward = jax.jit(packed_logits, static_argnums=0)
    ids = {bytes(v): k for k in range(2, tokenizer.vocab_size) if (v := tokenizer.decode([k]).encode()) and b"\xef\xbf\xbd" not in v}
    prompt = tokenizer.encode("user: What is 5+8?\n").tolist()
    answer = ask(
        server,
        "/v1/chat/completions",
        messages=[{"role": "user", "content": "What is 5+8?"}],
        temperature=0,
        max_tokens=40,
        logprobs=True,
        top_logprobs=3,
    )
    entries = answer["choices"][0]["logprobs"]["content"]
    assert len(entries) >= answer["usage"]["completion_tokens"] - 1 > 4 and answer["usage"]["prompt_tokens"] == len(prompt)
    sequence, checked = list(prompt), 0
    for entry in entries:
        tokens = np.zeros((1, LONGEST), np.int32)
        tokens[0, : len(sequence)] = sequence
        positions = np.arange(LONGEST, dtype=np.int32)[None]
        row = np.asarray(forward(model, params, tokens, positions, (positions < len(sequence)).astype(np.int32)))[0, len(sequence) - 1].astype(np.float64)
        logprobs = row - row.max() - np.log(np.exp(row - row.max()).sum())
        best = np.sort(logprobs)[::-1][:3]
        np.testing.assert_allclose([top["logprob"] for top in entry["top_logprobs"]], best, atol=1e-4)
        np.testing.assert_allclose(entry["logprob"], best[0], atol=1e-4)
        token = int(np.argmax(logprobs))
        if bytes(entry["bytes"]) in ids:
            assert ids[bytes(entry["bytes"])] == token
            checked += 1
        sequence.append(token)
    assert checked > 2


def test_equal_seeds_give_equal_samples_whatever_else_runs(server):
    body = {"prompt": "12+7=", "max_tokens": 30, "seed": 11, "n": 3, "top_p": 0.95, "logprobs": 0}
    alone = ask(server, "/v1/completions", **body)["choices"]
    with concurrent.futures.ThreadPoolExecutor(6) as pool:
        others = [pool.submit(ask, server, "/v1/completions", prompt=f"{i}", max_tokens=60, n=2) for i in range(10)]
        again = pool.submit(ask, server, "/v1/completions", **body).result()["choices"]
        assert all(other.result() for other in others)
    assert [c["text"] for c in again] == [c["text"] for c in alone] and len({c["text"] for c in alone}) == 3
    for one, two in zip(alone, again, strict=True):
        np.testing.assert_allclose(one["logprobs"]["token_logprobs"], two["logprobs"]["token_logprobs"], atol=1e-4)


def test_soak(server):
    schedule = server.service.driver.schedule
    outcomes = check(server, REQUESTS, 60, lambda: (schedule.pool.held, schedule.pool.free, len(schedule._free_slots), len(schedule.running)))
    assert schedule.pool.held == 0 and schedule.pool.free == PAGES - 1 and sorted(schedule._free_slots) == list(range(SLOTS))
    print(json.dumps({f"{kind} {outcome}": count for (kind, outcome), count in sorted(outcomes.items(), key=str)}), server.service.driver.statistics)
