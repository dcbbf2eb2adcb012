"""Behaviour log-probs scored anew: each token's is, to the bit, what packed log-probs say under the parameters of its version."""

import dataclasses

import jax
import numpy as np
import pytest

from areal_jax.config import base_config
from areal_jax.config_fields import LORA_TARGETS
from areal_jax.models.adapters import add, join
from areal_jax.models.architecture import Lora
from areal_jax.models.forward import forward_settings, packed_logprobs
from areal_jax.trainer.checkpoint import Checkpointer
from areal_jax.trainer.trainer import Trainer
from areal_jax.trainer.versions import versions_in

ETA, STEPS = 2, 3
TEMPERATURE = 0.7


def exact_config(rows=4, **rollout):
    config = base_config()
    config.trainer.update(micro_batch_tokens=24, micro_batch_rows=rows, groups_per_step=4, minibatches=2)
    config.trainer.update(warmup_steps=0, learning_rate=1e-2, schedule="constant")
    config.algorithm.update(advantage="batch", skip_zero_advantage=False)
    config.rollout.update(group_size=3, temperature=TEMPERATURE, max_staleness=ETA, exact_logprobs=True)
    config.rollout.update(rollout)
    return config


@pytest.fixture(scope="module")
def made(model, params, mesh_of):
    trainer = Trainer(exact_config(), model, mesh_of(), params)
    return trainer, jax.device_get(trainer.state)


@pytest.fixture
def trainer(made):
    trainer, initial = made
    trainer.load_state(initial)
    return trainer


@pytest.fixture(scope="session")
def spliced(batch_of, with_trajectories):
    def make(step, **more):
        """A batch whose sequences have tokens of several versions: ages fall from up to ``ETA`` to 0, 1 or ``ETA`` within a sequence."""

        def splice(t):
            oldest = max(0, step - ETA)
            newest = max(oldest, step - (0, 1, ETA)[t.sample_index])
            return dataclasses.replace(t, versions=np.linspace(oldest, newest, t.length).round().astype(np.int32))

        return with_trajectories(batch_of(step=step, seed=step, **more), splice)

    return make


def run_to(trainer, batch_of_step, steps=STEPS):
    """Trains so many steps; the parameters of every version, the last one included."""
    history = {trainer.version: jax.device_get(trainer.policy)}
    while trainer.version < steps:
        trainer.step(trainer.build(batch_of_step(trainer.version)))
        history[trainer.version] = jax.device_get(trainer.policy)
    return history


def scores(trainer, packed, history):
    """For each minibatch and micro-batch the log-probs [rows, C] under each token's own version, by a program of the test's own."""
    settings, here = forward_settings(trainer.config, trainer.model, trainer.placement.mesh), trainer.placement
    shardings = join(here.state.params, here.frozen)
    program = jax.jit(lambda p, m: packed_logprobs(trainer.model, p, m.tokens, m.positions, m.segment_ids, m.targets, TEMPERATURE, settings=settings)[0])

    def of(micro):
        result = np.zeros(micro.tokens.shape, np.float32)
        for version in versions_in(micro):
            scored = np.asarray(program(jax.device_put(history[version], shardings), jax.device_put(micro, here.rows)))
            result = np.where((micro.versions == version) & (micro.loss_mask > 0), scored, result)
        return result

    return [[of(micro) for micro in part] for part in packed.minibatches]


