"""Fine-tuning stopped and begun again is the whole run; evaluations and checkpoints come when they are due."""

import jax
import numpy as np
import pytest

from areal_jax.config import ConfigError, base_config
from areal_jax.models.forward import ForwardSettings
from areal_jax.trainer.examples import Corpus
from areal_jax.trainer.preference import DirectPreference, PreferenceTrainer
from areal_jax.trainer.step import NonFiniteError
from areal_jax.trainer.supervised import SupervisedTrainer
from areal_jax.trainer.tuning import Tuning
from areal_jax.types import Example, TrainingSequence


def examples(count, sequences=1):
    random = np.random.default_rng(4)

    def one():
        tokens = random.integers(1, 24, random.integers(3, 9)).astype(np.int32)
        return TrainingSequence(tokens, np.arange(tokens.size) > 1)

    return [Example(tuple(one() for _ in range(sequences))) for _ in range(count)]


@pytest.fixture(scope="module")
def settled():
    config = base_config()
    config.sft.update(steps=10, rows=2, warmup_steps=0, learning_rate=1e-2, checkpoint_every=4, eval_every=3, eval_fraction=0.5)
    return config


@pytest.fixture(scope="module")
def made(settled, model, params, mesh_of):
    """One compiled trainer for the module, and its state at the start."""
    trainer = SupervisedTrainer(settled.sft, model, mesh_of(), params, Corpus(examples(30), 32), 0, ForwardSettings(), heldout=Corpus(examples(7), 32))
    return trainer, jax.device_get(trainer.state)


@pytest.fixture
def begun(made, settled):
    """Begins a run in a directory with the trainer set back."""
    trainer, initial = made

    def begin(directory, fingerprint="data", config=settled):
        trainer.load_state(initial)
        return Tuning(config, trainer, directory / "checkpoints", fingerprint)

    return begin


class Log:
    def __init__(self, stop_at=None):
        self.rows, self.evals, self.stop_at = [], [], stop_at

    def run(self, tuning):
        try:
            return tuning.run(self.rows.append, self.evals.append, lambda: tuning.trainer.version == self.stop_at)
        finally:
            tuning.close()


def test_stopped_run_goes_on_as_the_whole(begun, made, tmp_path):
    whole = Log()
    assert whole.run(begun(tmp_path / "whole"))
    final = jax.device_get(made[0].params)
    assert [row["step"] for row in whole.rows] == list(range(1, 11)) and [row["step"] for row in whole.evals] == [0, 3, 6, 9, 10]
    first, second = Log(stop_at=5), Log()
    assert not first.run(begun(tmp_path / "parts"))
    again = begun(tmp_path / "parts")
    assert again.resumed == 5 and second.run(again)
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(made[0].params), final)
    for name in ("loss/supervised", "grad_norm", "learning_rate", "epoch", "step"):
        assert [row[name] for row in first.rows + second.rows] == [row[name] for row in whole.rows], name
    assert [row["eval/loss"] for row in first.evals + second.evals] == [row["eval/loss"] for row in whole.evals]
    assert whole.evals[-1]["eval/loss"] < whole.evals[0]["eval/loss"]
    assert all(row["eval/perplexity"] == pytest.approx(np.exp(row["eval/loss"])) and row["eval/n"] == 7 for row in whole.evals)
    finished = Log()
    assert finished.run(begun(tmp_path / "parts")) and not finished.rows and not finished.evals


def test_other_data_or_steps_are_refused(begun, settled, tmp_path):
    Log(stop_at=2).run(begun(tmp_path))
    with pytest.raises(ConfigError, match=r"keeps the data of its checkpoints \(data\); got other"):
        begun(tmp_path, "other")
    longer = settled.copy_and_resolve_references()
    longer.sft.steps = 11
    with pytest.raises(ConfigError, match=r"keeps the number of steps.*\(10\); got 11"):
        begun(tmp_path, config=longer)


def test_gradients_that_are_not_finite_end_the_run(begun, made, tmp_path):
    trainer, _ = made
    tuning = begun(tmp_path)
    trainer.state = jax.device_put(
        jax.tree.map(lambda leaf: leaf * np.nan if leaf.dtype == np.float32 else leaf, jax.device_get(trainer.state)), trainer.placement.state
    )
    log = Log()
    with pytest.raises(NonFiniteError, match=r"3 updates in a row were not, up to step 3 .*sft\.learning_rate"):
        log.run(tuning)
    assert [row["update/skipped_nonfinite"] for row in log.rows] == [1, 1, 1]


def test_the_reference_is_kept_with_the_run(settled, model, params, mesh_of, tmp_path):
    config = settled.copy_and_resolve_references()
    config.sft.update(objective="dpo", steps=2)

    def make(start):
        corpora = [Corpus(examples(6, sequences=2), 32) for _ in range(2)]
        return PreferenceTrainer(config.sft, model, mesh_of(), start, corpora[0], 0, ForwardSettings(), objective=DirectPreference(0.1), heldout=corpora[1])

    trainer, log = make(params), Log()
    assert log.run(Tuning(config, trainer, tmp_path / "checkpoints", "data"))
    assert [row["step"] for row in log.evals] == [0, 2] and log.evals[0]["eval/loss"] == pytest.approx(np.log(2), abs=1e-5)
    assert {"preference/margin", "preference/correct", "preference/chosen_logprob"} <= log.rows[0].keys()
    kept = trainer.corpus.reference
    again = make(params)
    again.reference_logprobs = None  # not computed anew
    Tuning(config, again, tmp_path / "checkpoints", "data").close()
    np.testing.assert_array_equal(again.corpus.reference, kept)
    np.testing.assert_array_equal(again.heldout.reference, kept)
    changed = jax.tree.map(lambda leaf: leaf + np.float32(1e-3), params)
    with pytest.raises(ConfigError, match=r"reference\.npz' holds the reference log-probs of other data or other weights"):
        Tuning(config, make(changed), tmp_path / "checkpoints", "data")
