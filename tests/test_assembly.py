"""What the configuration says reaches the parts that it is about, and no others."""

import numpy as np
import pytest

from areal_jax.assembly import load_problems, make_driver, make_engine, make_policy, stop_ids
from areal_jax.cluster.meshes import make_meshes
from areal_jax.config import ConfigError, base_config, validate
from areal_jax.models.tokenizer import embedded_tokenizer
from areal_jax.types import GenerationRequest, WeightUpdate


def config_of(**rollout):
    config = base_config()
    config.model.update(layers=1, hidden_size=16, heads=2, kv_heads=1, head_dim=8, mlp_size=16)
    config.cluster.update(sampler_devices=1, trainer_devices=1)
    config.rollout.update(slots=8, group_size=8, max_new_tokens=40, prefill_groups=1, prefill_buckets=(), steps_per_dispatch=8, **rollout)
    return validate(config)


def test_stop_texts_end_responses_of_the_sampler_alone():
    stop = ("7", "####", "=", *"abcdefghijklmnop")
    tokenizer, config = embedded_tokenizer(), config_of(stop=stop)
    model, params = make_policy(config, tokenizer)
    engine = make_engine(config, model, make_meshes(config), tokenizer, 48)
    assert model.eos_ids == (1,), "what the trainer exports knows the end-of-text token alone"
    assert engine.model.eos_ids == (1, *(int(tokenizer.encode(text)[0]) for text in stop))
    finished = []
    driver = make_driver(config, engine, WeightUpdate(0, engine.load_params(params)), seed=0, on_progress=lambda progress: finished.extend(progress.finished))
    driver.submit([GenerationRequest(0, i, tokenizer.encode("4+3="), 40) for i in range(8)])
    driver.run_until_done(deadline_s=60.0)
    for trajectory in finished:
        ends = np.isin(trajectory.tokens, engine.model.eos_ids)
        assert not ends[:-1].any() and trajectory.truncated == (not ends[-1])
        if not trajectory.truncated and trajectory.tokens[-1] != 1:
            assert tokenizer.decode(trajectory.tokens).endswith(stop), "the verifier reads the stop text"
    assert any(not t.truncated and t.tokens[-1] != 1 for t in finished)


def test_a_stop_text_of_two_tokens_is_refused_before_the_problems_are_made():
    with pytest.raises(ConfigError, match=r"'rollout\.stop': .*'ab' is 2: 'a' 'b'"):
        load_problems(config_of(stop=("ab",)))
    assert stop_ids(config_of(), embedded_tokenizer()) == ()
