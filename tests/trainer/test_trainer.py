"""The reinforcement-learning step against an implementation of its own: no packing, no accumulation, plain gradients."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from sample_rows import LENGTH, padded

from areal_jax.config import put
from areal_jax.models.policy import packed_logits
from areal_jax.trainer.build import advantages_of, batch_metrics, rewards_of
from areal_jax.trainer.packing import split_groups
from areal_jax.trainer.step import NonFiniteError
from areal_jax.trainer.trainer import Trainer

TEMPERATURE = 0.7


def plain_gradient(config):
    """With ε far above every gradient, Adam's first update is the gradient times 'learning rate ÷ ε' = 1."""
    t = config.trainer
    t.adam_b1 = t.adam_b2 = 0.0
    t.learning_rate = t.adam_epsilon = 1e6
    t.weight_decay, t.grad_clip = 0.0, 1e9
    config.rollout.temperature = TEMPERATURE
    return config


@pytest.fixture(scope="module")
def made(model, params, mesh_of):
    """One compiled trainer for the module; ``trainer`` sets it back."""
    from areal_jax.config import base_config

    config = plain_gradient(base_config())
    config.trainer.micro_batch_tokens, config.trainer.micro_batch_rows = 24, 4
    config.trainer.groups_per_step, config.trainer.minibatches, config.trainer.warmup_steps, config.trainer.schedule = 4, 2, 0, "constant"
    config.algorithm.advantage, config.algorithm.skip_zero_advantage = "batch", False
    trainer = Trainer(config, model, mesh_of(), params)
    return trainer, jax.device_get(trainer.state)


@pytest.fixture
def trainer(made):
    trainer, initial = made
    trainer.load_state(initial)
    return trainer


@functools.partial(jax.jit, static_argnums=0)
def row_logprobs(model, params, tokens, targets, segments):
    logits = packed_logits(model, params, tokens, jnp.broadcast_to(jnp.arange(LENGTH), tokens.shape), segments) / TEMPERATURE
    return jnp.take_along_axis(jax.nn.log_softmax(logits), targets[..., None], -1)[..., 0]


def logprobs_of(model, params, samples):
    """Log-probs of each sample's tokens, each sample in a row of its own."""
    *arrays, mask = padded(samples)
    values = np.asarray(row_logprobs(model, params, *arrays))
    return [values[row][mask[row] > 0] for row in range(len(samples))]


@functools.partial(jax.jit, static_argnums=0)
def reference_gradient(model, params, arrays, mask, proximal, behaviour, advantages):
    def loss(p):
        u = jnp.exp(jnp.where(mask > 0, row_logprobs(model, p, *arrays) - proximal, 0.0))
        return -jnp.sum(mask * jnp.exp(proximal - behaviour) * jnp.minimum(u * advantages, jnp.clip(u, 0.8, 1.2) * advantages)) / mask.sum()

    return jax.grad(loss)(params)


def reference_step(model, params, batch, config):
    """Equation 5 by sequential plain gradient descent over the minibatches, unpacked."""
    advantages = advantages_of(batch, config)
    samples = [t for g in batch.groups for t in g.trajectories]
    proximal = logprobs_of(model, params, samples)
    size = len(batch.groups[0].trajectories)
    positions = [sum(t.length + len(t.prompt_tokens) - 1 for t in g.trajectories) for g in batch.groups]
    for part in split_groups(positions, config.trainer.minibatches):
        chosen = [g * size + k for g in part for k in range(size)]
        *arrays, mask = padded([samples[i] for i in chosen])
        dense = np.zeros((3, *mask.shape), np.float32)
        for row, i in enumerate(chosen):
            dense[:, row, mask[row] > 0] = proximal[i], samples[i].behaviour_logprobs, advantages[i]
        gradient = reference_gradient(model, params, arrays, mask.astype(np.float32), *dense)
        params = jax.tree.map(lambda p, g: p - g, params, gradient)
    return params


