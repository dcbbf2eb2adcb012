"""The supervised warm-up."""

import jax
import numpy as np
import pytest

from areal_jax.config import base_config
from areal_jax.models.forward import ForwardSettings
from areal_jax.models.policy import packed_logits
from areal_jax.trainer.packing import take_rows
from areal_jax.trainer.supervised import SupervisedTrainer, learning_rate, pack_demonstrations, rows_of_step


@pytest.fixture(scope="module")
def pairs():
    random = np.random.default_rng(0)
    made = []
    for _ in range(200):
        prompt = random.integers(2, 24, random.integers(2, 6)).astype(np.int32)
        made.append((prompt, np.r_[prompt[::-1], 1].astype(np.int32)))
    return made


@pytest.fixture(scope="module")
def section():
    section = base_config().sft
    section.steps, section.rows, section.warmup_steps, section.learning_rate = 40, 8, 4, 1e-2
    return section


def test_only_responses_are_learnt(pairs):
    corpus = pack_demonstrations(pairs, 32)
    assert corpus.loss_mask.sum() == sum(len(r) for _, r in pairs)
    assert (corpus.segment_ids > 0).mean() > 0.9
    assert sorted(corpus.targets[corpus.loss_mask > 0].tolist()) == sorted(int(t) for _, r in pairs for t in r)


def test_each_row_once_an_epoch_and_a_new_order_in_the_next():
    rows = np.concatenate([rows_of_step(s, 12, 4, 7) for s in range(6)])
    first, second = rows[:12], rows[12:]
    assert sorted(first) == sorted(second) == list(range(12)) and list(first) != list(second)
    np.testing.assert_array_equal(rows_of_step(1, 12, 5, 7), rows[5:10])


def test_learning_rate_warms_up_stays_and_falls(section):
    section = section.copy_and_resolve_references()
    section.decay_start, section.final_fraction = 0.5, 0.1
    rates = [learning_rate(section, s) / 1e-2 for s in range(40)]
    assert rates[0] == pytest.approx(0.25) and rates[3:21] == pytest.approx([1.0] * 18) and rates[-1] == pytest.approx(0.1)
    assert np.diff(rates[21:]) == pytest.approx(np.full(18, -0.9 / 19))


@pytest.fixture(scope="module")
def made(section, model, params, pairs, mesh_of):
    """One compiled trainer for the module; ``trainer`` sets it back."""
    trainer = SupervisedTrainer(section, model, mesh_of(), params, pack_demonstrations(pairs, 32), seed=1, forward=ForwardSettings())
    return trainer, jax.device_get(trainer.state)


@pytest.fixture
def trainer(made):
    trainer, initial = made
    trainer.load_state(initial)
    return trainer


def test_it_learns_on_any_mesh_and_goes_on_exactly_after_a_restore(trainer, section, model, params, pairs, mesh_of):
    losses = [float(trainer.step()["loss"]) for _ in range(3)]
    saved = jax.device_get(trainer.state)
    losses += [float(trainer.step()["loss"]) for _ in range(9)]
    assert losses[-1] < losses[0] - 0.4
    trainer.load_state(saved)
    assert trainer.version == 3
    assert [float(trainer.step()["loss"]) for _ in range(9)] == losses[3:]
    mesh = mesh_of(data=2, tensor=2)
    sharded = SupervisedTrainer(section, model, mesh, jax.device_put(params), trainer.corpus, seed=1, forward=ForwardSettings(mesh=mesh))
    np.testing.assert_allclose([float(sharded.step()["loss"]) for _ in range(12)], losses, rtol=1e-4)


def test_the_loss_is_the_mean_over_response_tokens_and_the_input_survives(trainer, model, params):
    before = jax.tree.map(np.copy, params)
    rows = rows_of_step(0, trainer.corpus.tokens.shape[0], 8, 1)
    batch = take_rows(trainer.corpus, rows)
    logits = np.asarray(packed_logits(model, params, batch.tokens, batch.positions, batch.segment_ids), np.float64)
    logits -= np.log(np.exp(logits).sum(-1, keepdims=True))
    chosen = np.take_along_axis(logits, batch.targets[..., None], -1)[..., 0][batch.loss_mask > 0]
    metrics = trainer.step()
    assert float(metrics["loss"]) == pytest.approx(-chosen.mean(), rel=1e-5) and float(metrics["tokens"]) == chosen.size
    jax.tree.map(np.testing.assert_array_equal, params, before)
