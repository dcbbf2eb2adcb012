"""Checkpoints of ``transformers`` in, and ours out to ``transformers``: the same logits, for every family."""

import dataclasses
import json

import jax
import numpy as np
import pytest

from areal_jax.models.adapters import add
from areal_jax.models.architecture import Lora
from areal_jax.models.checkpoint import load_policy
from areal_jax.models.config_json import read_model
from areal_jax.models.export import export_policy
from areal_jax.models.policy import packed_logits
from areal_jax.models.tokenizer import embedded_tokenizer

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

TOKENIZER = embedded_tokenizer()
LENGTH = 48
TOKENS = np.random.default_rng(0).integers(2, TOKENIZER.vocab_size, LENGTH)
SIZES = {
    "vocab_size": TOKENIZER.vocab_size,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "eos_token_id": 1,
    "pad_token_id": 0,
    "initializer_range": 0.3,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 1000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
MIXTURE = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "head_dim": 12, "decoder_sparse_step": 1}
POLICIES = {
    "qwen2": ("Qwen2", {}),
    "qwen2 tied": ("Qwen2", {"tie_word_embeddings": True, "rope_parameters": {"rope_type": "default", "rope_theta": 500.0}}),
    "qwen3": ("Qwen3", {"head_dim": 12}),
    "qwen3 tied": ("Qwen3", {"head_dim": 12, "tie_word_embeddings": True}),
    "llama": ("Llama", {}),
    "llama3 rope": ("Llama", {"rope_parameters": LLAMA3}),
    "llama tied, own head_dim": ("Llama", {"tie_word_embeddings": True, "head_dim": 16, "num_key_value_heads": 4}),
    "qwen3_moe": ("Qwen3Moe", MIXTURE | {"norm_topk_prob": True}),
    "qwen3_moe, weights as routed": ("Qwen3Moe", MIXTURE | {"norm_topk_prob": False}),
}
STORED = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
forward = jax.jit(packed_logits, static_argnums=0)


def theirs_of(name, directory, dtype=None, **save):
    """A random policy, biases and norms too, saved as ``transformers`` saves."""
    family, changes = POLICIES[name]
    torch.manual_seed(3)
    policy = getattr(transformers, family + "ForCausalLM")(getattr(transformers, family + "Config")(**SIZES | changes))
    with torch.no_grad():
        for key, parameter in policy.named_parameters():
            if parameter.ndim == 1:
                parameter.copy_((1.0 if "norm" in key else 0.0) + 0.3 * torch.randn(parameter.shape))
    policy = policy.to(dtype or torch.float32).eval()
    policy.save_pretrained(directory, **save)
    TOKENIZER.save(directory)
    return policy


def their_logits(policy):
    with torch.no_grad():
        return policy(torch.tensor(TOKENS)[None]).logits[0].float().numpy()


def our_logits(model, params):
    row = TOKENS[None].astype(np.int32)
    return np.asarray(forward(model, params, row, np.arange(LENGTH, dtype=np.int32)[None], np.ones_like(row)))[0]


@pytest.mark.parametrize("name", POLICIES)
def test_float32_logits_in_and_out(name, tmp_path):
    theirs = their_logits(theirs_of(name, tmp_path / "theirs"))
    model, params = load_policy(tmp_path / "theirs", dtype="float32")
    assert model.max_positions == 256 and (model.rope_scaling is not None) == (name == "llama3 rope")
    assert np.abs(theirs).max() > 1.0
    assert np.abs(our_logits(model, params) - theirs).max() <= 1e-4
    export_policy(tmp_path / "ours", model, params, TOKENIZER, source=tmp_path / "theirs", shard_bytes=20_000)
    again, report = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "ours", output_loading_info=True)
    assert not any(report.get(key) for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    np.testing.assert_array_equal(their_logits(again.eval()), theirs)
    assert load_policy(tmp_path / "ours", dtype="float32")[0] == model


@pytest.mark.parametrize("stored", ["bfloat16", "float16"])
def test_types_they_are_stored_in(stored, tmp_path):
    theirs_of("qwen2", tmp_path, STORED[stored])
    theirs = their_logits(transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).eval())
    model, params = load_policy(tmp_path, dtype="float32")
    assert {leaf.dtype for leaf in jax.tree.leaves(params)} == {np.dtype(np.float32)}
    assert np.abs(our_logits(model, params) - theirs).max() <= 1e-4


