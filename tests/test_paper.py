"""The variants that stand for the paper's runs: exact sizes, its hyper-parameters, and what a run without the files says."""

import pathlib

import pytest

from areal_jax.config import ConfigError, load
from areal_jax.config_devices import check_devices

ROOT = pathlib.Path(__file__).resolve().parent.parent
# Parameters of the published checkpoints, embeddings not tied.
COUNTS = {"1.5b": 1_777_088_000, "7b": 7_615_616_512, "14b": 14_770_033_664, "32b": 32_763_876_352}
NODES = {"1.5b": (16,), "7b": (24,), "14b": (32,), "32b": (48, 64)}


def loaded(task, size, *overrides, planned=True):
    return load([f"--config={ROOT}/configs/{task}.py:qwen2.5-{size}", *(f"--config.{o}" for o in overrides)], planned=planned)[0]


@pytest.mark.parametrize("size", COUNTS)
def test_sizes(size):
    m = loaded("math", size).model
    attention = m.hidden_size * m.head_dim * 2 * (m.heads + m.kv_heads) + m.head_dim * (m.heads + 2 * m.kv_heads)
    block = attention + 3 * m.hidden_size * m.mlp_size + 2 * m.hidden_size
    assert m.layers * block + 2 * m.vocab_size * m.hidden_size + m.hidden_size == COUNTS[size]


@pytest.mark.parametrize("size", COUNTS)
def test_same_sizes_as_transformers(size):
    transformers = pytest.importorskip("transformers")
    torch = pytest.importorskip("torch")
    m = loaded("math", size).model
    with torch.device("meta"):
        policy = transformers.Qwen2ForCausalLM(
            transformers.Qwen2Config(
                vocab_size=m.vocab_size,
                hidden_size=m.hidden_size,
                num_hidden_layers=m.layers,
                num_attention_heads=m.heads,
                num_key_value_heads=m.kv_heads,
                intermediate_size=m.mlp_size,
                tie_word_embeddings=False,
            )
        )
    assert sum(p.numel() for p in policy.parameters()) == COUNTS[size]


@pytest.mark.parametrize("size", COUNTS)
@pytest.mark.parametrize(("task", "staleness"), [("math", 8), ("code", 4)])
def test_settings_of_the_paper(task, staleness, size):
    config = loaded(task, size)
    r, t = config.rollout, config.trainer
    assert (r.max_staleness, r.group_size, t.groups_per_step, t.minibatches) == (staleness, 16, 512, 4)
    assert (t.learning_rate, t.schedule, t.adam_b1, t.adam_b2, t.adam_epsilon, t.weight_decay, t.grad_clip) == (2e-5, "constant", 0.9, 0.95, 1e-5, 0.05, 1.0)
    assert (config.task.max_prompt_tokens, r.max_new_tokens, t.micro_batch_tokens) == (1024, 27648, 32768)
    assert (r.temperature, r.top_p, r.top_k, config.algorithm.clip_epsilon, config.algorithm.advantage) == (1.0, 1.0, 0, 0.2, "batch")
    assert (config.algorithm.loss, config.algorithm.reward_scale, config.algorithm.reward_bias) == ("decoupled_ppo", 10.0, -0.5)
    for nodes in NODES[size]:
        sampler, trainer, _ = check_devices(config, nodes * 8)
        assert (sampler, trainer) == (nodes * 6, nodes * 2)


def test_a_run_says_what_is_missing(tmp_path):
    rows = tmp_path / "rows.jsonl"
    rows.write_text("{}")
    with pytest.raises(ConfigError, match=r"task\.path"):
        loaded("math", "7b", planned=False)
    with pytest.raises(ConfigError, match=r"model\.path.*hf download deepseek-ai/DeepSeek-R1-Distill-Qwen-7B --local-dir checkpoints/"):
        loaded("math", "7b", f"task.path={rows}", planned=False)
    with pytest.raises(ConfigError, match=r"reward\.verifier"):
        loaded("code", "14b", f"task.path={rows}", planned=False)


@pytest.mark.parametrize(("task", "variant"), [("math", "3b"), ("code", "3b"), ("code", "14")])
def test_variants_are_named(task, variant):
    with pytest.raises(ConfigError, match=r"qwen2\.5-1\.5b.*qwen2\.5-32b"):
        loaded(task, variant)