def assert_trees_close(got, want, start, tolerance=1e-5):
    """Differences measured against the size of the whole update."""
    size = max(float(np.abs(w - s).max()) for w, s in zip(jax.tree.leaves(want), jax.tree.leaves(start), strict=True))
    assert size > 1e-3
    for g, w in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(g, w, rtol=0, atol=tolerance * max(size, 1.0))


def test_a_step_is_equation_5_with_the_proximal_policy_of_before_the_step(trainer, model, params, batch_of):
    batch = batch_of(groups=4, samples=2, ages=(0, 0))
    want = reference_step(model, params, batch, trainer.config)
    metrics = trainer.step(trainer.build(batch))
    assert_trees_close(jax.device_get(trainer.params), want, params)
    assert trainer.version == 1 and int(trainer.state.step) == 1
    assert metrics["update/skipped_nonfinite"] == 0 and metrics["approx_kl"] > 0


DIVISIONS = {
    "other packing": ({}, 1, 60, {}),
    "data fsdp tensor": ({"data": 2, "fsdp": 2, "tensor": 2}, 4, 24, {"trainer.remat": "dots", "trainer.logprob_chunk": 5}),
    "fsdp context tensor": ({"fsdp": 2, "context": 2, "tensor": 2}, 4, 24, {"trainer.remat": "full", "model.scan_layers": True}),
    "context tensor": ({"context": 2, "tensor": 4}, 1, 60, {"model.attention": "blockwise"}),
}


@pytest.mark.parametrize(("shape", "rows", "tokens", "options"), DIVISIONS.values(), ids=DIVISIONS)
def test_packing_and_sharding_do_not_change_the_update(trainer, model, params, batch_of, mesh_of, config, shape, rows, tokens, options):
    batch = batch_of(groups=4, samples=3, seed=2)
    trainer.step(trainer.build(batch))
    config = plain_gradient(config)
    config.trainer.micro_batch_rows, config.trainer.micro_batch_tokens = rows, tokens
    for key, value in options.items():
        put(config, key, value)
    other = Trainer(config, model, mesh_of(**shape), params)
    other.step(other.build(batch))
    assert_trees_close(jax.device_get(other.params), jax.device_get(trainer.params), params)
    for moment in (other.state.opt_state[0].mu, other.state.opt_state[0].nu):
        assert jax.tree.map(lambda leaf: leaf.sharding, moment) == jax.tree.map(lambda leaf: leaf.sharding, other.params)


def test_bfloat16_compute_with_float32_parameters(trainer, model, params, batch_of, mesh_of, config):
    batch = batch_of(groups=4, samples=3, seed=2)
    trainer.step(trainer.build(batch))
    config = plain_gradient(config)
    half = Trainer(config, dataclasses.replace(model, dtype="bfloat16"), mesh_of(fsdp=2, context=2), params)
    half.step(half.build(batch))
    assert {leaf.dtype for leaf in jax.tree.leaves(half.state.params)} == {jnp.dtype("float32")}
    exact, rough = (
        np.concatenate([np.ravel(new - old) for new, old in zip(jax.tree.leaves(jax.device_get(t.params)), jax.tree.leaves(params), strict=True)])
        for t in (trainer, half)
    )
    assert np.isfinite(rough).all() and 1e-4 < np.linalg.norm(rough - exact) / np.linalg.norm(exact) < 0.05


def test_order_of_groups_and_samples_does_not_change_the_update(trainer, params, batch_of):
    batch, start = batch_of(groups=2, seed=4), jax.device_get(trainer.state)
    trainer.step(trainer.build(batch))
    want = jax.device_get(trainer.params)
    trainer.load_state(start)
    turned = dataclasses.replace(batch, groups=tuple(dataclasses.replace(g, trajectories=g.trajectories[::-1]) for g in batch.groups))
    trainer.step(trainer.build(turned))
    assert_trees_close(jax.device_get(trainer.params), want, params)