@pytest.mark.parametrize("name", POLICIES)
def test_squared_error_of_bfloat16_is_bounded_by_theirs(name, tmp_path):
    """Noise of a token: the squared error of its logits against float32 computation, relative to their square. One rounding to bfloat16 has 5e-6 of it.

    The median token's is at most 1e-3, and at most what ``transformers`` in bfloat16 has; the median, because rounding sends a few tokens to other experts.
    So this bounds a squared error; its root, relative to the logits, is 0.009 to 0.015 here and 0.012 to 0.019 of ``transformers`` (qwen2 0.012 and 0.016,
    qwen3 0.009 and 0.012, llama 0.012 and 0.016, qwen3_moe 0.010 and 0.014).
    """
    theirs = their_logits(theirs_of(name, tmp_path, torch.bfloat16))
    exact = their_logits(transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).eval())
    model, params = load_policy(tmp_path, param_dtype="bfloat16")
    assert model.dtype == "bfloat16"

    def noise(logits):
        return np.median(np.square(logits - exact).mean(-1) / np.square(exact).mean(-1))

    assert noise(our_logits(model, params)) <= min(1e-3, 1.2 * noise(theirs))


@pytest.mark.parametrize("name", ["qwen2 tied", "llama3 rope", "qwen3_moe"])
def test_exported_types_and_spelling_of_older_versions(name, tmp_path):
    """bfloat16 from float32 parameters, read by ``transformers`` as its own rounding of them; config.json has version 4's keys."""
    policy = theirs_of(name, tmp_path / "theirs", max_shard_size="20KB")
    assert (tmp_path / "theirs" / "model.safetensors.index.json").is_file()
    model, params = load_policy(tmp_path / "theirs", dtype="float32")
    export_policy(tmp_path / "ours", model, params, TOKENIZER, dtype="bfloat16")
    config = json.loads((tmp_path / "ours" / "config.json").read_text())
    assert config["torch_dtype"] == "bfloat16" and "rope_theta" in config and "rope_parameters" not in config
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "ours", dtype="auto")
    ours, theirs = again.state_dict(), policy.to(torch.bfloat16).state_dict()
    assert ours.keys() == theirs.keys() and again.dtype == torch.bfloat16
    for key, tensor in theirs.items():
        assert torch.equal(ours[key], tensor), key


def test_adapters_are_in_what_is_exported(tmp_path):
    theirs_of("llama3 rope", tmp_path / "theirs")
    base, params = load_policy(tmp_path / "theirs", dtype="float32")
    model = dataclasses.replace(base, lora=Lora(2, 8.0, ("query", "output", "up")))
    params = add(model, params, jax.random.key(0))
    params = jax.tree_util.tree_map_with_path(lambda key, leaf: leaf + 0.1 if key[-1].key == "lora_b" else leaf, params)
    export_policy(tmp_path / "ours", model, params, TOKENIZER, source=tmp_path / "theirs")
    with_adapters = our_logits(model, params)
    again = their_logits(transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "ours").eval())
    assert np.abs(with_adapters - our_logits(*load_policy(tmp_path / "theirs", dtype="float32"))).max() > 0.1
    assert np.abs(with_adapters - again).max() <= 1e-4
    assert load_policy(tmp_path / "ours", dtype="float32")[0] == base


@pytest.mark.parametrize("name", POLICIES)
def test_every_key_that_transformers_writes_is_understood(name, tmp_path):
    """config.json with all defaults spelled out, as it writes it on demand."""
    family, changes = POLICIES[name]
    theirs_of(name, tmp_path)
    short = read_model(tmp_path, "float32")
    (tmp_path / "config.json").unlink()
    full = getattr(transformers, family + "Config")(**SIZES | changes | {"architectures": [family + "ForCausalLM"]})
    (tmp_path / "config.json").write_text(full.to_json_string(use_diff=False))
    assert read_model(tmp_path, "float32") == short
