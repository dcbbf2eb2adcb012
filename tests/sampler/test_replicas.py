"""Several drivers as one sampler: the same tokens, routing, updates that reach every replica, failures and threads."""

import threading

import jax
import numpy as np
import pytest
from trajectories import same

from areal_jax.cluster.meshes import build_mesh
from areal_jax.models.policy import param_shapes
from areal_jax.models.sharding import named_shardings, param_specs
from areal_jax.sampler.engine import SamplerEngine
from areal_jax.sampler.replicas import Replicas, replica_meshes
from areal_jax.types import GenerationRequest, WeightUpdate

OPTIONS = {"slots": 3, "max_length": 32, "page_size": 4, "prefill_chunk": 256, "steps": 4, "temperature": 0.9}


@pytest.fixture(scope="module")
def sampler_mesh():
    return build_mesh(jax.devices()[:4], data=2, tensor=2)


@pytest.fixture(scope="module")
def engines(model, sampler_mesh):
    return [SamplerEngine(model, mesh, **OPTIONS) for mesh in replica_meshes(sampler_mesh)]


@pytest.fixture
def replicas_of(engines, model, host_params, sampler_mesh):
    shardings = named_shardings(sampler_mesh, param_specs(model), param_shapes(model))
    made = []

    def update(version, seed=None):
        return WeightUpdate(version, jax.device_put(host_params(version if seed is None else seed), shardings))

    def make(**options):
        made.append(Replicas(engines, update(0), seed=5, **options))
        return made[-1], update

    yield make
    for replicas in made:
        replicas.close(30.0)


def finish(replicas, finished, before=lambda: None):
    rounds = 0
    while replicas.unfinished:
        before()
        replicas.run_once(5.0)
        rounds += 1
        assert rounds < 500
    return {(t.group_id, t.sample_index): t for t in finished}


def test_tokens_do_not_depend_on_the_replica(replicas_of, requests, plain):
    finished = []
    replicas, _ = replicas_of(on_progress=lambda progress: finished.extend(progress.finished))
    replicas.submit(requests)
    made = finish(replicas, finished)
    same(made, plain)
    work = [driver.statistics.generated_tokens for driver in replicas.drivers]
    assert min(work) > 0 and sum(work) == replicas.statistics.generated_tokens == sum(t.length for t in made.values())
    assert all(driver.schedule.pool.held == 0 for driver in replicas.drivers)


def test_a_group_stays_together_and_goes_where_pages_are_free(replicas_of):
    replicas, _ = replicas_of()
    prompt = np.arange(2, 10, dtype=np.int32)
    replicas.submit([GenerationRequest(g, s, prompt[: 8 - 4 * (g % 2)], 4) for g in range(4) for s in range(2)])
    where = [{r.group_id for r in driver.schedule.queue} for driver in replicas.drivers]
    assert where[0] and where[1] and not where[0] & where[1]
    assert len(replicas._queue) == 2, "the others wait here while every replica has enough queued"
    for again in ((0, 0), (3, 1)):  # one in a replica's queue, one that waits here
        with pytest.raises(ValueError, match="keys of their own"):
            replicas.submit([GenerationRequest(*again, prompt, 4)])
    replicas.cancel([(g, 0) for g in range(4)])
    assert replicas.unfinished == 4 and set(replicas.partials()) == {(g, 1) for g in range(4)}


def test_what_waits_is_handed_out_when_what_was_before_it_is_cancelled(replicas_of):
    replicas, _ = replicas_of()
    replicas.submit([GenerationRequest(g, s, np.arange(2, 10, dtype=np.int32), 4) for g in range(4) for s in range(2)])
    replicas.cancel([r.key for driver in replicas.drivers for r in driver.schedule.queue])
    assert not replicas._queue and sum(len(driver.schedule.queue) for driver in replicas.drivers) == replicas.unfinished == 4


def test_an_update_is_told_once_all_replicas_use_it(replicas_of, requests, judge):
    finished, told, threads = [], [], set()

    def on_progress(progress):
        threads.add(threading.current_thread().name)
        finished.extend(progress.finished)

    replicas, update = replicas_of(on_progress=on_progress, on_weights=lambda v: told.append((v, [d.version for d in replicas.drivers])))
    versions = iter((3, 4))
    replicas.submit(requests)

    def publish():
        if replicas.statistics.dispatches >= 2 * (1 + len(told)):
            version = next(versions, None)
            if version:
                replicas.publish(update(version))

    made = finish(replicas, finished, publish)
    assert [v for v, _ in told] == sorted({v for v, _ in told}) and all(v == min(active) for v, active in told) and told
    assert threads == {"sampler replica 0", "sampler replica 1"}
    assert {int(v) for t in made.values() for v in t.versions} > {0}
    for request in requests:
        judge(request, made[request.key])


def test_a_failing_replica_ends_the_others_and_is_raised(replicas_of, requests, monkeypatch):
    replicas, _ = replicas_of()
    monkeypatch.setattr(replicas.drivers[1].schedule, "admit", lambda **_: (_ for _ in ()).throw(RuntimeError("a device is gone")))
    replicas.submit(requests)
    with pytest.raises(RuntimeError, match="a device is gone"):
        for _ in range(100):
            replicas.run_once(5.0)
    replicas.close(30.0)
    assert not [t for t in threading.enumerate() if t.name.startswith("sampler replica")]