def test_older_tokens_get_the_log_probs_of_their_version_to_the_bit(trainer, spliced):
    history = run_to(trainer, spliced)
    packed = trainer.build(spliced(STEPS))
    assert set(trainer.earlier.params) == {1, 2} and {v for part in packed.minibatches for m in part for v in versions_in(m)} == {1, 2, 3}
    for version, kept in trainer.earlier.params.items():
        jax.tree.map(np.testing.assert_array_equal, jax.device_get(kept), history[version])
    for part, wanted in zip(packed.minibatches, scores(trainer, packed, history), strict=True):
        for micro, want in zip(part, wanted, strict=True):
            placed = jax.device_put(micro, trainer.placement.rows)
            got = np.asarray(trainer.earlier.logprobs(placed, versions_in(micro) - {STEPS}, trainer.frozen))
            older = (micro.loss_mask > 0) & (micro.versions < STEPS)
            assert older.any() and np.abs(want - micro.behaviour_logprobs)[older].max() > 0.1
            np.testing.assert_array_equal(got, np.where(older, want, micro.behaviour_logprobs))


def test_a_step_trains_on_them_and_reports_what_the_sampler_said(trainer, spliced, model, params, mesh_of):
    """The same step of a trainer without the mode, fed what the test's own program says, and other log-probs fed to the one with it."""
    history = run_to(trainer, spliced)
    before = jax.device_get(trainer.saved())
    packed = trainer.build(spliced(STEPS))
    wanted = scores(trainer, packed, history)

    def fed(values):
        minibatches = tuple(
            tuple(dataclasses.replace(m, behaviour_logprobs=v) for m, v in zip(part, vs, strict=True))
            for part, vs in zip(packed.minibatches, values, strict=True)
        )
        return dataclasses.replace(packed, minibatches=minibatches)

    metrics = trainer.step(packed)
    after = jax.device_get(trainer.params)
    behind = np.concatenate(
        [np.abs(m.behaviour_logprobs - w)[m.loss_mask > 0] for p, ws in zip(packed.minibatches, wanted, strict=True) for m, w in zip(p, ws, strict=True)]
    )
    assert metrics["engine_gap/mean"] == metrics["engine_gap/max"] == metrics["mismatch_kl/engine"] == 0.0
    assert metrics["engine_gap/rescored_mean"] == pytest.approx(behind.mean(), rel=1e-5)
    assert metrics["engine_gap/rescored_max"] == pytest.approx(behind.max(), rel=1e-5)
    assert metrics["staleness_gap/mean"] > 1e-3 and 0 < metrics["time/rescore"] < metrics["time/train"]

    trainer.load_saved(before)
    again = trainer.step(fed(wanted))
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(trainer.params), after)
    assert again["engine_gap/rescored_max"] < 1e-5
    for name in ("loss/policy", "entropy", "staleness_gap/mean", "importance_weight/mean", "importance_weight/max", "grad_norm"):
        assert again[name] == metrics[name], name

    plain = Trainer(exact_config(exact_logprobs=False), model, mesh_of(), params)
    plain.load_state(before["state"])
    without = plain.step(fed(wanted))
    assert without["engine_gap/rescored_mean"] is None and without["engine_gap/rescored_max"] is None and "time/rescore" not in without
    assert without["staleness_gap/mean"] == pytest.approx(metrics["staleness_gap/mean"], rel=1e-4)
    for got, want, start in zip(*(jax.tree.leaves(t) for t in (after, jax.device_get(plain.params), before["state"].params)), strict=True):
        np.testing.assert_allclose(got - start, want - start, atol=2e-4 * 1e-2)


def test_a_batch_of_the_trainers_own_version_needs_no_copy(model, params, mesh_of, batch_of):
    """η = 0: nothing is kept and nothing computed twice; π_prox is π_behav to the bit, in every minibatch."""
    trainer = Trainer(exact_config(rows=1, max_staleness=0), model, mesh_of(), params)
    for step in range(2):
        metrics = trainer.step(trainer.build(batch_of(step=step, seed=step)))
        assert metrics["engine_gap/max"] == 0.0 and metrics["engine_gap/rescored_max"] > 0.1 and metrics["staleness_gap/mean"] is None
        assert metrics["importance_weight/mean"] == metrics["importance_weight/max"] == metrics["importance_weight/ess"] == 1.0
        assert not trainer.earlier.params
    with pytest.raises(ValueError, match=r"at version 2 that must be one of \[2\]; got a token of version 1.*exact_logprobs=False"):
        trainer.step(trainer.build(batch_of(step=2, ages=(0, 1))))


