"""Cells' files, and the settings that they are made with."""

import json

import pytest
from scripted_sampler import result

from areal_jax.config import ConfigError
from areal_jax.config_fields import FIELDS
from areal_jax.experiments.results import load_cells, save_cell
from areal_jax.experiments.study import Cell, cell_config, difference, overridden, settings, study_config, warmup_config

CELL = Cell("ppo", 4, 1)


def save(directory, cell=CELL, **settings):
    save_cell(directory / f"{cell.name}.json", cell, settings, result([0.3, 0.6]))


def test_what_is_saved_is_loaded(tmp_path):
    save(tmp_path, a=1)
    save(tmp_path, Cell("ppo", 0, 1), a=1)
    found = load_cells(tmp_path)
    assert sorted(found) == [Cell("ppo", 0, 1), CELL] and found[CELL].final == 0.6 and found[CELL].settings == {"a": 1}
    assert sorted(file.name for file in tmp_path.iterdir()) == ["ppo-eta0-seed1.json", "ppo-eta4-seed1.json"], "nothing else is left"


def test_unlike_settings_are_never_mixed(tmp_path):
    save(tmp_path, a=1)
    with pytest.raises(ConfigError, match=r"ppo-eta4-seed1.json' was made with 'a' = 1, not 2; .*another --out"):
        load_cells(tmp_path, {"a": 2})
    save(tmp_path, Cell("ppo", 8, 1), a=3)
    with pytest.raises(ConfigError, match="unlike settings"):
        load_cells(tmp_path)


@pytest.mark.parametrize("text", ["{", "{}", "[]", json.dumps({"cell": {"loss": "ppo", "eta": 4, "seed": 1}, "settings": {}})])
def test_a_file_that_is_no_cells_is_named(tmp_path, text):
    (tmp_path / "broken.json").write_text(text)
    with pytest.raises(ConfigError, match=r"broken.json' must be a cell's file"):
        load_cells(tmp_path)


def test_settings_survive_json_and_tell_what_differs():
    base = study_config()
    mine = settings(base, 40)
    assert difference(mine, json.loads(json.dumps(mine))) == ""
    assert difference(mine, settings(base, 41)) == "'train_ticks' = 41, not 40"
    assert difference(mine, settings(overridden(base, [("trainer.learning_rate", "0.5")]), 40)).startswith("'trainer.learning_rate' = 0.5, not")


def test_a_cell_differs_in_the_grid_alone(tmp_path):
    base = study_config()
    config = cell_config(base, CELL, tmp_path, tmp_path / "compiled", planned=False)
    assert (config.algorithm.loss, config.rollout.max_staleness, config.seed, config.model.path) == ("ppo", 4, 1, str(tmp_path))
    assert settings(config, 40) == {**settings(base, 40), "sft.steps": 0}


def test_warm_ups_of_other_learning_rates_are_shared():
    one, two = (warmup_config(overridden(study_config(), [("trainer.learning_rate", rate)]), 3) for rate in ("1e-4", "1e-3"))
    assert one.to_dict() == two.to_dict() and one.seed == 3 and one.sft.steps > 0


@pytest.mark.parametrize(
    ("key", "words"),
    [
        ("trainer.lerning_rate", "did you mean 'trainer.learning_rate'"),
        ("rollout.max_staleness", "by '--etas'"),
        ("model.path", "set by the study"),
    ],
)
def test_keys_that_may_not_be_set_are_refused(key, words):
    with pytest.raises(ConfigError, match=words):
        overridden(study_config(), [(key, "1")])


@pytest.mark.parametrize("loss", FIELDS["algorithm"]["loss"].choices)
@pytest.mark.parametrize("eta", [0, 16])
def test_every_loss_may_be_a_cell_under_every_bound(tmp_path, loss, eta):
    config = cell_config(study_config(), Cell(loss, eta, 0), tmp_path, tmp_path, planned=False)
    assert config.algorithm.loss == loss