def test_an_unchanged_policy_has_ratio_1_at_the_samplers_temperature(trainer, model, params, batch_of, with_trajectories):
    own = with_trajectories(batch_of(seed=5), lambda t: dataclasses.replace(t, behaviour_logprobs=logprobs_of(model, params, [t])[0]))
    packed = trainer.build(own)
    first = dataclasses.replace(packed, minibatches=packed.minibatches[:1], tokens=packed.tokens[:1])
    metrics = trainer.step(first)
    assert metrics["engine_gap/max"] < 1e-4 and metrics["staleness_gap/mean"] is None and metrics["mismatch_kl/staleness"] is None
    assert metrics["importance_weight/mean"] == pytest.approx(1, abs=1e-4) and metrics["importance_weight/ess"] == pytest.approx(1, abs=1e-4)
    assert metrics["clip_ratio/low"] == metrics["clip_ratio/high"] == 0 and abs(metrics["approx_kl"]) < 1e-6


def test_the_two_gaps_and_the_weights_are_measured_apart(trainer, model, params, batch_of):
    trainer.load_state(dataclasses.replace(trainer.state, step=jnp.int32(7)))
    batch = batch_of(step=7, ages=(0, 2, 3), seed=6)
    behind = {0: [], 1: []}
    samples = [t for g in batch.groups for t in g.trajectories]
    for t, logprobs in zip(samples, logprobs_of(model, params, samples), strict=True):
        behind[int(t.versions[0] < 7)].append(logprobs - t.behaviour_logprobs)
    engine, stale = np.concatenate(behind[0]), np.concatenate(behind[1])
    weights = np.exp(np.concatenate([engine, stale]))
    metrics = trainer.step(trainer.build(batch))
    wanted = {
        "engine_gap/mean": np.abs(engine).mean(),
        "engine_gap/max": np.abs(engine).max(),
        "staleness_gap/mean": np.abs(stale).mean(),
        "mismatch_kl/engine": (np.exp(engine) - 1 - engine).mean(),
        "mismatch_kl/staleness": (np.exp(stale) - 1 - stale).mean(),
        "importance_weight/mean": weights.mean(),
        "importance_weight/max": weights.max(),
        "importance_weight/ess": weights.sum() ** 2 / (weights.size * np.square(weights).sum()),
    }
    for name, value in wanted.items():
        assert metrics[name] == pytest.approx(float(value), rel=1e-3), name


def test_a_non_finite_gradient_changes_nothing_and_three_in_a_row_end_the_run(trainer, params, batch_of, with_trajectories):
    batch = batch_of(groups=2, seed=7)
    broken = with_trajectories(batch, lambda t: dataclasses.replace(t, behaviour_logprobs=np.full(t.length, np.nan, np.float32)))
    metrics = trainer.step(trainer.build(broken))
    assert metrics["update/skipped_nonfinite"] == 2 and int(trainer.state.skipped) == 2 and trainer.version == 1
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(trainer.params), params)
    trainer.step(trainer.build(dataclasses.replace(batch, step=1)))
    assert int(trainer.state.skipped) == 0
    before = jax.device_get(trainer.params)
    trainer.step(trainer.build(dataclasses.replace(broken, step=2)))
    with pytest.raises(NonFiniteError, match=r"4 updates in a row.*parameters finite.*learning_rate"):
        trainer.step(trainer.build(dataclasses.replace(broken, step=3)))
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(trainer.params), before)


