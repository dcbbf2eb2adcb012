"""Objectives in the compiled step against unpacked implementations of their own: aggregation, KL, entropy, the approximated π_prox, M2PO."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from sample_rows import LENGTH, padded

from areal_jax.algorithms.advantages import EPSILON
from areal_jax.config import base_config
from areal_jax.models.adapters import add
from areal_jax.models.architecture import Lora
from areal_jax.models.policy import packed_logits
from areal_jax.trainer.allocation import Work
from areal_jax.trainer.build import build_batch, rewards_of, skips_zero, token_scores_of
from areal_jax.trainer.objective import needs_proximal
from areal_jax.trainer.packing import POLICIES, Packing, split_groups
from areal_jax.trainer.trainer import Trainer

BETA, ENTROPY = 0.3, 0.2


def settings(**algorithm):
    """Plain gradient descent: with ε far above every gradient, Adam's first update is the gradient times 'learning rate ÷ ε' = 1."""
    config = base_config()
    t = config.trainer
    t.adam_b1 = t.adam_b2 = t.weight_decay = 0.0
    t.learning_rate = t.adam_epsilon = 1e6
    t.grad_clip, t.warmup_steps, t.schedule = 1e9, 0, "constant"
    t.micro_batch_tokens, t.micro_batch_rows, t.groups_per_step, t.minibatches = 24, 2, 4, 2
    config.rollout.max_new_tokens = 16
    config.algorithm.update(advantage="batch", skip_zero_advantage=False, **algorithm)
    return config


@pytest.fixture(scope="module")
def moved(params):
    """The policy that is trained, away from the one that the run started from."""
    random = np.random.default_rng(9)
    return jax.tree.map(lambda leaf: leaf + 0.05 * random.standard_normal(leaf.shape).astype(np.float32), params)


def started(config, model, mesh, params, moved):
    trainer = Trainer(config, model, mesh, params)
    initial = dataclasses.replace(jax.device_get(trainer.state), params=moved)
    trainer.load_state(initial)
    return trainer, initial


@pytest.fixture(scope="module", params=["one device", "data fsdp context"])
def penalised(request, model, params, moved, mesh_of):
    """A trainer with a KL and an entropy term on one device, and one with other packing on eight."""
    config, mesh = settings(kl_coefficient=BETA, kl_estimator="k2", entropy_coefficient=ENTROPY), mesh_of()
    if request.param != "one device":
        mesh, config.trainer.micro_batch_rows, config.trainer.micro_batch_tokens = mesh_of(data=2, fsdp=2, context=2), 4, 36
        config.trainer.packing = "balanced"
    return started(config, model, mesh, params, moved)


@functools.partial(jax.jit, static_argnums=0)
def row_scores(model, params, tokens, targets, segments):
    logits = packed_logits(model, params, tokens, jnp.broadcast_to(jnp.arange(LENGTH), tokens.shape), segments)
    every = jax.nn.log_softmax(logits)
    return jnp.take_along_axis(every, targets[..., None], -1)[..., 0], -jnp.sum(jnp.exp(every) * every, -1)


def weights_of(name, samples, chosen):
    """What a token of each sample weighs among those chosen, by the definitions."""
    among = [samples[i] for i in chosen]
    groups = {t.group_id for t in among}
    if name == "token":
        return [1 / sum(t.length for t in among)] * len(among)
    if name == "sequence":
        return [1 / (len(among) * t.length) for t in among]
    if name == "prompt":
        return [1 / (len(groups) * sum(o.length for o in among if o.group_id == t.group_id)) for t in among]
    return [1 / (len(among) * 16)] * len(among)


def advantages_by_hand(batch, config):
    rewards = (rewards_of(batch, config) - 0.5) * 10
    tokens = np.concatenate([np.full(t.length, r) for t, r in zip((t for g in batch.groups for t in g.trajectories), rewards, strict=True)])
    return [(r - tokens.mean()) / (tokens.std(ddof=1) + EPSILON) for r in rewards]


