"""Export and import against a second reading of the layout: the families' forward pass from the stored tensors, in numpy float64."""

import dataclasses
import json
import os

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh
from safetensors.numpy import load_file

from areal_jax.models.architecture import ModelConfig
from areal_jax.models.checkpoint import load_policy
from areal_jax.models.export import export_policy
from areal_jax.models.policy import packed_logits, param_shapes
from areal_jax.models.sharding import named_shardings, param_specs
from areal_jax.models.tokenizer import embedded_tokenizer, load_tokenizer

TOKENIZER = embedded_tokenizer()


def policy(family="qwen2", **changes):
    model = ModelConfig(
        family, TOKENIZER.vocab_size, layers=2, hidden_size=24, heads=4, kv_heads=2, head_dim=8, mlp_size=40, rope_theta=500.0, max_positions=64, **changes
    )
    random = np.random.default_rng(5)
    return model, jax.tree.map(lambda leaf: jnp.asarray((leaf.ndim == 1) + 0.3 * random.normal(size=leaf.shape), jnp.float32), param_shapes(model))


def reference_logits(directory, tokens):
    """Qwen2, Qwen3 and Llama as published: y = x Wᵀ + b, RMSNorm, rotary halves, grouped queries, SwiGLU."""
    config = json.loads((directory / "config.json").read_text())
    w = {name: array.astype(np.float64) for name, array in load_file(directory / "model.safetensors").items()}
    size, heads, groups = config["head_dim"], config["num_attention_heads"], config["num_key_value_heads"]
    length = len(tokens)

    def norm(x, name):
        return x / np.sqrt((x**2).mean(-1, keepdims=True) + config["rms_norm_eps"]) * w[name]

    def linear(x, name):
        return x @ w[name + ".weight"].T + w.get(name + ".bias", 0.0)

    angle = np.outer(np.arange(length), config["rope_theta"] ** (-np.arange(0, size, 2) / size))

    def turn(x):
        one, two = x[..., : size // 2], x[..., size // 2 :]
        cos, sin = np.cos(angle)[:, None], np.sin(angle)[:, None]
        return np.concatenate([one * cos - two * sin, two * cos + one * sin], -1)

    x = w["model.embed_tokens.weight"][tokens]
    for layer in range(config["num_hidden_layers"]):
        at = f"model.layers.{layer}."
        y = norm(x, at + "input_layernorm.weight")
        q, k, v = (linear(y, f"{at}self_attn.{n}_proj").reshape(length, -1, size) for n in "qkv")
        if at + "self_attn.q_norm.weight" in w:
            q, k = norm(q, at + "self_attn.q_norm.weight"), norm(k, at + "self_attn.k_norm.weight")
        q, k = turn(q), turn(k)
        out = np.zeros((length, heads, size))
        for head in range(heads):
            scores = q[:, head] @ k[:, head * groups // heads].T / np.sqrt(size)
            scores[np.triu_indices(length, 1)] = -np.inf
            weights = np.exp(scores - scores.max(-1, keepdims=True))
            out[:, head] = weights / weights.sum(-1, keepdims=True) @ v[:, head * groups // heads]
        x = x + linear(out.reshape(length, -1), at + "self_attn.o_proj")
        y = norm(x, at + "post_attention_layernorm.weight")
        gate = linear(y, at + "mlp.gate_proj")
        x = x + linear(gate / (1 + np.exp(-gate)) * linear(y, at + "mlp.up_proj"), at + "mlp.down_proj")
    return norm(x, "model.norm.weight") @ w.get("lm_head.weight", w["model.embed_tokens.weight"]).T


def our_logits(model, params, tokens):
    row = np.asarray(tokens)[None]
    forward = jax.jit(packed_logits, static_argnums=0)
    return np.asarray(forward(model, params, row, np.arange(row.shape[1])[None], np.ones_like(row)))[0]


TOKENS = np.random.default_rng(0).integers(0, TOKENIZER.vocab_size, 13)


@pytest.mark.parametrize("tied", [False, True], ids=["head", "tied"])
@pytest.mark.parametrize("family", ["qwen2", "qwen3", "llama"])
def test_stored_tensors_are_the_family_s(tmp_path, family, tied):
    model, params = policy(family, tie_embeddings=tied)
    export_policy(tmp_path / "policy", model, params, TOKENIZER)
    np.testing.assert_allclose(our_logits(model, params, TOKENS), reference_logits(tmp_path / "policy", TOKENS), atol=2e-4, rtol=2e-4)
    loaded, again = load_policy(tmp_path / "policy")
    assert loaded == model
    jax.tree.map(np.testing.assert_array_equal, again, jax.tree.map(np.asarray, params))
    config = json.loads((tmp_path / "policy" / "config.json").read_text())
    assert config["architectures"] == [{"qwen2": "Qwen2", "qwen3": "Qwen3", "llama": "Llama"}[family] + "ForCausalLM"]
    assert json.loads((tmp_path / "policy" / "generation_config.json").read_text())["eos_token_id"] == [1]
    assert load_tokenizer(tmp_path / "policy").eos_ids == TOKENIZER.eos_ids


def test_shards_meshes_types_and_replacement(tmp_path):
    model, params = policy(dtype="bfloat16", eos_ids=(1, 5))
    mesh = Mesh(np.array(jax.devices()[:4]).reshape(1, 2, 2), ("data", "fsdp", "tensor"), axis_types=(AxisType.Auto,) * 3)
    low = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), params)
    export_policy(tmp_path / "policy", model, params, TOKENIZER)
    export_policy(
        tmp_path / "policy",
        model,
        jax.device_put(low, named_shardings(mesh, param_specs(model), low)),
        TOKENIZER,
        shard_bytes=4000,
    )
    assert [p.name for p in tmp_path.iterdir()] == ["policy"]
    assert len(list((tmp_path / "policy").glob("*.safetensors"))) > 2 and not (tmp_path / "policy" / "model.safetensors").exists()
    loaded, again = load_policy(tmp_path / "policy", param_dtype="bfloat16")
    assert loaded == model
    for x, y in zip(jax.tree.leaves(again), jax.tree.leaves(low), strict=True):
        assert x.dtype == y.dtype
        np.testing.assert_array_equal(x, np.asarray(y))
    assert load_policy(tmp_path / "policy", dtype="float32")[0] == dataclasses.replace(model, dtype="float32")


def test_export_of_foreign_parameters_is_refused_and_leaves_the_old(tmp_path):
    model, params = policy()
    export_policy(tmp_path / "policy", model, params, TOKENIZER)
    with pytest.raises(ValueError, match="final_norm/scale"):
        export_policy(tmp_path / "policy", model, params | {"final_norm": {"scale": jnp.ones(3)}}, TOKENIZER)
    with pytest.raises(ValueError, match="vocabulary of 5"):
        export_policy(tmp_path / "policy", dataclasses.replace(model, vocab_size=5), params, TOKENIZER)
    assert load_policy(tmp_path / "policy")[0] == model


def test_what_came_with_a_checkpoint_is_kept(tmp_path):
    """The tokenizer's files byte for byte, the settings of generation, and of config.json what says nothing of the computation."""
    model, params = policy(eos_ids=(1, 5))
    export_policy(tmp_path / "source", model, params, TOKENIZER)
    given = {"bos_token_id": 7, "eos_token_id": [5, 1], "pad_token_id": 3, "do_sample": True, "temperature": 0.7, "transformers_version": "4.43.1"}
    (tmp_path / "source" / "generation_config.json").write_text(json.dumps(given))
    config = json.loads((tmp_path / "source" / "config.json").read_text()) | {"bos_token_id": 7, "initializer_range": 0.04}
    (tmp_path / "source" / "config.json").write_text(json.dumps(config))
    files = {
        "tokenizer.json": (tmp_path / "source" / "tokenizer.json").read_bytes() + b"\n\n",
        "tokenizer_config.json": '{"eos_token": "<eos>",  "chat_template": "{{ messages }} é"}'.encode(),
        "special_tokens_map.json": b'{"eos_token": "<eos>"}',
        "chat_template.jinja": b"{{ messages }}\r\n",
        "merges.txt": b"#version: 0.2",
    }
    for name, data in files.items():
        (tmp_path / "source" / name).write_bytes(data)
    (tmp_path / "source" / "README.md").write_text("about another policy")
    for target in ("policy", "source"):  # into a new place, and over the source itself
        export_policy(tmp_path / target, model, params, TOKENIZER, source=tmp_path / "source")
        for name, data in files.items():
            assert (tmp_path / target / name).read_bytes() == data
        assert json.loads((tmp_path / target / "generation_config.json").read_text()) == given
        after = json.loads((tmp_path / target / "config.json").read_text())
        assert (after["bos_token_id"], after["initializer_range"]) == (7, 0.04)
        assert not (tmp_path / target / "README.md").exists()


def test_a_failing_export_leaves_what_was_there(tmp_path, monkeypatch):
    model, params = policy()
    export_policy(tmp_path / "policy", model, params, TOKENIZER)
    before = {file.name: file.read_bytes() for file in (tmp_path / "policy").iterdir()}

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("areal_jax.models.export.write_tensors", full)
    with pytest.raises(OSError, match="No space left"):
        export_policy(tmp_path / "policy", model, jax.tree.map(lambda leaf: 2 * leaf, params), TOKENIZER)
    monkeypatch.undo()
    replace = os.replace

    def once(source, target):
        if target == tmp_path / "policy" and "new" in source.name:
            raise OSError(13, "Permission denied")
        replace(source, target)

    monkeypatch.setattr(os, "replace", once)
    with pytest.raises(OSError, match="Permission denied"):
        export_policy(tmp_path / "policy", model, jax.tree.map(lambda leaf: 2 * leaf, params), TOKENIZER)
    assert [p.name for p in tmp_path.iterdir()] == ["policy"]
    assert {file.name: file.read_bytes() for file in (tmp_path / "policy").iterdir()} == before
