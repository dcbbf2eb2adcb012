"""Rules of the algorithm section: what is refused, with which remedy, and that the recipes pass."""

import pytest

from areal_jax.algorithms.recipes import RECIPES, with_recipe
from areal_jax.config import ConfigError, base_config, put, validate


def checked(*overrides):
    config = base_config()
    for key, value in overrides:
        put(config, key, value)
    return validate(config)


@pytest.mark.parametrize("loss", ["ppo", "gspo", "sapo", "reinforce"])
@pytest.mark.parametrize("eta", [1, None])
def test_a_loss_that_ignores_staleness_is_refused_unless_the_configuration_says_so(loss, eta):
    ignoring = (("algorithm.loss", loss), ("rollout.max_staleness", eta))
    with pytest.raises(ConfigError, match=rf"algorithm\.loss={loss}.*'rollout\.max_staleness' must be 0; got {eta}.*allow_uncorrected_staleness=True"):
        checked(*ignoring)
    checked(*ignoring, ("algorithm.allow_uncorrected_staleness", True))
    checked(("algorithm.loss", loss), ("rollout.max_staleness", 0))
    if loss != "ppo":
        checked(*ignoring, ("algorithm.decoupled", True))


@pytest.mark.parametrize("loss", ["decoupled_ppo", "cispo", "m2po"])
def test_a_loss_that_corrects_is_not(loss):
    checked(("algorithm.loss", loss))


@pytest.mark.parametrize(
    "overrides, says",
    [
        ({"loss": "m2po", "decoupled": True}, r"decoupled=True' is for gspo, cispo, sapo, reinforce; got 'algorithm\.loss=m2po'"),
        ({"loss": "cispo", "importance_weight_floor": 0.5}, r"importance_weight_floor' bounds.*loss=cispo' does not have; got 0\.5.*decoupled=True"),
        ({"importance_weight_floor": 3.0, "importance_weight_cap": 2.0}, r"got 3\.0 > 2\.0"),
        ({"loss": "cispo", "dual_clip": 3.0}, r"dual_clip' bounds a clipped surrogate.*got 3\.0"),
        ({"loss": "m2po", "proximal": "log_linear"}, r"algorithm\.proximal' must be recompute.*m2po.*got log_linear"),
        ({"overlong_penalty": 1.0, "overlong_buffer": 113}, r"overlong_buffer' must be at most 'rollout\.max_new_tokens' = 112; got 113"),
        ({"overlong_buffer": 8}, r"overlong_buffer' = 8 needs the penalty"),
        ({"aggregation": "tokens"}, r"token, sequence, prompt, constant; got 'tokens'; did you mean 'token'"),
        ({"kl_coefficient": -0.1}, r"kl_coefficient' must be at least 0"),
    ],
)
def test_contradictions_name_both_sides(overrides, says):
    with pytest.raises(ConfigError, match=says):
        checked(*((f"algorithm.{key}", value) for key, value in overrides.items()))


def test_dynamic_sampling_needs_a_group_and_exact_logprobs_no_approximation():
    with pytest.raises(ConfigError, match=r"dynamic_sampling' drops groups.*at least 2; got 1"):
        checked(("algorithm.dynamic_sampling", True), ("rollout.group_size", 1), ("algorithm.advantage", "batch"))
    with pytest.raises(ConfigError, match=r"exact_logprobs' sets π_behav"):
        checked(("algorithm.proximal", "log_linear"), ("rollout.exact_logprobs", True))


@pytest.mark.parametrize("name", sorted(RECIPES))
def test_every_recipe_is_a_configuration_that_runs_asynchronously(name):
    config = validate(with_recipe(base_config(), name))
    assert config.rollout.max_staleness == 4
    assert all(config.algorithm[key] == value for key, value in RECIPES[name].items())
    assert (config.algorithm.overlong_buffer > 0) == (name == "dapo")
