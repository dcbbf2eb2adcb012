"""Checkpoints that must not be loaded: each ends in one line that names the file, what is wrong with it, and the remedy."""

import json
import shutil

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from areal_jax.models.architecture import ModelConfig
from areal_jax.models.checkpoint import check_vocabulary, load_params, load_policy
from areal_jax.models.config_json import read_model
from areal_jax.models.export import export_policy
from areal_jax.models.policy import init_params
from areal_jax.models.tokenizer import embedded_tokenizer, load_tokenizer

TOKENIZER = embedded_tokenizer()
WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:0f4b\nsize 988097824\n"
KEY = "model.layers.0.self_attn.k_proj.weight"
BIAS = "model.layers.0.self_attn.o_proj.bias"
LLAMA = {"architectures": ["LlamaForCausalLM"], "model_type": "llama"}
MIXTURE = {"architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8}


def opened(directory):
    """As ``assembly`` opens a checkpoint."""
    model = read_model(directory, "float32")
    check_vocabulary(directory, model, load_tokenizer(directory))
    return load_policy(directory, "float32")


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A checkpoint in one file, and the same in several with their index."""
    directory = tmp_path_factory.mktemp("whole")
    model = ModelConfig("qwen2", TOKENIZER.vocab_size, layers=2, hidden_size=16, heads=4, kv_heads=2, head_dim=8, mlp_size=24)
    params = init_params(model, jax.random.key(0))
    export_policy(directory / "one", model, params, TOKENIZER)
    export_policy(directory / "many", model, params, TOKENIZER, shard_bytes=12_000)
    assert len(list((directory / "many").glob("*.safetensors"))) == 4
    assert opened(directory / "one")[0] == opened(directory / "many")[0]
    return directory


def config(drop=(), **changes):
    def change(path):
        value = json.loads((path / "config.json").read_text()) | changes
        (path / "config.json").write_text(json.dumps({key: v for key, v in value.items() if key not in drop}))

    return change


def tensors(change):
    def rewrite(path):
        held = load_file(path / WEIGHTS)
        change(held)
        save_file(held, path / WEIGHTS)

    return rewrite


def header(change):
    """Changes the header of the file and leaves its data."""

    def rewrite(path):
        data = (path / WEIGHTS).read_bytes()
        length = int.from_bytes(data[:8], "little")
        value = json.loads(data[8 : 8 + length])
        changed = change(value)
        text = changed if isinstance(changed, bytes) else json.dumps(value if changed is None else changed).encode()
        (path / WEIGHTS).write_bytes(len(text).to_bytes(8, "little") + text + data[8 + length :])

    return rewrite


def index(change):
    def rewrite(path):
        value = json.loads((path / INDEX).read_text())
        change(value)
        (path / INDEX).write_text(json.dumps(value))

    return rewrite


def write(name, data):
    return lambda path: (path / name).write_bytes(data)


def remove(name):
    return lambda path: (path / name).unlink()


def cut(name, keep):
    return lambda path: (path / name).write_bytes((path / name).read_bytes()[:keep])


def rename(old, new):
    return lambda path: (path / old).rename(path / new)


def nothing(path):
    shutil.rmtree(path)


def empty(path):
    shutil.rmtree(path)
    path.mkdir()


def file_instead(path):
    shutil.rmtree(path)
    path.write_text("{}")


def in_float(dtype):
    return lambda held: held.update({KEY: held[KEY].astype(dtype)})


def shard_of(path):
    return sorted(path.glob("*.safetensors"))[1]


def pickled(path):
    (path / WEIGHTS).rename(path / "pytorch_model.bin")


def both_layouts(path):
    shutil.copy(shard_of(path), path / WEIGHTS)


def doubled(path):
    shutil.copy(path / WEIGHTS, path / "a.safetensors")
    (path / WEIGHTS).rename(path / "b.safetensors")


ONE = {
    "absent": (nothing, ["one' is not there", "config.json, *.safetensors and tokenizer.json"]),
    "a file instead of a directory": (file_instead, ["one' is a file", "name its directory"]),
    "empty directory": (empty, ["config.json' is not there", "fetch the whole checkpoint"]),
    "config.json absent": (remove("config.json"), ["config.json' is not there", "fetch"]),
    "config.json cut off": (cut("config.json", 100), ["config.json' must be JSON", "fetch it again"]),
    "config.json a list": (write("config.json", b"[1, 2]"), ["config.json' must be a JSON object", "list"]),
    "config.json not text": (write("config.json", b"\xff\xfe\x00"), ["config.json' must be JSON", "fetch it again"]),
    "config.json nested without end": (write("config.json", b"[" * 100_000), ["config.json' must be JSON", "fetch it again"]),
    "config.json a pointer": (write("config.json", POINTER), ["config.json'", "Git LFS pointer", "git lfs pull"]),
    "generation_config.json broken": (write("generation_config.json", b"{"), ["generation_config.json' must be JSON"]),
    "weights absent": (remove(WEIGHTS), ["must hold *.safetensors", "there are none", "fetch"]),
    "pickled weights": (pickled, ["must hold *.safetensors", "pytorch_model.bin", "safe_serialization"]),
    "weights a pointer": (write(WEIGHTS, POINTER), [WEIGHTS, "Git LFS pointer", "git lfs pull"]),
    "weights a page of HTML": (write(WEIGHTS, b"<!DOCTYPE html><html>" * 10), [WEIGHTS, "not a safetensors file", "fetch it again"]),
    "weights empty": (write(WEIGHTS, b""), [WEIGHTS, "cut off inside its header", "(0 bytes)", "fetch it again"]),
    "weights cut off in the header": (cut(WEIGHTS, 300), [WEIGHTS, "cut off inside its header", "fetch it again"]),
    "weights cut off": (cut(WEIGHTS, 9_000), [WEIGHTS, "is cut off", "ends at byte", "fetch it again"]),
    "weights cut off by a byte": (cut(WEIGHTS, -1), [WEIGHTS, "is cut off", "fetch it again"]),
    "weights with more behind": (lambda p: (p / WEIGHTS).write_bytes((p / WEIGHTS).read_bytes() + b"1234"), [WEIGHTS, "end with its last tensor"]),
    "header no JSON": (header(lambda _: b"{]" + b" " * 30), [WEIGHTS, "JSON header", "fetch it again"]),
    "header a list": (header(lambda _: [1]), [WEIGHTS, "JSON object as header", "list", "fetch it again"]),
    "header with a number for a tensor": (header(lambda h: h.update({KEY: 1})), [WEIGHTS, KEY, "must have a shape"]),
    "header with a name twice": (header(lambda h: (json.dumps(h)[:-1] + f', "{KEY}": 1}}').encode()), [WEIGHTS, KEY, "appears twice"]),
    "header without a shape": (header(lambda h: h[KEY].pop("shape") and None), [WEIGHTS, KEY, "must have a shape"]),
    "header with a negative size": (header(lambda h: h[KEY].update(shape=[-16, 16])), [WEIGHTS, KEY, "must have a shape"]),
    "header with another size": (header(lambda h: h[KEY].update(shape=[16, 17])), [WEIGHTS, KEY, "[16, 17] cannot have the data_offsets"]),
    "header with a list for a type": (header(lambda h: h[KEY].update(dtype=["F32"])), [WEIGHTS, KEY, "it is ['F32']", "not quantised"]),
    "header nested without end": (header(lambda _: b'{"a": ' + b"[" * 100_000), [WEIGHTS, "JSON header", "fetch it again"]),
    "header with a hole": (header(lambda h: h.pop(KEY) and None), [WEIGHTS, "must begin at byte", "fetch it again"]),
    "tensor missing": (tensors(lambda held: held.pop(KEY)), ["must hold the tensor", KEY, "[16, 16]", "missing", "fetch"]),
    "tensor too much": (
        tensors(lambda held: held.update({BIAS: np.ones(16, np.float32)})),
        [WEIGHTS, "o_proj.bias", "qwen2"],
    ),
    "layer too much": (config(num_hidden_layers=1), [WEIGHTS, "'model.layers.1.", "does not have"]),
    "layer missing": (config(num_hidden_layers=3), ["'model.layers.2.", "missing"]),
    "tensor misshapen": (config(intermediate_size=25), [WEIGHTS, "mlp.", "[16, 25] by config.json; it is [16, 24]"]),
    "tensor turned": (tensors(lambda held: held.update({KEY: np.ones((17, 16), np.float32)})), [WEIGHTS, KEY, "[16, 16]", "[17, 16]"]),
    "int8 weights": (tensors(in_float(np.int8)), [WEIGHTS, KEY, "it is I8", "not quantised"]),
    "float64 weights": (tensors(in_float(np.float64)), [WEIGHTS, KEY, "it is F64"]),
    "integer weights": (tensors(in_float(np.int32)), [WEIGHTS, KEY, "it is I32"]),
    "the same tensor in two files": (doubled, ["must be in one file", "a.safetensors", "b.safetensors", "remove"]),
    "shard missing without an index": (rename(WEIGHTS, "model-00001-of-00002.safetensors"), ["model-00002-of-00002.safetensors' is not there", "fetch"]),
    "untied, but without a head": (tensors(lambda held: held.pop("lm_head.weight")), ["lm_head.weight", "missing"]),
    "architecture": (config(architectures=["MistralForCausalLM"]), ["config.json", "MistralForCausalLM", "Qwen2ForCausalLM"]),
    "classifier": (config(architectures=["Qwen2ForSequenceClassification"]), ["config.json", "Qwen2ForSequenceClassification"]),
    "architecture and model_type": (config(model_type="llama"), ["config.json", "'model_type'", "must be qwen2; got llama"]),
    "biases that llama does not have": (config(**LLAMA, attention_bias=False), [WEIGHTS, "_proj.bias", "llama"]),
    "attention_bias of llama": (
        config(**LLAMA, attention_bias=True),
        ["config.json", "'attention_bias'", "True"],
    ),
    "mlp_bias": (config(mlp_bias=True), ["config.json", "'mlp_bias'", "True"]),
    "activation": (config(hidden_act="gelu"), ["config.json", "'hidden_act'", "silu", "gelu"]),
    "sliding window": (config(use_sliding_window=True), ["config.json", "'use_sliding_window'", "full"]),
    "layers' kinds a number": (config(layer_types=5), ["config.json", "'layer_types' must be a list; got 5"]),
    "layers' kinds a text": (config(layer_types="full_attention"), ["config.json", "'layer_types' must be a list; got full_attention"]),
    "sliding layers": (config(layer_types=["full_attention", "sliding_attention"]), ["config.json", "'layer_types'", "sliding_attention"]),
    "sliding window of llama": (
        config(["use_sliding_window", "attention_bias"], **LLAMA, sliding_window=4096),
        ["config.json", "'sliding_window'", "4096"],
    ),
    "quantised": (config(quantization_config={"quant_method": "awq", "bits": 4}), ["config.json", "'quantization_config'", "quantised"]),
    "yarn": (config(rope_scaling={"type": "yarn", "factor": 4.0}), ["config.json", "'rope_type'", "yarn"]),
    "linear rope": (config(rope_parameters={"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}), ["config.json", "'rope_type'", "linear"]),
    "dynamic rope": (config(rope_scaling={"rope_type": "dynamic", "factor": 2.0}), ["config.json", "'rope_type'", "dynamic"]),
    "longrope": (config(rope_scaling={"rope_type": "longrope", "long_factor": [1.0]}), ["config.json", "'rope_type'", "longrope"]),
    "rope by kind of layer": (config(rope_parameters={"full_attention": {"rope_type": "default"}}), ["config.json", "'full_attention'"]),
    "rope of another kind of value": (config(rope_scaling="yarn"), ["config.json", "'rope_scaling' must be an object"]),
    "llama3 rope incomplete": (
        config(rope_scaling={"rope_type": "llama3", "factor": 8.0, "high_freq_factor": 4.0}),
        ["config.json", "'low_freq_factor'", "missing"],
    ),
    "llama3 rope the wrong way round": (
        config(rope_scaling={"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 4.0, "high_freq_factor": 1.0, "original_max_position_embeddings": 64}),
        ["config.json", "'low_freq_factor' < 'high_freq_factor'", "4.0 and 1.0"],
    ),
    "two bases of the rotary frequencies": (config(rope_theta=1e6, rope_parameters={"rope_theta": 1e4}), ["config.json", "'rope_theta' is given twice"]),
    "partial rotary": (config(partial_rotary_factor=0.5), ["config.json", "'partial_rotary_factor'", "0.5"]),
    "partial rotary, the new spelling": (config(rope_parameters={"partial_rotary_factor": 0.25}), ["config.json", "'partial_rotary_factor'", "0.25"]),
    "softcapping": (config(final_logit_softcapping=30.0), ["config.json", "'final_logit_softcapping'", "30.0", "not known"]),
    "scaled residuals": (config(residual_multiplier=0.22), ["config.json", "'residual_multiplier'", "not known"]),
    "chunked attention": (config(dual_chunk_attention_config={"chunk_size": 262144}), ["config.json", "'dual_chunk_attention_config'", "not known"]),
    "a size missing": (config(["hidden_size"]), ["config.json' must hold 'hidden_size'", "missing"]),
    "key and value heads missing": (config(["num_key_value_heads"]), ["config.json' must hold 'num_key_value_heads'", "missing"]),
    "a negative size": (config(num_hidden_layers=-2), ["config.json", "'num_hidden_layers'", "-2"]),
    "a size of zero": (config(vocab_size=0), ["config.json", "'vocab_size'", "got 0"]),
    "a size that is a text": (config(hidden_size="16"), ["config.json", "'hidden_size' must be a whole number"]),
    "a size that is true": (config(num_hidden_layers=True), ["config.json", "'num_hidden_layers' must be a whole number", "True"]),
    "a size that is not a number": (config(intermediate_size=float("nan")), ["config.json", "'intermediate_size'", "nan"]),
    "epsilon not a number": (config(rms_norm_eps=float("nan")), ["config.json", "'rms_norm_eps'", "nan"]),
    "rotary base infinite": (config(rope_theta=float("inf")), ["config.json", "'rope_theta'", "inf"]),
    "heads that do not divide": (config(num_attention_heads=5), ["config.json", "'num_attention_heads'", "5 and 2"]),
    "odd head": (config(head_dim=7), ["config.json", "'head_dim' must be even", "got 7"]),
    "width that heads do not divide": (config(["head_dim"], hidden_size=18), ["config.json", "'hidden_size' must be a multiple", "18 and 4", "head_dim"]),
    "tied by a text": (config(tie_word_embeddings="yes"), ["config.json", "'tie_word_embeddings'", "yes"]),
    "no end of text": (lambda p: (config(["eos_token_id"])(p), (p / "generation_config.json").unlink()), ["config.json", "'eos_token_id'", "add it"]),
    "end of text outside": (write("generation_config.json", b'{"eos_token_id": [1, 5000]}'), ["generation_config.json'", "'eos_token_id'", "got 5000"]),
    "end of text a text": (write("generation_config.json", b'{"eos_token_id": "</s>"}'), ["generation_config.json'", "'eos_token_id'", "</s>"]),
    "dense blocks among the experts": (config(mlp_only_layers=[0], **MIXTURE), ["config.json", "'mlp_only_layers'", "[0]"]),
    "experts in every second block": (config(decoder_sparse_step=2, **MIXTURE), ["config.json", "'decoder_sparse_step'", "got 2"]),
    "more experts a token than there are": (config(**MIXTURE | {"num_experts_per_tok": 5}), ["config.json", "'num_experts_per_tok'", "got 5"]),
    "experts missing": (config(**{k: v for k, v in MIXTURE.items() if k != "num_experts"}), ["config.json' must hold 'num_experts'", "missing"]),
    "experts of a dense policy": (config(num_local_experts=8), ["config.json", "'num_local_experts'", "got 8", "not known"]),
    "shared expert": (config(shared_expert_intermediate_size=64, **MIXTURE), ["config.json", "'shared_expert_intermediate_size'", "not known"]),
    "tokenizer absent": (remove("tokenizer.json"), ["tokenizer.json", "is not there"]),
    "tokenizer a pointer": (write("tokenizer.json", POINTER), ["tokenizer.json'", "Git LFS pointer", "git lfs pull"]),
    "tokenizer cut off": (cut("tokenizer.json", 500), ["tokenizer.json'", "fetch it again"]),
    "chat template not text": (write("chat_template.jinja", b"\xff\xfe"), ["chat_template.jinja' must be UTF-8 text", "fetch it again"]),
    "tokenizer larger than the vocabulary": (config(vocab_size=200), ["one'", "vocabulary of 200", "the policy's own tokenizer"]),
}
MANY = {
    "shard missing": (lambda p: shard_of(p).unlink(), ["model-00002-of-00004.safetensors' is not there", INDEX, "fetch the whole checkpoint"]),
    "shard cut off": (lambda p: cut(shard_of(p).name, 5_000)(p), ["model-00002-of-00004.safetensors' is cut off", "fetch it again"]),
    "shard a pointer": (lambda p: shard_of(p).write_bytes(POINTER), ["model-00002-of-00004.safetensors'", "git lfs pull"]),
    "index no JSON": (write(INDEX, b"{"), [INDEX, "must be JSON"]),
    "index without a map": (write(INDEX, b'{"metadata": {}}'), [INDEX, "'weight_map'", "fetch it again"]),
    "index that leads elsewhere": (index(lambda i: i["weight_map"].update({KEY: "../x.safetensors"})), [INDEX, "'weight_map'", "beside it"]),
    "index names what the file does not hold": (
        index(lambda i: i["weight_map"].update({KEY + "s": "model-00002-of-00004.safetensors"})),
        ["model-00002-of-00004.safetensors' must hold", KEY + "s", INDEX],
    ),
    "index does not name what the file holds": (index(lambda i: i["weight_map"].pop(KEY)), ["holds", KEY, INDEX, "does not place there"]),
    "index places a tensor elsewhere": (index(lambda i: i["weight_map"].update({KEY: "model-00004-of-00004.safetensors"})), [KEY, INDEX, "fetch"]),
    "index and a single file": (both_layouts, ["one set of weights", WEIGHTS, INDEX, "remove one"]),
}


def refusal(directory):
    with pytest.raises((ValueError, FileNotFoundError)) as caught:
        opened(directory)
    assert type(caught.value).__name__ in ("PolicyFilesError", "ValueError", "FileNotFoundError"), "no library's own"
    text = str(caught.value)
    assert "\n" not in text and ";" in text and len(text) < 500, text
    return text


@pytest.mark.parametrize(("layout", "name"), [("one", name) for name in ONE] + [("many", name) for name in MANY])
def test_refused_in_one_line(layout, name, whole, tmp_path):
    shutil.copytree(whole / layout, tmp_path / layout)
    change, parts = (ONE if layout == "one" else MANY)[name]
    change(tmp_path / layout)
    text = refusal(tmp_path / layout)
    assert all(part in text for part in parts), text


def test_what_may_be_there(whole, tmp_path):
    """Old rotary tables, the copy of a tied embedding, keys that compute nothing, and unknown ones that are off."""
    path = tmp_path / "one"
    shutil.copytree(whole / "one", path)
    model, params = opened(path)
    tensors(lambda held: held.update({"model.layers.0.self_attn.rotary_emb.inv_freq": np.ones(4, np.float32)}))(path)
    config(auto_map={"AutoConfig": "x.y"}, use_mrope=False, sliding_window=4096, max_window_layers=1, attention_dropout=0.1, some_new_switch=None, other=[])(
        path
    )
    assert opened(path)[0] == model
    tensors(lambda held: held.update({"lm_head.weight": held["model.embed_tokens.weight"]}))(path)
    config(tie_word_embeddings=True)(path)
    tied, shared = opened(path)
    assert tied.tie_embeddings and "lm_head" not in shared
    np.testing.assert_array_equal(shared["embedding"], params["embedding"])


def test_a_file_that_shrinks_under_way(whole, tmp_path, monkeypatch):
    """Between the check of the headers and the reading."""
    shutil.copytree(whole / "one", tmp_path / "one")
    model = read_model(tmp_path / "one", "float32")
    from areal_jax.models import checkpoint

    known = checkpoint.open_tensors(tmp_path / "one")
    monkeypatch.setattr(checkpoint, "open_tensors", lambda path: known)
    cut(WEIGHTS, 12_000)(tmp_path / "one")
    with pytest.raises(ValueError, match="ends inside"):
        load_params(
            tmp_path / "one", model, "float32", jax.tree.map(lambda _: jax.sharding.SingleDeviceSharding(jax.devices()[0]), checkpoint.param_shapes(model))
        )
