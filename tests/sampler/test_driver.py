"""The driver: tokens that depend on request and weights alone, ends, cancellations and partials."""

import dataclasses

import jax
import numpy as np
import pytest
from trajectories import same

from areal_jax.cluster.meshes import build_mesh
from areal_jax.models.forward import packed_logprobs
from areal_jax.models.sharding import named_shardings, param_specs
from areal_jax.telemetry.compiles import CompileCounter
from areal_jax.types import GenerationRequest, WeightUpdate
from areal_jax.weights.push import WeightPusher


def test_every_token_is_the_policys(plain, judge, requests, model):
    assert plain.keys() == {r.key for r in requests}
    for request in requests:
        judge(request, plain[request.key])
    assert {t.truncated for t in plain.values()} == {True, False}
    assert {int(t.tokens[-1]) for t in plain.values()} >= set(model.eos_ids), "each end token ends some sample"
    assert len({t.tokens.tobytes() for t in plain.values()}) == len(plain), "samples of a prompt must differ"


def test_behaviour_logprobs_are_the_trainers(plain, requests, host_params, model):
    """As the trainer computes them: several sequences in one packed row, at the sampler's temperature (system-028)."""
    chosen = [plain[r.key] for r in requests[:4]]
    length = 128
    tokens, positions, segments, targets = (np.zeros((1, length), np.int32) for _ in range(4))
    at, places = 0, []
    for i, t in enumerate(chosen):
        whole = np.concatenate([t.prompt_tokens, t.tokens])
        here = slice(at, at + len(whole))
        tokens[0, here], positions[0, here], segments[0, here], targets[0, here] = whole, np.arange(len(whole)), i + 1, np.roll(whole, -1)
        places.append(slice(at + len(t.prompt_tokens) - 1, at + len(whole) - 1))
        at += len(whole)
    logprobs, _ = jax.jit(packed_logprobs, static_argnums=0)(model, host_params(0), tokens, positions, segments, targets, 0.9)
    for t, place in zip(chosen, places, strict=True):
        np.testing.assert_allclose(t.behaviour_logprobs, np.asarray(logprobs)[0, place], atol=1e-5)


def test_tokens_do_not_depend_on_company_slot_or_order(engine_of, driver_of, run, requests, plain):
    driver = driver_of(engine_of())
    for request in (requests[7], requests[2], requests[3]):
        same(run(driver, [request]), {request.key: plain[request.key]})
    same(run(driver, requests[::-1]), plain)
    arrivals = {0: requests[5:9], 2: requests[:2], 5: requests[9:]}
    same(run(driver, requests[2:5], lambda n: driver.submit(arrivals.pop(n, []))), plain)


@pytest.mark.parametrize("options", [{"steps": 1}, {"steps": 8, "page_size": 5, "slots": 3}], ids=str)
def test_tokens_do_not_depend_on_the_engines_shapes(engine_of, driver_of, run, requests, plain, options):
    same(run(driver_of(engine_of(**options)), requests), plain)


@pytest.mark.parametrize("mesh", [(1, 1, 2), (2, 1, 2)], ids=str)
def test_tokens_do_not_depend_on_the_mesh(engine_of, driver_of, run, requests, plain, update_of, mesh):
    engine = engine_of(mesh=mesh)
    driver = driver_of(engine)
    same(run(driver, requests, lambda n: driver.publish(update_of(engine, 1, seed=0)) if n == 2 else None), plain)
    assert len(driver._state.keys[0].sharding.device_set) == np.prod(mesh) and not driver._state.keys[0].is_fully_replicated


def test_greedy_driver_takes_the_likeliest_tokens(engine_of, driver_of, run, requests, judge):
    finished = run(driver_of(engine_of(temperature=0.0)), requests)
    for request in requests:
        judge(request, finished[request.key], temperature=0)


# Weights that change.


def test_generation_stops_at_any_end_token_and_keeps_it(engine_of, driver_of, run, requests, plain, model):
    """system-025. The same requests under a model whose end token lies outside the vocabulary show where each should end."""
    endless = run(driver_of(engine_of(model=dataclasses.replace(model, eos_ids=(model.vocab_size,)))), requests)
    ended_by = []
    for request in requests:
        whole, got = endless[request.key].tokens, plain[request.key]
        assert len(whole) == request.max_new_tokens and endless[request.key].truncated
        ends = np.flatnonzero(np.isin(whole, model.eos_ids))
        length = ends[0] + 1 if len(ends) else len(whole)
        np.testing.assert_array_equal(got.tokens, whole[:length])
        assert got.truncated == (not len(ends))
        ended_by += [int(whole[ends[0]])] if len(ends) else []
    assert set(ended_by) == set(model.eos_ids)


