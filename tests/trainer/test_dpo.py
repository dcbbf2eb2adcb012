"""DPO: eq. 7 of arXiv 2305.18290, its gradient however pairs are divided, and what it learns."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from numpy_policy import as_float64, logits

from areal_jax.config import base_config
from areal_jax.models.forward import ForwardSettings
from areal_jax.telemetry.compiles import CompileCounter
from areal_jax.trainer.examples import Corpus
from areal_jax.trainer.preference import DirectPreference, PreferenceTrainer, pair_logprobs
from areal_jax.types import Example, TrainingSequence

BETA, SMOOTHING = 0.3, 0.1


def sequence(random, prompt, length):
    tokens = np.r_[prompt, random.integers(1, 24, length)].astype(np.int32)
    return TrainingSequence(tokens, np.arange(tokens.size) >= prompt.size)


@pytest.fixture(scope="module")
def pairs():
    random = np.random.default_rng(2)
    made = []
    for _ in range(20):
        prompt = random.integers(2, 24, random.integers(2, 5))
        made.append(Example(tuple(sequence(random, prompt, random.integers(1, 8)) for _ in range(2))))
    return made


@pytest.fixture(scope="module")
def reference(pairs):
    """Log-probs of another policy."""
    random = np.random.default_rng(3)
    return np.array([[-3.0 * s.trained.sum() + random.normal() for s in pair.sequences] for pair in pairs], np.float32)


def numpy_logprobs(model, params, pairs):
    """float64 [pairs, 2], one sequence after another."""

    def one(s):
        scores = logits(model, params, s.tokens[:-1])
        scores -= np.log(np.exp(scores).sum(-1, keepdims=True))
        return scores[np.arange(s.positions), s.tokens[1:]][s.trained[1:]].sum()

    return np.array([[one(s) for s in pair.sequences] for pair in pairs])


def numpy_dpo(policy, reference, beta, smoothing):
    """Means over pairs of (loss, margin, pairs in order), float64."""
    ratios = policy - np.asarray(reference, np.float64)
    z = beta * (ratios[:, 0] - ratios[:, 1])
    sigmoid = 1 / (1 + np.exp(-z))
    return (-(1 - smoothing) * np.log(sigmoid) - smoothing * np.log(1 - sigmoid)).mean(), z.mean(), (z > 0).mean()


def gradient_of(trainer):
    moment = optax.tree.get(trainer.state.opt_state, "mu")
    return jax.tree.map(lambda m: np.asarray(m, np.float64) / (1 - trainer.section.adam_b1), moment)


@pytest.fixture(scope="module")
def make(model, params, mesh_of, pairs, reference):
    def trainer(capacity=48, micro=0, rows=8, reverse=False, lr=1e-2, smoothing=SMOOTHING, held=None, epochs=1, **axes):
        section = base_config().sft
        section.update(rows=rows, micro_batch_rows=micro, steps=20, warmup_steps=0, learning_rate=lr, grad_clip=1e9, weight_decay=0.0)
        order = slice(None, None, -1) if reverse else slice(None)
        corpus = Corpus(pairs[order], capacity)
        corpus.reference = reference[order]
        heldout = None
        if held is not None:
            heldout = Corpus(pairs[held], capacity)
            heldout.reference = reference[held]
        mesh = mesh_of(**axes)
        objective = DirectPreference(BETA, smoothing)
        return PreferenceTrainer(section, model, mesh, params, corpus, 0, ForwardSettings(mesh=mesh), objective=objective, epochs=epochs, heldout=heldout)

    return trainer


@pytest.fixture(scope="module")
def whole(make, pairs):
    """One step over all pairs in one micro-batch on one device."""
    trainer = make(rows=8)
    assert len(trainer.order) == 1
    metrics = {name: float(value) for name, value in trainer.step().items()}
    return metrics, gradient_of(trainer)


def test_loss_and_gradient_are_those_of_numpy_and_finite_differences(whole, model, params, pairs, reference):
    metrics, gradient = whole
    start = as_float64(params)
    policy = numpy_logprobs(model, start, pairs)
    loss, margin, correct = numpy_dpo(policy, reference, BETA, SMOOTHING)
    assert (
        metrics["loss"] == pytest.approx(loss, rel=1e-5)
        and metrics["margin"] == pytest.approx(margin, rel=1e-4)
        and metrics["correct"] == pytest.approx(correct)
    )
    assert [metrics[f"{name}_logprob"] for name in ("chosen", "rejected")] == pytest.approx(policy.mean(0), rel=1e-5)
    assert [metrics[f"{name}_reward"] for name in ("chosen", "rejected")] == pytest.approx(BETA * (policy - reference).mean(0), rel=1e-4)
    assert metrics["count"] == 20 and metrics["tokens"] == sum(s.trained.sum() for p in pairs for s in p.sequences)
    random = np.random.default_rng(0)
    direction = jax.tree.map(lambda leaf: random.normal(size=leaf.shape), start)
    step = 1e-5
    ahead, behind = (
        numpy_dpo(numpy_logprobs(model, jax.tree.map(lambda p, d, s=sign: p + s * step * d, start, direction), pairs), reference, BETA, SMOOTHING)[0]
        for sign in (1, -1)
    )
    along = sum(jax.tree.leaves(jax.tree.map(lambda g, d: float((g * d).sum()), gradient, direction)))
    assert along == pytest.approx((ahead - behind) / (2 * step), rel=1e-4)


@pytest.mark.parametrize(
    "settings",
    [
        {"micro": 2},
        {"micro": 3, "reverse": True},
        {"capacity": 96, "rows": 4},
        {"data": 2},
        {"data": 4, "micro": 4},
        {"data": 8},
        {"fsdp": 2, "context": 2, "tensor": 2, "micro": 4},
    ],
    ids=str,
)
def test_the_gradient_does_not_depend_on_packing_micro_batches_or_devices(whole, make, settings):
    metrics, gradient = whole
    trainer = make(**settings)
    other = trainer.step()
    for name in ("loss", "margin", "correct", "chosen_logprob", "rejected_reward", "grad_norm", "count"):
        assert float(other[name]) == pytest.approx(metrics[name], rel=2e-5), name
    scale = max(np.abs(leaf).max() for leaf in jax.tree.leaves(gradient))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5 * scale), gradient_of(trainer), gradient)


def test_the_reference_is_the_start_so_the_first_loss_is_log_two_and_then_falls(make, model, params, pairs):
    trainer = make(smoothing=0.0, held=slice(0, 5), rows=6, micro=3, epochs=None)
    for corpus in (trainer.corpus, trainer.heldout):
        corpus.reference = trainer.reference_logprobs(corpus)
    np.testing.assert_allclose(trainer.corpus.reference, numpy_logprobs(model, as_float64(params), pairs), rtol=1e-5)
    np.testing.assert_array_equal(trainer.heldout.reference, trainer.corpus.reference[:5])
    before = trainer.evaluate()
    assert before["loss"] == pytest.approx(np.log(2), abs=1e-5) and abs(before["margin"]) < 1e-4 and before["count"] == 5
    compiles = CompileCounter()
    losses = [float(trainer.step()["loss"]) for _ in range(12)]
    assert compiles.count == 0
    compiles.close()
    assert losses[0] == pytest.approx(np.log(2), abs=1e-5) and losses[-1] < 0.5 * losses[0]
    after = trainer.evaluate()
    assert after["correct"] == 1.0 and after["margin"] > 0.5 and after["chosen_reward"] - after["rejected_reward"] == pytest.approx(after["margin"], rel=1e-4)


def test_pairs_without_a_reference_are_not_trained(make):
    trainer = make()
    trainer.corpus.reference = None
    with pytest.raises(ValueError, match="reference policy"):
        trainer.step()


def test_far_margins_stay_finite():
    """−log σ(z) is −z far below 0 and 0 far above; the gradient is −1 and 0."""
    rows = Corpus([Example((TrainingSequence(np.array([1, 2], np.int32), np.array([False, True])),) * 2)], 4).rows([0], 1, slots=1)
    for chosen, expected, slope in ((-2e4, 2e4, -1.0), (2e4, 0.0, 0.0)):
        logprobs = jnp.asarray([[chosen, 0.0, 0.0, 0.0]], jnp.float32)
        loss, gradient = jax.value_and_grad(lambda lp: DirectPreference(1.0).sums(lp, rows)["loss"])(logprobs)
        assert float(loss) == pytest.approx(expected) and gradient[0, 0] == pytest.approx(slope)
    np.testing.assert_array_equal(pair_logprobs(jnp.asarray([[1.0, 2.0, 4.0, 8.0]]), rows), [[[1.0, 2.0]]])
