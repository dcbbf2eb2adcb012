"""Lengths that follow from a task."""

import types

import pytest

from areal_jax.config import ConfigError, base_config, put
from areal_jax.data.task import settle_lengths


@pytest.mark.parametrize(
    ("prompt", "response", "mesh", "capacity"), [(10, 112, "", 192), (100, 112, "", 256), (100, 112, "context=3", 384), (10, 112, "context=2,tensor=2", 192)]
)
def test_a_chosen_capacity_holds_the_longest_sequence_and_divides_over_context(prompt, response, mesh, capacity):
    config = base_config()
    put(config, "rollout.max_new_tokens", response)
    put(config, "cluster.mesh.trainer", mesh)
    assert settle_lengths(config, types.SimpleNamespace(longest_prompt=prompt)) == (prompt + response, capacity)


def test_a_capacity_that_is_too_small_is_refused():
    config = base_config()
    put(config, "trainer.micro_batch_tokens", 128)
    with pytest.raises(ConfigError, match=r"'trainer\.micro_batch_tokens' must hold.*got 128"):
        settle_lengths(config, types.SimpleNamespace(longest_prompt=60))
