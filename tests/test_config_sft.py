"""Keys of fine-tuning that contradict each other are refused before anything starts."""

import pathlib

import pytest

from areal_jax.config import ConfigError, base_config, put, read_file, validate
from areal_jax.workdir import open_workdir

HERE = __file__
VARIANTS = pathlib.Path(HERE).parent.parent / "configs" / "sft.py"


def changed(**changes):
    config = base_config()
    for key, value in {"sft.data": HERE, **changes}.items():
        put(config, key.replace("__", "."), value)
    return validate(config)


@pytest.mark.parametrize(
    "changes, parts",
    [
        ({"sft.data": "", "sft__objective": "dpo"}, ("'sft.objective'", "'sft.data' is empty", "'dpo'")),
        ({"sft.data": "", "sft__epochs": 2}, ("'sft.epochs'", "'sft.data' is empty", "got 2")),
        ({"sft.data": "", "sft__eval_fraction": 0.1}, ("'sft.eval_fraction'", "0.1")),
        ({"sft__path": "."}, ("'sft.data'", "'sft.path'")),
        ({"sft__epochs": 2, "sft__steps": 5}, ("'sft.epochs'", "'sft.steps'", "2 and 5")),
        ({"sft__steps": 0}, ("'sft.steps' must be at least 1", "sft.epochs")),
        ({"sft__eval_every": 5}, ("'sft.eval_every' = 5", "sft.eval_data")),
        ({"sft__micro_batch_rows": 17}, ("'sft.micro_batch_rows' must be at most 'sft.rows' = 16", "17")),
        ({"sft__objective": "dpo", "sft__learn_turns": "last"}, ("'sft.learn_turns'", "'sft.objective=dpo'")),
        ({"sft__label_smoothing": 0.1}, ("'sft.label_smoothing'", "sft.objective=dpo")),
        ({"sft.data": "absent.jsonl"}, ("'sft.data'", "absent.jsonl", "is not there")),
        ({"sft__eval_data": "absent"}, ("'sft.eval_data'", "absent")),
        ({"sft__beta": 0.0}, ("'sft.beta' must be greater than 0.0",)),
        ({"sft__objective": "ppo"}, ("'sft.objective' must be one of sft, dpo",)),
    ],
)
def test_refusals_name_rule_value_and_remedy(changes, parts):
    with pytest.raises(ConfigError) as caught:
        changed(**changes)
    assert all(part in str(caught.value) for part in parts), str(caught.value)


def test_one_epoch_unless_something_is_said():
    config = changed()
    assert (config.sft.epochs, config.sft.steps) == (1, 0) and validate(config) is config
    assert (changed(sft__steps=7).sft.epochs, changed(sft__epochs=3).sft.epochs) == (None, 3)


def test_variants_of_the_file():
    dpo, lora = read_file(f"{VARIANTS}:dpo"), read_file(f"{VARIANTS}:lora")
    assert dpo.sft.objective == "dpo" and dpo.sft.learning_rate < lora.sft.learning_rate and lora.model.lora_rank == 16
    with pytest.raises(ConfigError, match=r"no variant 'ppo'; it has lora, dpo, dpo-lora"):
        read_file(f"{VARIANTS}:ppo")


def test_a_resumed_run_keeps_its_data_and_may_evaluate_otherwise(tmp_path):
    base = {"sft__eval_fraction": 0.2}
    open_workdir(tmp_path, changed(**base))
    (tmp_path / "checkpoints" / "3").mkdir(parents=True)
    open_workdir(tmp_path, changed(**base, sft__eval_every=5, sft__checkpoint_every=7, sft__micro_batch_rows=2))
    with pytest.raises(ConfigError, match=r"'sft\.eval_fraction' = 0\.2, not 0\.3"):
        open_workdir(tmp_path, changed(sft__eval_fraction=0.3))
