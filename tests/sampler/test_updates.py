"""Weights that change in mid-generation: interruption, splices, versions."""

import threading

import numpy as np
import numpy_policy
import pytest
from trajectories import same


@pytest.mark.parametrize("options", [{}, {"slots": 9}], ids=str)
def test_interruption_without_change_is_no_interruption(engine_of, driver_of, run, requests, plain, update_of, options):
    """The second engine rebuilds two sequences of unlike length in one program, at several widths."""
    engine = engine_of(**options)
    driver = driver_of(engine)
    finished = run(driver, requests, lambda n: driver.publish(update_of(engine, n + 1, seed=0)))
    same(finished, plain)
    assert driver.statistics.interrupts > 20
    assert max(len(np.unique(t.versions)) for t in finished.values()) >= 3


@pytest.mark.parametrize("options", [{"steps": 1}, {"slots": 9}], ids=str)
def test_update_after_k_tokens_splices_exactly_there(engine_of, driver_of, run, requests, plain, judge, update_of, options):
    """system-022: 4 requests in slots, new weights after 2 dispatches."""
    engine = engine_of(**options)
    driver, four = driver_of(engine), [requests[i] for i in (0, 2, 6, 8)]
    k = 2 * options.get("steps", 4)
    spliced = run(driver, four, lambda n: driver.publish(update_of(engine, 3)) if n == 2 else None)
    assert spliced.keys() == {r.key for r in four}
    changed = 0
    for request in four:
        got, old = spliced[request.key], plain[request.key]
        judge(request, got)
        seam = min(k, len(old.tokens))
        np.testing.assert_array_equal(got.tokens[:seam], old.tokens[:seam])
        np.testing.assert_array_equal(got.versions, np.where(np.arange(got.length) < k, 0, 3))
        changed += not np.array_equal(got.tokens, old.tokens)
    assert changed >= 2, "the new weights must show"


def test_kept_cache_is_that_of_the_old_weights(engine_of, driver_of, run, requests, judge, update_of, host_params, model):
    engine, request = engine_of(), requests[6]
    exact = {v: numpy_policy.as_float64(host_params(v)) for v in (0, 3)}
    results = {}
    for policy in ("keep", "recompute"):
        driver = driver_of(engine, kv_on_update=policy)
        results[policy] = run(driver, [request], lambda n, d=driver: d.publish(update_of(engine, 3)) if n == 1 else None)[request.key]
    kept = results["keep"]
    assert 3 in kept.versions, "choose a request that lives past the update"
    decoder, rows = numpy_policy.Decoder(model), []
    for place, token in enumerate(np.concatenate([request.prompt_tokens, kept.tokens])[:-1]):
        made = place - len(request.prompt_tokens) + 1  # the generated token that comes of this place
        rows.append(decoder.step(exact[0 if made < 4 else 3], token))
    judge(request, kept, logits=lambda version: np.stack(rows))
    judge(request, results["recompute"])
    assert not np.allclose(kept.behaviour_logprobs[4:6], results["recompute"].behaviour_logprobs[4:6], atol=1e-3)
    with pytest.raises(AssertionError):
        judge(request, kept)
    assert driver.statistics.rebuild_s > 0


def test_without_interruption_no_sample_is_spliced(engine_of, driver_of, run, requests, judge, update_of):
    engine = engine_of()
    driver = driver_of(engine, interruptible=False)
    published = []

    def publish(n):
        if n == 1 or (driver.version == 3 and len(published) == 1):
            published.append(update_of(engine, 3 + len(published)))
            driver.publish(published[-1])

    finished = run(driver, requests, publish)
    versions = {key: set(t.versions.tolist()) for key, t in finished.items()}
    assert all(len(v) == 1 for v in versions.values()) and set.union(*versions.values()) == {0, 3, 4}
    assert driver.statistics.interrupts == 0
    for request in requests:
        judge(request, finished[request.key])


def test_publish_during_a_dispatch_does_not_relabel_its_tokens(engine_of, driver_of, run, requests, judge, update_of, monkeypatch):
    engine = engine_of()
    driver, original, calls = driver_of(engine), engine.decode, []

    def decode(params, *rest, **bounds):
        calls.append(driver.version)
        if len(calls) in (2, 3):
            driver.publish(update_of(engine, len(calls) + 1))
        return original(params, *rest, **bounds)

    monkeypatch.setattr(engine, "decode", decode)
    finished = run(driver, requests[:4])
    for request in requests[:4]:
        trajectory = finished[request.key]
        judge(request, trajectory)
        wanted = [0] * 8 + [3] * 4 + [4] * 40
        assert trajectory.versions.tolist() == wanted[: trajectory.length]
    assert calls[:4] == [0, 0, 3, 4]


def test_versions_only_get_newer(engine_of, driver_of, update_of, run, requests, judge):
    engine = engine_of()
    driver = driver_of(engine)
    seen = []
    driver._on_weights = seen.append
    driver.publish(update_of(engine, 3))
    driver.publish(update_of(engine, 4))
    for version in (0, 3, 4):
        with pytest.raises(ValueError, match=f"newer: version {version} after 4"):
            driver.publish(update_of(engine, version))
    judge(requests[0], run(driver, requests[:1])[requests[0].key])
    assert seen == [4] and driver.version == 4
    with pytest.raises(ValueError, match="version 4 after 4"):
        driver.publish(update_of(engine, 4))


def test_updates_from_another_thread_lose_and_repeat_nothing(engine_of, driver_of, update_of, requests, judge):
    """Requests, updates and looks at the partials come from other threads while the driver runs."""
    engine = engine_of()
    driver = driver_of(engine)
    updates = [update_of(engine, v) for v in range(1, 7)]
    finished, counted, activated, stop = [], {}, [0], threading.Event()

    def on_progress(progress):
        assert progress.version == activated[-1]
        for key, n in progress.new_tokens:
            counted[key] = counted.get(key, 0) + n
        finished.extend(progress.finished)

    driver._on_progress, driver._on_weights = on_progress, activated.append
    errors = []

    def drive():
        try:
            while not stop.is_set():
                driver.run_once(0.01)
        except Exception as error:  # handed to the test's thread
            errors.append(error)

    thread = threading.Thread(target=drive)
    thread.start()
    try:
        for i, request in enumerate(requests):
            driver.submit([request])
            if i % 2 and updates:
                driver.publish(updates.pop(0))
            for tokens, logprobs, versions in driver.partials().values():
                assert len(tokens) == len(logprobs) == len(versions)
            stop.wait(0.03)
        for _ in range(1000):
            if not driver.unfinished or errors:
                break
            stop.wait(0.02)
    finally:
        stop.set()
        thread.join(30)
    assert not errors and not driver.unfinished and not thread.is_alive()
    keys = [(t.group_id, t.sample_index) for t in finished]
    assert sorted(keys) == sorted(r.key for r in requests)
    for trajectory, key in zip(finished, keys, strict=True):
        judge(next(r for r in requests if r.key == key), trajectory)
        assert counted[key] == trajectory.length
    assert driver.statistics.generated_tokens == sum(t.length for t in finished)
    assert len({v for t in finished for v in t.versions.tolist()}) > 1


# Ends.
