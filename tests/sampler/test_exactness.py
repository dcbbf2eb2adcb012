"""A request's tokens and log-probs are the same whatever happens around it: company, slots, pages, chunks, steps, preemption, updates without change."""

import dataclasses

import jax
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from areal_jax.models.forward import packed_logprobs
from areal_jax.types import GenerationRequest, Sampling, WeightUpdate

LENGTH = 72
PROMPTS = (1, 2, 5, 9, 16, 17, 33, 34, 48, 50)
SAMPLES = 3
ENGINES = {
    "one step": {"slots": 3, "page_size": 4, "prefill_chunk": 32, "steps": 1, "pages": 20},
    "sixteen steps": {"slots": 6, "page_size": 16, "prefill_chunk": 64, "steps": 16, "pages": 7},
    "odd pages": {"slots": 8, "page_size": 5, "prefill_chunk": 32, "steps": 4, "pages": 18},
    "two devices": {"slots": 5, "page_size": 1, "prefill_chunk": 32, "steps": 3, "pages": 74, "mesh": (1, 1, 2)},
    "per request": {"slots": 5, "page_size": 8, "prefill_chunk": 32, "steps": 4, "pages": 12, "per_request": True},
}
"""None has pages for more than one sequence of the longest kind."""


@pytest.fixture(scope="module")
def lasting(model):
    """The policy with a rare end token, so that sequences grow out of their pages."""
    return dataclasses.replace(model, eos_ids=(7,))


@pytest.fixture(scope="module")
def engines(engine_of, lasting):
    return {name: engine_of(model=lasting, max_length=LENGTH, **options) for name, options in ENGINES.items()}


@pytest.fixture(scope="module")
def alone(engine_of, driver_of, run, lasting):
    """Every request and what it is on its own: each alone in an engine that has pages for everything, prefilled at once."""
    random = np.random.default_rng(11)
    prompts = [random.integers(2, 40, n).astype(np.int32) for n in PROMPTS]
    requests = [GenerationRequest(70 + g, s, prompt, 8 + (5 * g + 3 * s) % 15) for g, prompt in enumerate(prompts) for s in range(SAMPLES)]
    driver = driver_of(engine_of(model=lasting, max_length=LENGTH, slots=2))
    results = {}
    for request in requests:
        results |= run(driver, [request])
    assert driver.statistics.preemptions == 0
    assert {t.truncated for t in results.values()} == {True, False} and max(t.length for t in results.values()) > 16
    return requests, results


def expected(trajectory, limit):
    """The trajectory under a smaller limit of its tokens."""
    return dataclasses.replace(
        trajectory,
        tokens=trajectory.tokens[:limit],
        behaviour_logprobs=trajectory.behaviour_logprobs[:limit],
        truncated=trajectory.truncated or limit < len(trajectory.tokens),
    )


def equal(got, wanted):
    np.testing.assert_array_equal(got.tokens, wanted.tokens)
    np.testing.assert_allclose(got.behaviour_logprobs, wanted.behaviour_logprobs, rtol=0, atol=1e-5)
    assert got.truncated == wanted.truncated and np.all(np.diff(got.versions) >= 0)


def own(request, engine):
    """The request as the engine takes it: a per-request engine gets told what the others sample with."""
    return dataclasses.replace(request, sampling=Sampling(temperature=0.9)) if engine.per_request else request


@pytest.fixture(scope="module")
def crowds(engines, alone, driver_of, run, update_of):
    """All requests at once on every engine, with an update every few rounds: (driver, trajectories) by the engine's name."""
    requests, _ = alone
    made = {}
    for name, engine in engines.items():
        driver = driver_of(engine)

        def publish(n, driver=driver, engine=engine):
            if n % 5 == 2:
                driver.publish(WeightUpdate(n, update_of(engine, 0).params))

        made[name] = driver, run(driver, [own(r, engine) for r in requests], publish)
    return made


@pytest.mark.parametrize("name", ENGINES)
def test_crowded_out_and_interrupted_is_as_alone(crowds, alone, name):
    requests, results = alone
    driver, got = crowds[name]
    assert got.keys() == results.keys()
    for request in requests:
        equal(got[request.key], results[request.key])
    assert driver.statistics.preemptions > 0 and driver.statistics.interrupts > 0
    assert driver.schedule.pool.held == 0
    assert max(len(np.unique(t.versions)) for t in got.values()) > 1


@st.composite
def runs(draw):
    indices = draw(st.lists(st.integers(0, len(PROMPTS) * SAMPLES - 1), min_size=1, max_size=14, unique=True))
    return {
        "engine": draw(st.sampled_from(sorted(ENGINES))),
        "share": draw(st.booleans()),
        "requests": [(i, draw(st.integers(0, 12)), draw(st.integers(1, 30)), draw(st.integers(0, 6))) for i in indices],
        "updates": draw(st.sets(st.integers(0, 12), max_size=5)),
        "moves": draw(st.dictionaries(st.integers(1, 8), st.sampled_from(indices), max_size=3)),
        "kept": draw(st.sampled_from(["recompute", "keep"])),
    }