def test_a_resumed_trainer_goes_on_exactly(trainer, spliced, tmp_path):
    checkpoints = Checkpointer(tmp_path)
    checkpoints.save(0, trainer.saved(), {})
    run_to(trainer, spliced)
    checkpoints.save(STEPS, trainer.saved(), {})
    checkpoints.wait()
    expected = [trainer.step(trainer.build(spliced(step))) for step in (STEPS, STEPS + 1)]
    after = jax.device_get(trainer.params)

    restored, _ = checkpoints.restore(STEPS, trainer.abstract_saved(STEPS))
    trainer.load_saved(restored)
    assert trainer.version == STEPS and set(trainer.earlier.params) == {1, 2}
    for step, want in zip((STEPS, STEPS + 1), expected, strict=True):
        got = trainer.step(trainer.build(spliced(step)))
        assert {k: v for k, v in got.items() if not k.startswith("time/")} == {k: v for k, v in want.items() if not k.startswith("time/")}
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(trainer.params), after)

    trainer.load_saved(checkpoints.restore(0, trainer.abstract_saved(0))[0])
    assert trainer.version == 0 and not trainer.earlier.params
    trainer.load_state(restored["state"])
    with pytest.raises(ValueError, match=r"must be one of \[3\]; got a token of version 1"):
        trainer.step(trainer.build(spliced(STEPS)))
    assert trainer.version == STEPS
    checkpoints.close()


def test_nothing_compiles_in_steady_state(trainer, spliced):
    run_to(trainer, spliced, 1)
    compiled = []
    jax.monitoring.register_event_duration_secs_listener(lambda event, _, **__: compiled.append(event) if event.endswith("backend_compile_duration") else None)
    for step, groups in enumerate((4, 2, 3), 1):
        trainer.step(trainer.build(spliced(step, groups=groups)))
        assert set(trainer.earlier.params) == set(range(max(0, step + 1 - ETA), step + 1))
    assert not compiled
    jax.jit(lambda x: x * 3.75)(1.0)
    assert compiled, "the listener hears compilations"


def test_adapters_alone_are_kept_on_a_sharded_bfloat16_trainer(model, params, mesh_of, spliced):
    adapted = dataclasses.replace(model, lora=Lora(4, 8.0, LORA_TARGETS), dtype="bfloat16")
    config = exact_config(rows=2)
    config.model.param_dtype = "bfloat16"
    trainer = Trainer(config, adapted, mesh_of(fsdp=2, tensor=2), add(adapted, params, jax.random.key(0)))
    history = run_to(trainer, spliced)
    names = {path[-1].key for path, _ in jax.tree_util.tree_leaves_with_path(trainer.earlier.params)}
    assert set(trainer.earlier.params) == {1, 2} and names == {"lora_a", "lora_b"}
    for kept in trainer.earlier.params.values():
        assert jax.tree.map(lambda leaf: (leaf.dtype, leaf.sharding), kept) == jax.tree.map(lambda leaf: (leaf.dtype, leaf.sharding), trainer.params)
    packed = trainer.build(spliced(STEPS))
    for part, wanted in zip(packed.minibatches, scores(trainer, packed, history), strict=True):
        for micro, want in zip(part, wanted, strict=True):
            got = np.asarray(trainer.earlier.logprobs(jax.device_put(micro, trainer.placement.rows), versions_in(micro) - {STEPS}, trainer.frozen))
            older = (micro.loss_mask > 0) & (micro.versions < STEPS)
            np.testing.assert_array_equal(got[older], want[older])
    metrics = trainer.step(packed)
    assert metrics["engine_gap/max"] == 0.0 and metrics["engine_gap/rescored_max"] > 0.1
