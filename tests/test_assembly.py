"""What the configuration says reaches the parts that it is about, and no others."""

import jax
import numpy as np
import pytest

from areal_jax.assembly import load_problems, make_driver, make_engine, make_policy, stop_ids
from areal_jax.cluster.meshes import make_meshes
from areal_jax.config import ConfigError, base_config, validate
from areal_jax.models.architecture import ModelConfig
from areal_jax.models.export import export_policy
from areal_jax.models.policy import init_params
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


def test_a_checkpoint_of_fewer_positions_than_the_run_needs(tmp_path):
    """Before devices exist; also the vocabulary, and what is wrong with the files."""
    tokenizer = embedded_tokenizer()
    model = ModelConfig("qwen2", tokenizer.vocab_size, layers=1, hidden_size=16, heads=2, kv_heads=1, head_dim=8, mlp_size=16, max_positions=64)
    export_policy(tmp_path, model, init_params(model, jax.random.key(0)), tokenizer)

    def problems(**changes):
        config = config_of()
        config.model.path = str(tmp_path)
        config.task.update(max_prompt_tokens=24, train_problems=64)
        config.rollout.update(changes)
        return load_problems(validate(config))

    longest = problems(max_new_tokens=40)[1].longest_prompt
    problems(max_new_tokens=64 - longest)
    with pytest.raises(
        ConfigError, match=rf"prompt of {longest} tokens \+ 'rollout\.max_new_tokens' = {65 - longest} .* at most the 64 positions .* got 65; lower"
    ):
        problems(max_new_tokens=65 - longest)
    (tmp_path / "config.json").write_text((tmp_path / "config.json").read_text().replace(f'"vocab_size": {tokenizer.vocab_size}', '"vocab_size": 100'))
    with pytest.raises(ConfigError, match=r"'model\.path': .*vocabulary of 100"):
        problems(max_new_tokens=40)
    (tmp_path / "config.json").unlink()
    with pytest.raises(ConfigError, match=r"'model\.path': .*config\.json' is not there"):
        problems(max_new_tokens=40)