@settings(max_examples=200, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(plan=runs())
def test_any_run_of_a_request_is_as_alone(engines, alone, driver_of, run, update_of, plan):
    """Drawn: the engine, who else is there, limits, what was generated before, who comes in which round, who is taken out and put in again."""
    everyone, results = alone
    engine = engines[plan["engine"]]
    driver = driver_of(engine, share_prompts=plan["share"], kv_on_update=plan["kept"])
    requests, arrivals = {}, {}
    for index, done, limit, arrival in plan["requests"]:
        request, whole = everyone[index], results[everyone[index].key]
        limit = min(limit, request.max_new_tokens)
        done = min(done, limit - 1, whole.length - 1)
        before = {"tokens": whole.tokens[:done], "behaviour_logprobs": whole.behaviour_logprobs[:done], "versions": np.zeros(done, np.int32)}
        requests[request.key] = own(dataclasses.replace(request, max_new_tokens=limit, **before), engine)
        arrivals.setdefault(arrival, []).append(requests[request.key])
    last = max(arrivals)
    finished = []
    driver._on_progress = lambda progress: finished.extend(progress.finished)
    number = 0
    while number <= last or driver.unfinished:
        driver.submit(arrivals.pop(number, []))
        if number in plan["updates"]:
            driver.publish(WeightUpdate(number + 1, update_of(engine, 0).params))
        key = everyone[plan["moves"].get(number, 0)].key
        if number in plan["moves"] and key in driver.partials():
            tokens, logprobs, versions = driver.partials()[key]
            driver.cancel([key])
            driver.submit([dataclasses.replace(requests[key], tokens=tokens, behaviour_logprobs=logprobs, versions=versions)])
        driver.run_once(0.0)
        number += 1
        assert number < 1000, "the driver does not come to an end"
    assert sorted((t.group_id, t.sample_index) for t in finished) == sorted(requests)
    for trajectory in finished:
        key = trajectory.group_id, trajectory.sample_index
        equal(trajectory, expected(results[key], requests[key].max_new_tokens))
    assert driver.schedule.pool.held == 0


@pytest.fixture(scope="module")
def trainers(host_params):
    """The trainer's log-probs of trajectories' tokens at the sampler's temperature, as arrays of the tokens' number."""
    compute = jax.jit(packed_logprobs, static_argnums=0)

    def logprobs(model, params, trajectories):
        shape = len(trajectories), LENGTH
        tokens, positions, segments, targets = (np.zeros(shape, np.int32) for _ in range(4))
        for row, t in enumerate(trajectories):
            whole = np.concatenate([t.prompt_tokens, t.tokens])
            tokens[row, : len(whole)], segments[row, : len(whole)] = whole, 1
            positions[row], targets[row, : len(whole)] = np.arange(LENGTH), np.roll(whole, -1)
        made = np.asarray(compute(model, params, tokens, positions, segments, targets, 0.9)[0])
        return [made[row, len(t.prompt_tokens) - 1 :][: t.length] for row, t in enumerate(trajectories)]

    return logprobs


@pytest.mark.parametrize("name", ENGINES)
def test_logprobs_of_shared_preempted_and_resumed_ones_are_the_trainers(crowds, model, host_params, trainers, name, record_property):
    _, got = crowds[name]
    trajectories = [got[key] for key in sorted(got)]
    difference = max(np.abs(t.behaviour_logprobs - wanted).max() for t, wanted in zip(trajectories, trainers(model, host_params(0), trajectories), strict=True))
    record_property("largest difference", float(difference))
    assert difference <= 1e-5, f"{difference:.2e}"


def test_bfloat16_differs_from_the_trainer_by_its_rounding(lasting, engine_of, driver_of, run, alone, host_params, trainers, record_property):
    """Sampler and trainer round at other places: the log-probs differ, by little, and not in one direction."""
    half = dataclasses.replace(lasting, dtype="bfloat16")
    engine = engine_of(model=half, max_length=LENGTH, dtype="bfloat16", **ENGINES["odd pages"])
    got = run(driver_of(engine), alone[0])
    trajectories = [got[key] for key in sorted(got)]
    wanted = trainers(half, engine.load_params(host_params(0)), trajectories)
    differences = np.concatenate([t.behaviour_logprobs - w for t, w in zip(trajectories, wanted, strict=True)])
    largest, mean = float(np.abs(differences).max()), float(differences.mean())
    record_property("largest difference", largest)
    record_property("mean difference", mean)
    assert 1e-5 < largest < 0.15 and abs(mean) < 0.01, f"largest {largest:.2e}, mean {mean:.2e}"


@pytest.mark.parametrize("sampling", [Sampling(0.0), Sampling(0.7, 5, 0.9)], ids=str)
def test_a_requests_own_distribution_is_that_of_an_engine(engines, alone, lasting, engine_of, driver_of, run, sampling):
    """Beside requests of other distributions."""
    static = {"temperature": sampling.temperature, "top_k": sampling.top_k, "top_p": sampling.top_p}
    requests = alone[0][::4]
    wanted = run(driver_of(engine_of(model=lasting, max_length=LENGTH, slots=8, prefill_chunk=32, **static)), requests)
    others = [dataclasses.replace(r, sampling=Sampling(0.4 + i / 4, i % 3, 1.0 - i % 2 / 4)) for i, r in enumerate(alone[0][1::4])]
    mixed = [r for pair in zip([dataclasses.replace(r, sampling=sampling) for r in requests], others, strict=False) for r in pair]
    got = run(driver_of(engines["per request"]), mixed)
    for request in requests[: len(others)]:
        equal(got[request.key], wanted[request.key])


def test_a_named_stream_is_that_of_the_key_it_names(engines, alone, driver_of, run):
    """Requests of other keys, each with the stream of one of the requests."""
    requests, results = alone
    engine = engines["per request"]
    renamed = {(900 + i, 7): r for i, r in enumerate(requests[::3])}
    got = run(driver_of(engine), [dataclasses.replace(own(r, engine), group_id=key[0], sample_index=key[1], stream=r.key) for key, r in renamed.items()])
    for key, request in renamed.items():
        equal(got[key], results[request.key])
    far = dataclasses.replace(own(requests[0], engine), stream=(2**32 - 1, 2**31))
    assert run(driver_of(engine), [far])[far.key].tokens.tolist() != results[far.key].tokens.tolist()
