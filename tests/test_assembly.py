"""What the configuration says reaches the parts that it is about, and no others."""

import jax
import numpy as np
import pytest

from areal_jax.assembly import load_problems, make_engines, make_policy, make_sampler, stop_ids
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
    config.rollout.update(slots=8, group_size=8, max_new_tokens=40, steps_per_dispatch=8, **rollout)
    return validate(config)


def test_stop_texts_end_responses_of_the_sampler_alone():
    stop = ("7", "####", "=", *"abcdefghijklmnop")
    tokenizer, config = embedded_tokenizer(), config_of(stop=stop)
    model, params = make_policy(config, tokenizer)
    engine = make_engines(config, model, make_meshes(config), tokenizer, 48)[0]
    assert model.eos_ids == (1,), "what the trainer exports knows the end-of-text token alone"
    assert engine.model.eos_ids == (1, *(int(tokenizer.encode(text)[0]) for text in stop))
    finished = []
    driver = make_sampler(
        config, [engine], WeightUpdate(0, engine.load_params(params)), seed=0, on_progress=lambda progress: finished.extend(progress.finished)
    )
    driver.submit([GenerationRequest(0, i, tokenizer.encode("4+3="), 40) for i in range(8)])
    driver.run_until_done(deadline_s=60.0)
    for trajectory in finished:
        ends = np.isin(trajectory.tokens, engine.model.eos_ids)
        assert not ends[:-1].any() and trajectory.truncated == (not ends[-1])
        if not trajectory.truncated and trajectory.tokens[-1] != 1:
            assert tokenizer.decode(trajectory.tokens).endswith(stop), "the verifier reads the stop text"
    assert any(not t.truncated and t.tokens[-1] != 1 for t in finished)


def test_setting_of_attention_reaches_the_sampler():
    config, tokenizer = config_of(), embedded_tokenizer()
    config.model.attention = "kernel"
    engine = make_engines(config, make_policy(config, tokenizer)[0], make_meshes(config), tokenizer, 48)[0]
    with pytest.raises(ConfigError, match=r"model\.attention=kernel"):
        engine.lower_decode()


def test_pages_too_few_for_the_longest_sequence_are_refused_before_the_policy_is_made():
    with pytest.raises(ConfigError, match=r"'rollout\.kv_pages' must be at least .* got 3; raise it"):
        load_problems(config_of(kv_pages=3))


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


def test_a_vocabulary_smaller_than_the_tokenizer_is_refused():
    config = config_of()
    size = embedded_tokenizer().vocab_size
    config.model.vocab_size = size - 1
    with pytest.raises(ConfigError, match=rf"'model\.vocab_size' must be at least the tokenizer's {size} tokens; got {size - 1}; raise it"):
        load_problems(config)
    config.model.vocab_size = size
    load_problems(config)


def test_what_the_policy_cannot_do_is_refused_before_its_weights_are_read(tmp_path):
    """Adapters on experts, and tensor axes that do not divide the heads; the weights are not there at all."""
    tokenizer = embedded_tokenizer()
    sizes = {"layers": 1, "hidden_size": 16, "heads": 4, "kv_heads": 1, "head_dim": 8, "mlp_size": 16}
    model = ModelConfig("qwen3_moe", tokenizer.vocab_size, **sizes, experts=2, experts_per_token=1, expert_mlp_size=8)
    export_policy(tmp_path, model, init_params(model, jax.random.key(0)), tokenizer)
    (tmp_path / "model.safetensors").unlink()

    def problems(rank=0, targets=("query",), **mesh):
        config = config_of()
        config.model.update(path=str(tmp_path), lora_rank=rank, lora_targets=targets)
        config.cluster.mesh.update(mesh)
        return load_problems(validate(config))

    problems(rank=2, trainer="tensor=4", sampler="tensor=2")
    with pytest.raises(ConfigError, match=r"^'model\.lora_targets' must not name the layers of experts.* got up"):
        problems(rank=2, targets=("query", "up"))
    for role in ("trainer", "sampler"):
        with pytest.raises(ConfigError, match=rf"^'cluster\.mesh\.{role}': the tensor axis must divide the heads of '.*' = 4; got 6; take 4"):
            problems(**{role: "tensor=6"})