def test_longest_sample_of_a_batch_is_marked_truncated(engine_of, driver_of, run, requests, plain):
    at_limit = [r for r in requests if plain[r.key].truncated]
    ended = [r for r in requests if not plain[r.key].truncated]
    assert at_limit and max(plain[r.key].length for r in at_limit) >= max(plain[r.key].length for r in ended)
    last = max(ended, key=lambda r: plain[r.key].length)
    exact = dataclasses.replace(last, max_new_tokens=plain[last.key].length)
    short = dataclasses.replace(last, max_new_tokens=plain[last.key].length - 1)
    assert not run(driver_of(engine_of()), [exact])[last.key].truncated, "an end token at the limit is an end"
    assert run(driver_of(engine_of()), [short])[last.key].truncated


def test_cancelled_requests_free_their_slots_and_call_nobody(engine_of, driver_of, run, requests, plain):
    driver = driver_of(engine_of())
    gone = {requests[0].key, requests[2].key, requests[8].key}

    def cancel(n):
        if n == 1:
            assert len(driver.schedule.running) == 4
            driver.cancel([*gone, (999, 0)])
            assert len(driver.schedule.running) == 2 and gone.isdisjoint(driver.partials())

    finished = run(driver, requests, cancel)
    same(finished, {key: t for key, t in plain.items() if key not in gone})
    again = [r for r in requests if r.key in gone]
    same(run(driver, again), {r.key: plain[r.key] for r in again})


def test_cancel_in_the_middle_of_a_dispatch(engine_of, driver_of, run, requests, plain, monkeypatch):
    """The slot's tokens of that dispatch belong to nobody, also when the slot has a new request at once."""
    engine = engine_of()
    driver, original, calls = driver_of(engine), engine.decode, []

    def decode(params, *rest, **bounds):
        calls.append(0)
        if len(calls) == 2:
            driver.cancel([requests[1].key])
        return original(params, *rest, **bounds)

    monkeypatch.setattr(engine, "decode", decode)
    same(run(driver, requests), {key: t for key, t in plain.items() if key != requests[1].key})


def test_cancel_of_all_between_the_look_and_the_dispatch(engine_of, driver_of, run, requests, plain, monkeypatch):
    driver = driver_of(engine_of())
    original = driver._dispatch
    monkeypatch.setattr(driver, "_dispatch", lambda: (driver.cancel(r.key for r in requests[:4]), original())[1])
    assert run(driver, requests[:4]) == {}
    monkeypatch.undo()
    assert driver.schedule.pool.held == 0
    same(run(driver, requests[:2]), {r.key: plain[r.key] for r in requests[:2]})


@pytest.mark.parametrize("rounds", [1, 3])
def test_partials_go_on_elsewhere(engine_of, driver_of, run, requests, plain, judge, update_of, rounds):
    engine = engine_of()
    first = driver_of(engine)
    ended = []
    first._on_progress = lambda progress: ended.extend(progress.finished)
    first.submit(requests)
    for _ in range(rounds + 1):  # one dispatch is on its way
        first.run_once(0.0)
    partials = first.partials()
    done = {(t.group_id, t.sample_index): t for t in ended}
    assert partials.keys() | done.keys() == plain.keys() and not partials.keys() & done.keys()
    resumed = [dataclasses.replace(r, tokens=t, behaviour_logprobs=p, versions=v) for r in requests if r.key in partials for t, p, v in [partials[r.key]]]
    assert {len(r.tokens) for r in resumed} >= {0, 4 * rounds}
    elsewhere = run(driver_of(engine_of(steps=1)), resumed)
    same(done | elsewhere, plain)
    for r in resumed:
        np.testing.assert_array_equal(elsewhere[r.key].behaviour_logprobs[: len(r.tokens)], r.behaviour_logprobs)
    driver = driver_of(engine, kv_on_update="keep")
    driver.publish(update_of(engine, 3))
    for r in resumed:
        trajectory = run(driver, [r])[r.key]
        judge(r, trajectory)
        np.testing.assert_array_equal(trajectory.versions, np.where(np.arange(trajectory.length) < len(r.tokens), 0, 3))


