"""Supervised learning of packed examples: the loss and its gradient, however rows are divided; the warm-up's demonstrations."""

import jax
import numpy as np
import optax
import pytest
from numpy_policy import as_float64, logits

from areal_jax.config import base_config
from areal_jax.models.forward import ForwardSettings
from areal_jax.trainer.examples import Corpus
from areal_jax.trainer.supervised import SupervisedTrainer, learning_rate, pack_demonstrations
from areal_jax.types import Example, TrainingSequence


@pytest.fixture(scope="module")
def pairs():
    random = np.random.default_rng(0)
    made = []
    for _ in range(200):
        prompt = random.integers(2, 24, random.integers(2, 6)).astype(np.int32)
        made.append((prompt, np.r_[prompt[::-1], 1].astype(np.int32)))
    return made


@pytest.fixture(scope="module")
def talks():
    """Examples of several learnt stretches each."""
    random = np.random.default_rng(5)
    made = []
    for _ in range(24):
        tokens = random.integers(1, 24, random.integers(3, 12)).astype(np.int32)
        trained = np.r_[False, random.random(tokens.size - 1) < 0.4]
        trained[-1] = True
        made.append(Example((TrainingSequence(tokens, trained),)))
    return made


@pytest.fixture(scope="module")
def section():
    section = base_config().sft
    section.steps, section.rows, section.warmup_steps, section.learning_rate = 40, 8, 4, 1e-2
    return section


def gradient_of(trainer):
    """The gradient of the last step: Adam's first moment after one step from zero, unclipped."""
    moment = optax.tree.get(trainer.state.opt_state, "mu")
    return jax.tree.map(lambda m: np.asarray(m, np.float64) / (1 - trainer.section.adam_b1), moment)


def numpy_loss(model, params, examples):
    """Cross-entropy a learnt token, float64, one sequence after another."""
    total, count = 0.0, 0
    for sequence in (s for e in examples for s in e.sequences):
        scores = logits(model, params, sequence.tokens[:-1])
        scores -= np.log(np.exp(scores).sum(-1, keepdims=True))
        chosen = scores[np.arange(sequence.positions), sequence.tokens[1:]]
        total, count = total - chosen[sequence.trained[1:]].sum(), count + sequence.trained.sum()
    return total / count


@pytest.fixture(scope="module")
def whole(section, model, params, talks, mesh_of):
    """(loss, gradient) of all talks in one micro-batch on one device."""
    own = section.copy_and_resolve_references()
    own.update(rows=8, grad_clip=1e9)
    trainer = SupervisedTrainer(own, model, mesh_of(), params, Corpus(talks, 32), 0, ForwardSettings(), epochs=1)
    assert len(trainer.order) == 1
    metrics = trainer.step()
    return own, float(metrics["loss"]), gradient_of(trainer), float(metrics["tokens"])


def test_loss_and_gradient_are_those_of_numpy_and_finite_differences(whole, model, params, talks):
    _, loss, gradient, tokens = whole
    start = as_float64(params)
    assert tokens == sum(e.sequences[0].trained.sum() for e in talks)
    assert loss == pytest.approx(numpy_loss(model, start, talks), rel=1e-6)
    random = np.random.default_rng(0)
    direction = jax.tree.map(lambda leaf: random.normal(size=leaf.shape), start)
    step = 1e-5
    ahead, behind = (numpy_loss(model, jax.tree.map(lambda p, d, s=sign: p + s * step * d, start, direction), talks) for sign in (1, -1))
    along = sum(jax.tree.leaves(jax.tree.map(lambda g, d: float((g * d).sum()), gradient, direction)))
    assert along == pytest.approx((ahead - behind) / (2 * step), rel=1e-4)