def descended(model, params, batch, config, loss):
    """Sequential plain descent over the minibatches: ``loss(logprobs, entropy, start logprobs, behaviour, advantages, versions)`` a token."""
    samples = [t for g in batch.groups for t in g.trajectories]
    size, advantages = len(batch.groups[0].trajectories), advantages_by_hand(batch, config)
    positions = [sum(t.length + len(t.prompt_tokens) - 1 for t in g.trajectories) for g in batch.groups]
    begin = params
    for part in split_groups(positions, config.trainer.minibatches):
        chosen = [g * size + k for g in part for k in range(size)]
        *arrays, mask = padded([samples[i] for i in chosen])
        behaviour, advantage, weight, versions = np.zeros((4, *mask.shape), np.float32)
        for row, (i, w) in enumerate(zip(chosen, weights_of(config.algorithm.aggregation, samples, chosen), strict=True)):
            here = mask[row] > 0
            behaviour[row, here], versions[row, here] = samples[i].behaviour_logprobs, samples[i].versions
            advantage[row, here], weight[row, here] = advantages[i], w
        constants = row_scores(model, begin, *arrays)[0], behaviour, advantage, versions
        gradient = gradient_of(loss, model, params, arrays, mask, weight, constants)
        params = jax.tree.map(lambda p, g: p - g, params, gradient)
    return params


@functools.partial(jax.jit, static_argnums=(0, 1))
def gradient_of(loss, model, params, arrays, mask, weight, constants):
    def total(p):
        return jnp.sum(jnp.where(mask > 0, weight * loss(*row_scores(model, p, *arrays), *constants, arrays), 0.0))

    return jax.grad(total)(params)


def eq5(logprobs, centre, behaviour, advantages):
    u = jnp.exp(logprobs - centre)
    return -jnp.exp(centre - behaviour) * jnp.minimum(u * advantages, jnp.clip(u, 0.8, 1.2) * advantages)