def test_requests_that_cannot_run_are_refused(engine_of, driver_of):
    driver = driver_of(engine_of())
    prompt = np.array([3, 4], np.int32)
    for request, reason in (
        (GenerationRequest(1, 0, prompt, 31), "max_length"),
        (GenerationRequest(1, 0, prompt[:0], 5), "prompt of 0"),
        (GenerationRequest(1, 0, prompt, 0), "max_new_tokens is 0"),
        (GenerationRequest(1, 0, prompt, 2, prompt, np.zeros(2, np.float32), prompt), "2 tokens are generated already"),
    ):
        with pytest.raises(ValueError, match=reason):
            driver.submit([GenerationRequest(0, 0, prompt, 3), request])
    assert driver.unfinished == 0, "a refused call must queue nothing"
    one, other = GenerationRequest(1, 0, prompt, 3), GenerationRequest(1, 1, prompt, 3)
    with pytest.raises(ValueError, match="in this call"):
        driver.submit([one, one])
    driver.submit([one])
    for _ in range(2):  # queued, then in a slot
        with pytest.raises(ValueError, match=r"unfinished: \[\(1, 0\)\]"):
            driver.submit([other, one])
        assert driver.unfinished == 1
        driver.run_once(0.0)
    driver.cancel([one.key])
    driver.submit([other, one])


def test_run_until_done_says_what_is_unfinished(engine_of, driver_of, requests):
    driver = driver_of(engine_of())
    driver.submit(requests)
    with pytest.raises(TimeoutError, match="12 requests unfinished"):
        driver.run_until_done(-1.0)
    driver.run_until_done(60.0)
    assert not driver.run_once(0.001) and driver.statistics.idle_s > 0
    assert driver.statistics.live_slot_steps == driver.statistics.generated_tokens <= driver.statistics.slot_steps


def test_no_compilation_over_twenty_updates_after_warm_up(model, engine_of, driver_of, host_params, requests):
    """Updates come by real pushes from a trainer's mesh; prompts, partials, cancels and all bucket lengths occur."""
    engine = engine_of(slots=2, steps=2)
    counter = CompileCounter()
    driver = driver_of(engine)
    trainer = build_mesh(jax.devices()[4:6], fsdp=2)
    pusher = WeightPusher(trainer, engine.mesh, param_specs(model))
    params = jax.device_put(host_params(0), named_shardings(trainer, param_specs(model), host_params(0)))
    updates = [pusher.push(params, v) for v in range(1, 22)]
    driver.warm_up()
    driver.submit(requests)
    counter.mark_steady()
    taken = []
    driver._on_weights = taken.append
    rounds = 0
    while driver.unfinished and rounds < 300:
        if rounds % 2 and updates:
            driver.publish(updates.pop(0))
        if rounds == 10:
            partials = driver.partials()
            moved = [r for r in requests if r.key in partials][:2]
            driver.cancel(r.key for r in moved)
            driver.submit(dataclasses.replace(r, tokens=t, behaviour_logprobs=p, versions=v) for r in moved for t, p, v in [partials[r.key]])
        driver.run_once(0.0)
        rounds += 1
    assert len(taken) >= 20 and driver.unfinished == 0
    assert counter.steady_state == 0, counter.recent
    jax.jit(lambda x: x * 3 + 1)(np.ones(7))
    assert counter.steady_state == 1, "the counter counts"
    counter.close()


def test_parameters_of_another_kind_are_refused(engine_of, driver_of, host_params):
    engine = engine_of(mesh=(1, 1, 2))
    good = engine.load_params(host_params(1))
    driver = driver_of(engine)
    for name, params, reason in (
        ("type", jax.tree.map(lambda x: x.astype(jax.numpy.bfloat16), good), "must be a device array float32.*got bfloat16"),
        ("host arrays", host_params(1), "got ndarray"),
        ("one device", jax.device_put(good, jax.devices()[0]), "must lie on the sampler's mesh"),
        (
            "another mesh",
            jax.device_put(host_params(1), jax.tree.map(lambda s: s.update(mesh=build_mesh(jax.devices()[2:4], tensor=2)), engine.param_shardings)),
            "must lie",
        ),
        ("shape", good | {"embedding": good["embedding"][:-1]}, "'embedding' must be"),
        ("a name too few", {k: v for k, v in good.items() if k != "final_norm"}, "names are missing"),
    ):
        with pytest.raises(ValueError, match=reason):
            driver.publish(WeightUpdate(1, params))
        assert driver.version == 0, name
    driver.publish(WeightUpdate(1, good))