@pytest.mark.parametrize(
    "capacity, reverse, micro, axes",
    [
        (32, False, 2, {}),
        (32, True, 3, {}),
        (64, False, 0, {}),
        (32, False, 0, {"data": 8}),
        (32, False, 4, {"data": 2, "fsdp": 2}),
        (32, True, 2, {"context": 2, "tensor": 2}),
    ],
)
def test_the_gradient_does_not_depend_on_packing_micro_batches_or_devices(whole, model, params, talks, mesh_of, capacity, reverse, micro, axes):
    own, loss, gradient, _ = whole
    own = own.copy_and_resolve_references()
    own.micro_batch_rows = micro
    mesh = mesh_of(**axes)
    corpus = Corpus(talks[::-1] if reverse else talks, capacity)
    trainer = SupervisedTrainer(own, model, mesh, params, corpus, 1, ForwardSettings(mesh=mesh), epochs=1)
    assert float(trainer.step()["loss"]) == pytest.approx(loss, rel=1e-6)
    scale = max(np.abs(leaf).max() for leaf in jax.tree.leaves(gradient))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5 * scale), gradient_of(trainer), gradient)


def test_held_out_tokens_count_once_each_and_the_parameters_stay(whole, model, params, talks, mesh_of):
    own, *_ = whole
    own = own.copy_and_resolve_references()
    own.update(rows=4, micro_batch_rows=2)
    trainer = SupervisedTrainer(
        own, model, mesh_of(data=2), params, Corpus(talks[:8], 32), 0, ForwardSettings(mesh=mesh_of(data=2)), heldout=Corpus(talks[8:19], 32)
    )
    before = jax.device_get(trainer.params)
    values = trainer.evaluate()
    assert values["tokens"] == values["count"] == sum(e.sequences[0].trained.sum() for e in talks[8:19])
    assert values["loss"] == pytest.approx(numpy_loss(model, as_float64(params), talks[8:19]), rel=1e-6)
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(trainer.params), before)
    with pytest.raises(ValueError, match=r"sft\.eval_data"):
        trainer.heldout = None
        trainer.evaluate()


def test_only_responses_are_learnt(pairs):
    corpus = pack_demonstrations(pairs, 32)
    rows = corpus.rows(range(len(corpus.bins)), len(corpus.bins))
    assert rows.loss_mask.sum() == sum(len(r) for _, r in pairs)
    assert corpus.efficiency == (rows.segment_ids > 0).mean() > 0.9
    assert sorted(rows.targets[rows.loss_mask > 0].tolist()) == sorted(int(t) for _, r in pairs for t in r)


def test_learning_rate_warms_up_stays_and_falls(section):
    section = section.copy_and_resolve_references()
    section.decay_start, section.final_fraction = 0.5, 0.1
    rates = [learning_rate(section, s) / 1e-2 for s in range(40)]
    assert rates[0] == pytest.approx(0.25) and rates[3:21] == pytest.approx([1.0] * 18) and rates[-1] == pytest.approx(0.1)
    assert np.diff(rates[21:]) == pytest.approx(np.full(18, -0.9 / 19))


def test_it_learns_on_any_mesh_and_goes_on_exactly_after_a_restore(section, model, params, pairs, mesh_of):
    before = jax.tree.map(np.copy, params)
    corpus = pack_demonstrations(pairs, 32)
    trainer = SupervisedTrainer(section, model, mesh_of(), params, corpus, seed=1, forward=ForwardSettings())
    losses = [float(trainer.step()["loss"]) for _ in range(3)]
    saved = jax.device_get(trainer.state)
    losses += [float(trainer.step()["loss"]) for _ in range(9)]
    assert losses[-1] < losses[0] - 0.4
    trainer.load_state(saved)
    assert trainer.version == 3
    assert [float(trainer.step()["loss"]) for _ in range(9)] == losses[3:]
    jax.tree.map(np.testing.assert_array_equal, params, before)
    mesh = mesh_of(data=2, tensor=2)
    sharded = SupervisedTrainer(section, model, mesh, jax.device_put(params), corpus, seed=1, forward=ForwardSettings(mesh=mesh))
    np.testing.assert_allclose([float(sharded.step()["loss"]) for _ in range(12)], losses, rtol=1e-4)