def test_steps_compile_nothing_and_go_on_exactly_after_a_restore(trainer, batch_of):
    compiled = []
    trainer.step(trainer.build(batch_of(step=0)))
    saved = jax.device_get(trainer.state)

    def listen(event, duration, **_):
        if event.endswith("backend_compile_duration"):
            compiled.append(event)

    jax.monitoring.register_event_duration_secs_listener(listen)
    for step, groups in enumerate((4, 2, 3), 1):
        trainer.step(trainer.build(batch_of(step=step, groups=groups, seed=step)))
    assert not compiled
    jax.jit(lambda x: x * 3.25)(1.0)
    assert compiled, "the listener hears compilations"
    wanted = jax.device_get(trainer.params)
    trainer.load_state(saved)
    assert trainer.version == 1
    for step, groups in enumerate((4, 2, 3), 1):
        trainer.step(trainer.build(batch_of(step=step, groups=groups, seed=step)))
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(trainer.params), wanted)


def test_a_batch_of_another_version_is_refused(trainer, batch_of):
    with pytest.raises(ValueError, match="version 0; got one for step 3"):
        trainer.step(trainer.build(batch_of(step=3)))


def test_an_unrewarded_sample_is_refused(trainer, batch_of, with_trajectories):
    with pytest.raises(ValueError, match="reward"):
        trainer.build(with_trajectories(batch_of(), lambda t: dataclasses.replace(t, reward=None)))


def test_shuffled_rewards_are_a_permutation_that_depends_on_the_step(config, batch_of):
    batch = batch_of(groups=8, seed=8)
    plain = rewards_of(batch, config)
    config.algorithm.shuffle_rewards = True
    shuffled = rewards_of(batch, config)
    assert sorted(plain) == sorted(shuffled) and list(plain) != list(shuffled)
    np.testing.assert_array_equal(shuffled, rewards_of(batch, config))
    assert list(shuffled) != list(rewards_of(dataclasses.replace(batch, step=1), config))


def test_batch_metrics_by_hand(batch_of, with_trajectories):
    batch = batch_of(step=9, groups=2, samples=2, ages=(0, 4))
    spliced = {}

    def splice(t):
        versions = t.versions.copy()
        versions[len(versions) // 2 :] += 1 if versions[0] == 5 else 0
        spliced[t.group_id, t.sample_index] = versions
        return dataclasses.replace(t, versions=versions, truncated=t.sample_index == 0)

    metrics = batch_metrics(with_trajectories(batch, splice))
    ages = 9 - np.concatenate(list(spliced.values()))
    assert metrics["staleness/max"] == ages.max() and metrics["staleness/mean"] == pytest.approx(ages.mean()) and metrics["staleness/coverage"] == 1
    assert metrics["staleness/generating_mean"] == np.mean([v[-1] - v[0] for v in spliced.values()])
    assert metrics["staleness/buffered_mean"] == np.mean([9 - v[-1] for v in spliced.values()])
    assert metrics["trajectory_spans/max"] == max(len(set(v)) for v in spliced.values())
    assert metrics["truncated_ratio"] == 0.5 and metrics["reward/correct"] == metrics["reward/mean"]
    unknown = batch_metrics(with_trajectories(batch, lambda t: dataclasses.replace(t, versions=t.versions * 0 - 1)))
    assert unknown["staleness/coverage"] == 0 and unknown["staleness/mean"] is None


def test_leaving_out_samples_without_gradient_changes_no_update(model, params, config, mesh_of, batch_of, with_trajectories):
    batch = batch_of(groups=4, samples=3, seed=8)
    equal = batch.groups[0].group_id
    batch = with_trajectories(batch, lambda t: dataclasses.replace(t, reward=1.0 if t.group_id == equal else t.reward))
    ends, positions = [], []
    for skip in (False, True):
        config.algorithm.skip_zero_advantage, config.algorithm.advantage = skip, "grpo"
        config.trainer.minibatches = 1
        trainer = Trainer(config, model, mesh_of(), params)
        packed = trainer.build(batch)
        positions.append(sum(m.segment_ids.size for part in packed.minibatches for m in part))
        trainer.step(packed)
        ends.append(jax.device_get(trainer.params))
    assert positions[1] < positions[0]
    assert_trees_close(ends[1], ends[0], params)
