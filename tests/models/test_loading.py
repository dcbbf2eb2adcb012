"""Loading to shards: the right numbers in the right places, the bytes of those alone, and little host memory; config.json as published."""

import json
import os
import pathlib
import socket
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh
from safetensors.numpy import load_file

from areal_jax.models.architecture import ModelConfig, RopeScaling
from areal_jax.models.checkpoint import load_policy
from areal_jax.models.config_json import config_json, read_model
from areal_jax.models.export import export_policy
from areal_jax.models.policy import init_params, param_shapes
from areal_jax.models.safetensors_file import read_header, read_parts
from areal_jax.models.sharding import named_shardings, param_specs
from areal_jax.models.tokenizer import embedded_tokenizer

TOKENIZER = embedded_tokenizer()
SIZES = {"layers": 1, "hidden_size": 16, "heads": 4, "kv_heads": 2, "head_dim": 8, "mlp_size": 24, "max_positions": 64}
EXPERTS = {"experts": 3, "experts_per_token": 2, "expert_mlp_size": 8}


def mesh_of(**sizes):
    axes = ("data", "fsdp", "tensor")
    shape = [sizes.get(axis, 1) for axis in axes]
    return Mesh(np.array(jax.devices()[: np.prod(shape)]).reshape(shape), axes, axis_types=(AxisType.Auto,) * 3)


def saved(path, family="qwen3_moe", **changes):
    model = ModelConfig(family, TOKENIZER.vocab_size, **SIZES, **(EXPERTS if family == "qwen3_moe" else {}), **changes)
    params = init_params(model, jax.random.key(1))
    export_policy(path, model, params, TOKENIZER, shard_bytes=10_000)
    return model, params


@pytest.mark.parametrize("param_dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("family", ["qwen2", "qwen3_moe"])
def test_shards_hold_their_part_of_the_parameters(family, param_dtype, tmp_path):
    model, params = saved(tmp_path, family)
    mesh = mesh_of(data=2, fsdp=2, tensor=2)
    loaded, got = load_policy(tmp_path, param_dtype=param_dtype, mesh=mesh)
    assert loaded == model
    for leaf, wanted, sharding in zip(*map(jax.tree.leaves, (got, params, named_shardings(mesh, param_specs(model), params))), strict=True):
        assert leaf.sharding == sharding and leaf.dtype == param_dtype and leaf.committed
        np.testing.assert_array_equal(leaf, wanted.astype(param_dtype))
    assert any(len({str(shard.index) for shard in leaf.addressable_shards}) == 4 for leaf in jax.tree.leaves(got))


def test_each_byte_is_read_once_and_only_those_asked_for(tmp_path, monkeypatch):
    saved(tmp_path / "policy")
    read = []
    original = os.preadv

    def counted(descriptor, buffers, offset):
        count = original(descriptor, buffers, offset)
        read.append((offset, count))
        return count

    monkeypatch.setattr(os, "preadv", counted)
    files = sorted((tmp_path / "policy").glob("*.safetensors"))
    tensors = [tensor for file in files for tensor in read_header(file).values()]
    load_policy(tmp_path / "policy", mesh=mesh_of(data=2, fsdp=2, tensor=2))
    assert sum(count for _, count in read) == sum(np.prod(tensor.shape) * 4 for tensor in tensors), "replicas of a shard share its reading"
    read.clear()
    matrix = next(tensor for tensor in tensors if tensor.name.endswith("q_proj.weight"))
    parts = [np.empty((5, width), "bfloat16") for width in (2, 3, 1)]
    rows = slice(7, 12)
    read_parts(matrix, [(rows, slice(4, 6), parts[0]), (rows, slice(9, 12), parts[1]), (rows, slice(6, 7), parts[2])])
    assert [count for _, count in read] == [12] * 10, "two of the parts lie side by side"
    stored = load_file(matrix.file)[matrix.name][rows].astype("bfloat16")
    for part, columns in zip(parts, (slice(4, 6), slice(9, 12), slice(6, 7)), strict=True):
        np.testing.assert_array_equal(part, stored[:, columns])


def test_two_processes_read_each_their_own_shards(tmp_path):
    saved(tmp_path / "policy", "qwen2")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    program = [sys.executable, str(pathlib.Path(__file__).parent / "process_of_loading.py")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    processes = [
        subprocess.Popen([*program, str(i), str(port), str(tmp_path / "policy")], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)
        for i in range(2)
    ]
    try:
        for process in processes:
            printed, errors = process.communicate(timeout=120)
            assert process.returncode == 0, errors
            counts = json.loads(printed)
            assert counts["read"] == counts["shards"] < 0.55 * counts["whole"], "half, and the norms"
    finally:
        for process in processes:
            process.kill()


@pytest.mark.skipif(not pathlib.Path("/proc/self/statm").is_file(), reason="resident memory is read from /proc")
@pytest.mark.parametrize("stored", ["float32", "bfloat16"])
def test_the_host_holds_its_shards_and_one_tensor_more_at_most(stored, tmp_path):
    """120 or 240 MB as they are stored, 240 MB of shards, of which the embedding is 67 MB, on four devices of a process of its own."""
    sizes = {"layers": 4, "hidden_size": 1024, "heads": 8, "kv_heads": 4, "head_dim": 128, "mlp_size": 2560}
    model = ModelConfig("llama", 16384, **sizes, tie_embeddings=True, dtype="bfloat16")
    params = jax.tree.map(lambda leaf: jnp.full(leaf.shape, 0.5, stored), param_shapes(model))
    export_policy(tmp_path / "policy", model, params, TOKENIZER)
    del params
    program = [sys.executable, str(pathlib.Path(__file__).parent / "memory_of_loading.py"), str(tmp_path / "policy"), "float32", str(tmp_path / "out")]
    done = subprocess.run(program, capture_output=True, text=True, timeout=120, env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)})
    assert done.returncode == 0, done.stderr
    memory = json.loads(done.stdout)
    assert (memory["shards"] > 200e6) and memory["largest"] == 16384 * 1024 * 4
    assert memory["loading"] <= 1.2 * memory["largest"], memory
    assert memory["exporting"] <= 1.2 * memory["largest"], memory