def assert_close(got, want, start):
    size = max(float(np.abs(w - s).max()) for w, s in zip(jax.tree.leaves(want), jax.tree.leaves(start), strict=True))
    assert size > 1e-3
    for g, w in zip(jax.tree.leaves(jax.device_get(got)), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(g, w, rtol=0, atol=1e-5 * max(size, 1.0))


@pytest.fixture(scope="module")
def with_terms(model, params):
    """Equation 5 with the KL to the start and the entropy; one function, so that its gradient is compiled once."""

    def loss(logprobs, entropy, start, behaviour, advantages, versions, arrays):
        reference = jax.lax.stop_gradient(row_scores(model, params, *arrays)[0])
        return eq5(logprobs, start, behaviour, advantages) + BETA * jnp.minimum(jnp.square(logprobs - reference) / 2, 10.0) - ENTROPY * entropy

    return loss


@pytest.mark.parametrize("name", ["token", "sequence", "prompt", "constant"])
def test_each_aggregation_is_its_definition_however_packed_and_sharded(penalised, with_terms, model, moved, batch_of, name):
    trainer, initial = penalised
    trainer.load_state(initial)
    trainer.config.algorithm.update(aggregation=name, kl_in="loss")
    batch = batch_of(groups=4, samples=3, seed=2)
    metrics = trainer.step(trainer.build(batch))
    assert_close(trainer.params, descended(model, moved, batch, trainer.config, with_terms), moved)
    assert metrics["loss/kl"] > 0 and metrics["reference_kl"] > 0


def test_a_loss_of_whole_sequences_is_the_same_where_their_positions_lie_on_several_devices(model, params, moved, mesh_of, batch_of):
    config = settings(loss="gspo", decoupled=True, importance_weight_level="geometric", importance_weight_floor=0.4, aggregation="sequence")
    config.trainer.micro_batch_rows, config.trainer.micro_batch_tokens = 4, 36
    trainer, _ = started(config, model, mesh_of(data=2, fsdp=2, context=2), params, moved)

    def loss(logprobs, entropy, start, behaviour, advantages, versions, arrays):
        mask = behaviour != 0

        def mean(x):
            return jnp.sum(jnp.where(mask, x, 0.0), -1, keepdims=True) / jnp.maximum(mask.sum(-1, keepdims=True), 1)

        weight = jnp.maximum(jnp.exp(mean(start - behaviour)), 0.4)
        u, a = jnp.exp(mean(logprobs - start)), mean(advantages)
        return -weight * jnp.minimum(u * a, jnp.clip(u, 0.8, 1.2) * a)

    batch = batch_of(groups=4, samples=3, seed=8, noise=1.0)
    metrics = trainer.step(trainer.build(batch))
    assert 0 < metrics["importance_weight/capped_fraction"] < 1
    assert_close(trainer.params, descended(model, moved, batch, config, loss), moved)


def test_a_kl_in_the_reward_is_taken_off_each_tokens_reward(penalised, model, params, batch_of):
    trainer, _ = penalised
    trainer.config.algorithm.update(aggregation="token", kl_in="reward")
    batch = batch_of(groups=4, samples=3, seed=3)
    samples = [t for g in batch.groups for t in g.trajectories]
    *arrays, mask = padded(samples)
    reference = row_scores(model, params, *arrays)[0]
    kl = [np.minimum(np.square(t.behaviour_logprobs - reference[row][mask[row] > 0]) / 2, 10.0) for row, t in enumerate(samples)]
    returns = np.concatenate([10 * (t.reward - 0.5) - BETA * np.cumsum(x[::-1])[::-1] for t, x in zip(samples, kl, strict=True)])
    packed = trainer.build(batch)
    assert packed.metrics["reference_kl"] == pytest.approx(np.concatenate(kl).mean(), rel=1e-5)
    want = np.sort((returns - returns.mean()) / (returns.std(ddof=1) + EPSILON))
    got = np.sort(np.concatenate([m.advantages[m.loss_mask > 0] for part in packed.minibatches for m in part]))
    np.testing.assert_allclose(got, want, rtol=2e-4, atol=2e-4)


@pytest.mark.parametrize("policy", POLICIES)
def test_scores_of_a_packed_program_come_back_to_their_samples(config, batch_of, policy):
    batch = batch_of(groups=5, samples=3, seed=4)
    scores = token_scores_of(batch, config, (4, 2), Packing(policy, 2, Work(4.0)), lambda micro: micro.targets * 100 + micro.positions)
    for t, got in zip((t for g in batch.groups for t in g.trajectories), scores, strict=True):
        np.testing.assert_array_equal(got, t.tokens * 100 + np.arange(t.length) + len(t.prompt_tokens) - 1)


def test_an_approximated_proximal_policy_needs_no_pass_and_is_between_the_two(model, params, moved, mesh_of, batch_of):
    config = settings(proximal="log_linear")
    assert not needs_proximal(config) and needs_proximal(settings())
    trainer, initial = started(config, model, mesh_of(), params, moved)
    trainer.load_state(dataclasses.replace(initial, step=np.int32(7)))

    def loss(logprobs, entropy, start, behaviour, advantages, versions, arrays):
        share = (7 - versions) / (8 - versions)
        centre = jax.lax.stop_gradient(behaviour + share * (logprobs - behaviour))
        return eq5(logprobs, centre, behaviour, advantages)

    batch = batch_of(step=7, groups=4, samples=3, ages=(0, 1, 3), seed=5)
    metrics = trainer.step(trainer.build(batch))
    assert_close(trainer.params, descended(model, moved, batch, config, loss), moved)
    samples = [t for g in batch.groups for t in g.trajectories]
    part = split_groups([sum(t.length + len(t.prompt_tokens) - 1 for t in g.trajectories) for g in batch.groups], 2)[0]
    first = [samples[3 * g] for g in part]
    *arrays, mask = padded(first)
    scored = row_scores(model, moved, *arrays)[0]
    gaps = np.concatenate([np.abs(scored[row][mask[row] > 0] - t.behaviour_logprobs) for row, t in enumerate(first)])
    assert metrics["engine_gap/mean"] == pytest.approx(gaps.mean(), rel=1e-4), "measured where π is the policy before the step: the first minibatch"


def test_m2po_filters_the_whole_step(model, params, moved, mesh_of, batch_of):
    config = settings(loss="m2po", m2_threshold=0.05)
    trainer, _ = started(config, model, mesh_of(), params, moved)
    batch = batch_of(groups=4, samples=3, seed=6)
    samples = [t for g in batch.groups for t in g.trajectories]
    *arrays, mask = padded(samples)
    scored = row_scores(model, moved, *arrays)[0]
    moments = np.sort(np.concatenate([np.square(scored[row][mask[row] > 0] - t.behaviour_logprobs) for row, t in enumerate(samples)]))
    count = next(k for k in range(len(moments), 0, -1) if moments[:k].mean() < 0.05)
    most = (moments[count - 1] + moments[count]) / 2
    assert 3 < count < len(moments)

    def loss(logprobs, entropy, start, behaviour, advantages, versions, arrays):
        return -jnp.where(jnp.square(start - behaviour) < most, jnp.exp(logprobs - behaviour) * advantages, 0.0)

    metrics = trainer.step(trainer.build(batch))
    assert metrics["importance_weight/capped_fraction"] == pytest.approx(1 - count / len(moments), abs=1e-6)
    assert_close(trainer.params, descended(model, moved, batch, config, loss), moved)


def test_with_adapters_the_reference_is_the_base_below_them(model, params, mesh_of, batch_of):
    config = settings(kl_coefficient=0.1)
    config.trainer.minibatches, config.trainer.learning_rate, config.trainer.adam_epsilon = 1, 1e-2, 1e-5
    with_lora = dataclasses.replace(model, lora=Lora(2, 4.0, ("query", "up")))
    trainer = Trainer(config, with_lora, mesh_of(fsdp=2), add(with_lora, params, jax.random.key(0)))
    assert trainer.reference is trainer.frozen
    first, second = (trainer.step(trainer.build(batch_of(step)))["reference_kl"] for step in range(2))
    assert abs(first) < 1e-10 and second > 1e-8, "fresh adapters change nothing, trained ones do"


def test_samples_without_advantage_are_computed_where_the_loss_has_other_terms():
    assert skips_zero(base_config().algorithm)
    for change in ({"kl_coefficient": 0.1}, {"entropy_coefficient": 0.1}, {"loss": "m2po"}, {"skip_zero_advantage": False}):
        section = base_config().algorithm
        section.update(change)
        assert not skips_zero(section)
    section = base_config().algorithm
    section.update(kl_coefficient=0.1, kl_in="reward")
    assert skips_zero(section)


def test_long_and_truncated_responses_lose_reward_by_the_samplers_word(config, batch_of, with_trajectories):
    config.algorithm.update(overlong_penalty=0.5, overlong_buffer=8)
    config.rollout.max_new_tokens = 16
    batch = with_trajectories(batch_of(seed=11), lambda t: dataclasses.replace(t, truncated=t.sample_index == 0 and t.group_id == 100))
    samples = [t for g in batch.groups for t in g.trajectories]
    want = [t.reward - (0.5 if t.truncated else 0.5 * min(1.0, max(0.0, (t.length - 8) / 8))) for t in samples]
    np.testing.assert_allclose(rewards_of(batch, config), want)
    assert max(t.length for t in samples) < 16, "the longest of a batch is not truncated by that"
    assert build_batch(batch, config, (4,), Packing()).metrics["truncated_ratio"] == pytest.approx(1 / len(samples))