PUBLISHED = {
    "Qwen/Qwen2.5-1.5B-Instruct": """{"architectures": ["Qwen2ForCausalLM"], "attention_dropout": 0.0, "bos_token_id": 151643, "eos_token_id": 151645,
        "hidden_act": "silu", "hidden_size": 1536, "initializer_range": 0.02, "intermediate_size": 8960, "max_position_embeddings": 32768,
        "max_window_layers": 21, "model_type": "qwen2", "num_attention_heads": 12, "num_hidden_layers": 28, "num_key_value_heads": 2, "rms_norm_eps": 1e-06,
        "rope_theta": 1000000.0, "sliding_window": 32768, "tie_word_embeddings": true, "torch_dtype": "bfloat16", "transformers_version": "4.43.1",
        "use_cache": true, "use_sliding_window": false, "vocab_size": 151936}""",
    "deepseek-ai/DeepSeek-R1-Distill-Qwen-1.5B": """{"architectures": ["Qwen2ForCausalLM"], "attention_dropout": 0.0, "bos_token_id": 151643,
        "eos_token_id": 151643, "hidden_act": "silu", "hidden_size": 1536, "initializer_range": 0.02, "intermediate_size": 8960,
        "max_position_embeddings": 131072, "max_window_layers": 21, "model_type": "qwen2", "num_attention_heads": 12, "num_hidden_layers": 28,
        "num_key_value_heads": 2, "rms_norm_eps": 1e-06, "rope_theta": 10000, "sliding_window": 4096, "tie_word_embeddings": false, "torch_dtype": "bfloat16",
        "transformers_version": "4.44.0", "use_cache": true, "use_mrope": false, "use_sliding_window": false, "vocab_size": 151936}""",
    "Qwen/Qwen3-8B": """{"architectures": ["Qwen3ForCausalLM"], "attention_bias": false, "attention_dropout": 0.0, "bos_token_id": 151643,
        "eos_token_id": 151645, "head_dim": 128, "hidden_act": "silu", "hidden_size": 4096, "initializer_range": 0.02, "intermediate_size": 12288,
        "max_position_embeddings": 40960, "max_window_layers": 36, "model_type": "qwen3", "num_attention_heads": 32, "num_hidden_layers": 36,
        "num_key_value_heads": 8, "rms_norm_eps": 1e-06, "rope_scaling": null, "rope_theta": 1000000, "sliding_window": null, "tie_word_embeddings": false,
        "torch_dtype": "bfloat16", "transformers_version": "4.51.0", "use_cache": true, "use_sliding_window": false, "vocab_size": 151936}""",
    "Qwen/Qwen3-30B-A3B": """{"architectures": ["Qwen3MoeForCausalLM"], "attention_bias": false, "attention_dropout": 0.0, "bos_token_id": 151643,
        "decoder_sparse_step": 1, "eos_token_id": 151645, "head_dim": 128, "hidden_act": "silu", "hidden_size": 2048, "initializer_range": 0.02,
        "intermediate_size": 6144, "max_position_embeddings": 40960, "max_window_layers": 48, "mlp_only_layers": [], "model_type": "qwen3_moe",
        "moe_intermediate_size": 768, "norm_topk_prob": true, "num_attention_heads": 32, "num_experts": 128, "num_experts_per_tok": 8,
        "num_hidden_layers": 48, "num_key_value_heads": 4, "output_router_logits": false, "rms_norm_eps": 1e-06, "rope_scaling": null,
        "rope_theta": 1000000.0, "router_aux_loss_coef": 0.001, "sliding_window": null, "tie_word_embeddings": false, "torch_dtype": "bfloat16",
        "transformers_version": "4.51.0", "use_cache": true, "use_sliding_window": false, "vocab_size": 151936}""",
    "meta-llama/Llama-3.2-1B-Instruct": """{"architectures": ["LlamaForCausalLM"], "attention_bias": false, "attention_dropout": 0.0, "bos_token_id": 128000,
        "eos_token_id": [128001, 128008, 128009], "head_dim": 64, "hidden_act": "silu", "hidden_size": 2048, "initializer_range": 0.02,
        "intermediate_size": 8192, "max_position_embeddings": 131072, "mlp_bias": false, "model_type": "llama", "num_attention_heads": 32,
        "num_hidden_layers": 16, "num_key_value_heads": 8, "pretraining_tp": 1, "rms_norm_eps": 1e-05, "rope_scaling": {"factor": 32.0,
        "high_freq_factor": 4.0, "low_freq_factor": 1.0, "original_max_position_embeddings": 8192, "rope_type": "llama3"}, "rope_theta": 500000.0,
        "tie_word_embeddings": true, "torch_dtype": "bfloat16", "transformers_version": "4.45.0.dev0", "use_cache": true, "vocab_size": 128256}""",
    "HuggingFaceTB/SmolLM2-135M-Instruct": """{"architectures": ["LlamaForCausalLM"], "attention_bias": false, "attention_dropout": 0.0, "bos_token_id": 1,
        "eos_token_id": 2, "hidden_act": "silu", "hidden_size": 576, "initializer_range": 0.041666666666666664, "intermediate_size": 1536,
        "is_llama_config": true, "max_position_embeddings": 8192, "mlp_bias": false, "model_type": "llama", "num_attention_heads": 9,
        "num_hidden_layers": 30, "num_key_value_heads": 3, "pad_token_id": 2, "pretraining_tp": 1, "rms_norm_eps": 1e-05, "rope_interleaved": false,
        "rope_scaling": null, "rope_theta": 100000, "tie_word_embeddings": true, "torch_dtype": "bfloat16", "transformers_version": "4.42.3",
        "transformers.js_config": {"kv_cache_dtype": {"q4f16": "float16", "fp16": "float16"}}, "use_cache": true, "vocab_size": 49152}""",
}
"""config.json with the keys that these repositories have, and how many parameters they say that makes."""
PARAMETERS = {
    "Qwen/Qwen2.5-1.5B-Instruct": 1_543_714_304,
    "deepseek-ai/DeepSeek-R1-Distill-Qwen-1.5B": 1_777_088_000,
    "Qwen/Qwen3-8B": 8_190_735_360,
    "Qwen/Qwen3-30B-A3B": 30_532_122_624,
    "meta-llama/Llama-3.2-1B-Instruct": 1_235_814_400,
    "HuggingFaceTB/SmolLM2-135M-Instruct": 134_515_008,
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_config_json_as_published(name, tmp_path):
    (tmp_path / "config.json").write_text(PUBLISHED[name])
    model = read_model(tmp_path)
    assert model.dtype == "bfloat16"
    assert sum(int(np.prod(leaf.shape)) for leaf in jax.tree.leaves(param_shapes(model))) == PARAMETERS[name]
    assert model.rope_scaling == (RopeScaling(32.0, 1.0, 4.0, 8192) if "Llama-3.2" in name else None)
    given, ours = json.loads(PUBLISHED[name]), config_json(model, "bfloat16", json.loads(PUBLISHED[name]))
    assert all(ours[key] == value for key, value in given.items() if key in ours and key != "eos_token_id")
    (tmp_path / "config.json").write_text(json.dumps(ours))
    assert read_model(tmp_path) == model
