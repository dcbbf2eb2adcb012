"""Policies in and out of the Hugging Face layout: config.json, generation_config.json, *.safetensors and the tokenizer's files.

Invariants:
* One table gives the stored name of every parameter; a checkpoint with a name, shape or switch that the policy does not have is refused.
* Linear kernels are stored [out, in], as there; here they are [in, out].
* The directory appears whole: it is written beside its place and renamed.
"""

from __future__ import annotations

import json
import os
import pathlib
import shutil
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import numpy as np
from ml_dtypes import bfloat16
from safetensors import safe_open
from safetensors.numpy import save_file

from areal_jax.models.architecture import ModelConfig
from areal_jax.models.policy import Params, param_shapes
from areal_jax.models.tokenizer import Tokenizer

ARCHITECTURES = {"qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM", "llama": "LlamaForCausalLM"}

STORED_NAMES = {
    "embedding": "model.embed_tokens.weight",
    "final_norm/scale": "model.norm.weight",
    "lm_head/kernel": "lm_head.weight",
    "attention_norm/scale": "input_layernorm.weight",
    "attention/query/kernel": "self_attn.q_proj.weight",
    "attention/query/bias": "self_attn.q_proj.bias",
    "attention/key/kernel": "self_attn.k_proj.weight",
    "attention/key/bias": "self_attn.k_proj.bias",
    "attention/value/kernel": "self_attn.v_proj.weight",
    "attention/value/bias": "self_attn.v_proj.bias",
    "attention/output/kernel": "self_attn.o_proj.weight",
    "attention/query_norm/scale": "self_attn.q_norm.weight",
    "attention/key_norm/scale": "self_attn.k_norm.weight",
    "mlp_norm/scale": "post_attention_layernorm.weight",
    "mlp/gate/kernel": "mlp.gate_proj.weight",
    "mlp/up/kernel": "mlp.up_proj.weight",
    "mlp/down/kernel": "mlp.down_proj.weight",
}
"""Names here (inside a block, or at the top) to names there."""

DTYPES = {"float32": np.dtype(np.float32), "bfloat16": np.dtype(bfloat16)}


class PolicyFilesError(ValueError):
    """A directory that holds no policy of these families; the text names the file, the rule and the remedy."""


def stored_name(path: str) -> str:
    """'layers/layer_3/mlp/up/kernel' → 'model.layers.3.mlp.up_proj.weight'.

    Raises:
      KeyError: the parameter has no line in ``STORED_NAMES``.
    """
    if path.startswith("layers/layer_"):
        layer, inner = path.removeprefix("layers/layer_").split("/", 1)
        return f"model.layers.{layer}.{STORED_NAMES[inner]}"
    return STORED_NAMES[path]


def export_policy(
    directory: str | pathlib.Path,
    model: ModelConfig,
    params: Params,
    tokenizer: Tokenizer,
    generation: Mapping[str, Any] | None = None,
    max_positions: int = 32768,
    shard_bytes: int = 4 << 30,
) -> None:
    """Writes a directory that ``transformers``, vLLM and ``load_policy`` read.

    Args:
      directory: replaced if it exists.
      model: the architecture.
      params: its parameters, on any mesh of this process; stored in their type.
      tokenizer: saved beside them.
      generation: further entries of generation_config.json, such as the temperature.
      max_positions: longest sequence that other programs should accept.
      shard_bytes: most bytes of one *.safetensors file.

    Raises:
      ValueError: the parameters are not the model's, or the tokenizer's ids exceed its vocabulary.
      OSError: the directory cannot be written.
    """
    if tokenizer.vocab_size > model.vocab_size:
        raise ValueError(
            f"the tokenizer's ids must lie in the model's vocabulary of {model.vocab_size}; it has {tokenizer.vocab_size}; export it with its own tokenizer"
        )
    leaves = _named_leaves(params)
    shapes = {name: leaf.shape for name, leaf in _named_leaves(param_shapes(model))}
    _same_shapes("the parameters", shapes, {name: tuple(leaf.shape) for name, leaf in leaves})
    target = pathlib.Path(directory).absolute()
    fresh, old = (target.with_name(f".{target.name}.{word}-{os.getpid()}") for word in ("new", "old"))
    target.parent.mkdir(parents=True, exist_ok=True)
    shutil.rmtree(fresh, ignore_errors=True)
    fresh.mkdir()
    try:
        _save_tensors(fresh, leaves, shard_bytes)
        dtype = str(next(leaf.dtype for _, leaf in leaves))
        _write_json(fresh / "config.json", _config(model, dtype, max_positions))
        ids = {"bos_token_id": None, "eos_token_id": list(model.eos_ids), "pad_token_id": model.pad_id}
        _write_json(fresh / "generation_config.json", ids | dict(generation or {}))
        tokenizer.save(fresh)
        if target.exists():
            os.replace(target, old)
        os.replace(fresh, target)
    finally:
        shutil.rmtree(fresh, ignore_errors=True)
        shutil.rmtree(old, ignore_errors=True)


def load_policy(directory: str | pathlib.Path, dtype: str | None = None, param_dtype: str = "float32") -> tuple[ModelConfig, Params]:
    """Reads a Hugging Face checkpoint of a family in ``ARCHITECTURES``.

    Args:
      directory: with config.json and *.safetensors.
      dtype: compute type; None: what an export of ours says, else the type that config.json names.
      param_dtype: type of the parameters, 'float32' or 'bfloat16'.

    Returns:
      (model, params): host arrays; place them with ``jax.device_put(params, named_shardings(mesh, specs, params))``.

    Raises:
      PolicyFilesError: a file is missing, or the policy has a part, a switch or a shape that is not known here.
    """
    path = pathlib.Path(directory)
    model = _read_model(path, dtype)
    shapes = _named_leaves(param_shapes(model))
    wanted = {stored_name(name): (name, leaf.shape) for name, leaf in shapes}
    found: dict[str, np.ndarray] = {}
    for file in _tensor_files(path):
        with safe_open(file, framework="np") as tensors:
            for stored in tensors.keys():  # noqa: SIM118 (not a dict)
                if stored in wanted:
                    found[wanted[stored][0]] = _oriented(stored, tensors.get_tensor(stored)).astype(DTYPES[param_dtype])
                elif not _derived(stored, model):
                    raise PolicyFilesError(f"'{file}' holds '{stored}', which a {model.family} policy of config.json does not have; check its architecture")
    _same_shapes(f"'{path}'", {name: leaf.shape for name, leaf in shapes}, {name: leaf.shape for name, leaf in found.items()})
    return model, jax.tree.unflatten(jax.tree.structure(param_shapes(model)), [found[name] for name, _ in shapes])


def _config(model: ModelConfig, dtype: str, max_positions: int) -> dict[str, Any]:
    config = {
        "architectures": [ARCHITECTURES[model.family]],
        "model_type": model.family,
        "vocab_size": model.vocab_size,
        "hidden_size": model.hidden_size,
        "intermediate_size": model.mlp_size,
        "num_hidden_layers": model.layers,
        "num_attention_heads": model.heads,
        "num_key_value_heads": model.kv_heads,
        "head_dim": model.head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": model.norm_epsilon,
        "rope_theta": model.rope_theta,
        "max_position_embeddings": max_positions,
        "tie_word_embeddings": model.tie_embeddings,
        "attention_dropout": 0.0,
        "use_cache": True,
        "torch_dtype": dtype,
        "compute_dtype": model.dtype,
        "bos_token_id": None,
        "eos_token_id": list(model.eos_ids),
        "pad_token_id": model.pad_id,
    }
    return (
        config
        | ({"use_sliding_window": False} if model.family != "llama" else {"mlp_bias": False})
        | ({} if model.attention_bias else {"attention_bias": False})
    )


def _read_model(path: pathlib.Path, dtype: str | None) -> ModelConfig:
    file = path / "config.json"
    config = _read_json(file)
    names = config.get("architectures") or ["none"]
    family = {name: family for family, name in ARCHITECTURES.items()}.get(names[0])
    if family is None:
        raise PolicyFilesError(f"'{file}': the architecture must be one of {', '.join(ARCHITECTURES.values())}; got {names[0]}")
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    for broken, rule in (
        (config.get("hidden_act", "silu") != "silu", f"'hidden_act' must be silu; got {config.get('hidden_act')}"),
        (rope.get("rope_type", rope.get("type", "default")) != "default", f"rotary positions must be plain ('rope_type' default); got {rope}"),
        (config.get("partial_rotary_factor", 1.0) != 1.0, f"'partial_rotary_factor' must be 1; got {config.get('partial_rotary_factor')}"),
        (bool(config.get("use_sliding_window")), "'use_sliding_window' must be false: attention here is full"),
        (family != "qwen2" and bool(config.get("attention_bias")), f"'attention_bias' must be false in a {family} policy"),
        (bool(config.get("mlp_bias")), "'mlp_bias' must be false"),
        ("quantization_config" in config, "the weights must not be quantised ('quantization_config')"),
    ):
        if broken:
            raise PolicyFilesError(f"'{file}': {rule}; take another checkpoint")
    compute = dtype or config.get("compute_dtype") or config.get("torch_dtype") or config.get("dtype") or "float32"
    if compute not in DTYPES:
        raise PolicyFilesError(f"'{file}': the compute type must be float32 or bfloat16; got {compute}; name one (model.dtype)")
    generation = _read_json(path / "generation_config.json") if (path / "generation_config.json").is_file() else {}
    eos = _ids(generation.get("eos_token_id")) or _ids(config.get("eos_token_id"))
    if not eos:
        raise PolicyFilesError(f"'{file}' or generation_config.json must name 'eos_token_id', where generation stops")
    pad = next((i for i in (generation.get("pad_token_id"), config.get("pad_token_id"), eos[0]) if i is not None), eos[0])
    try:
        heads = config["num_attention_heads"]
        return ModelConfig(
            family=family,
            vocab_size=config["vocab_size"],
            layers=config["num_hidden_layers"],
            hidden_size=config["hidden_size"],
            heads=heads,
            kv_heads=config.get("num_key_value_heads") or heads,
            head_dim=config.get("head_dim") or config["hidden_size"] // heads,
            mlp_size=config["intermediate_size"],
            rope_theta=float(config.get("rope_theta") or rope.get("rope_theta") or 10000.0),
            norm_epsilon=float(config.get("rms_norm_eps", 1e-6)),
            tie_embeddings=bool(config.get("tie_word_embeddings", False)),
            dtype=compute,
            eos_ids=tuple(eos),
            pad_id=pad,
        )
    except KeyError as error:
        raise PolicyFilesError(f"'{file}' must hold {error}; it is missing") from error


def _named_leaves(tree: Any) -> list[tuple[str, Any]]:
    return [(jax.tree_util.keystr(path, simple=True, separator="/"), leaf) for path, leaf in jax.tree_util.tree_leaves_with_path(tree)]


def _oriented(stored: str, array: np.ndarray) -> np.ndarray:
    """Between [out, in] and [in, out]; the embedding and vectors are alike in both."""
    return array.T if array.ndim == 2 and stored != STORED_NAMES["embedding"] else array


def _derived(stored: str, model: ModelConfig) -> bool:
    """Tensors that repeat what others say: old rotary tables, and the head of a policy that shares its embedding."""
    return stored.endswith("rotary_emb.inv_freq") or (model.tie_embeddings and stored == STORED_NAMES["lm_head/kernel"])


def _same_shapes(what: str, wanted: Mapping[str, tuple[int, ...]], got: Mapping[str, tuple[int, ...]]) -> None:
    for name in sorted(wanted.keys() | got.keys()):
        if wanted.get(name) != got.get(name):
            raise PolicyFilesError(
                f"{what} must hold '{name}' ({stored_name(name) if name in wanted else 'no name there'}) as {wanted.get(name, 'nothing')}; "
                f"got {got.get(name, 'nothing')}; check that configuration and weights belong together"
            )


def _save_tensors(directory: pathlib.Path, leaves: list[tuple[str, Any]], shard_bytes: int) -> None:
    """One file, or numbered ones and their index when the bytes exceed ``shard_bytes``."""
    shards: list[list[tuple[str, Any]]] = [[]]
    size = 0
    for name, leaf in leaves:
        if shards[-1] and size + leaf.nbytes > shard_bytes:
            shards.append([])
            size = 0
        shards[-1].append((stored_name(name), leaf))
        size += leaf.nbytes
    index = {}
    for number, shard in enumerate(shards, 1):
        file = "model.safetensors" if len(shards) == 1 else f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        save_file({stored: np.ascontiguousarray(_oriented(stored, np.asarray(leaf))) for stored, leaf in shard}, directory / file, metadata={"format": "pt"})
        index |= {stored: file for stored, _ in shard}
    if len(shards) > 1:
        _write_json(directory / "model.safetensors.index.json", {"metadata": {"total_size": sum(leaf.nbytes for _, leaf in leaves)}, "weight_map": index})


def _tensor_files(path: pathlib.Path) -> Iterator[pathlib.Path]:
    index = path / "model.safetensors.index.json"
    names = sorted(set(_read_json(index)["weight_map"].values())) if index.is_file() else sorted(p.name for p in path.glob("*.safetensors"))
    if not names:
        raise PolicyFilesError(f"'{path}' must hold *.safetensors; there are none; convert other formats first")
    for name in names:
        if not (path / name).is_file():
            raise PolicyFilesError(f"'{index}' names '{name}', which is not there; fetch the whole checkpoint")
        yield path / name


def _read_json(file: pathlib.Path) -> dict[str, Any]:
    try:
        return json.loads(file.read_text(encoding="utf-8"))
    except (OSError, json.JSONDecodeError) as error:
        raise PolicyFilesError(f"'{file}' must be readable JSON: {error}") from error


def _write_json(file: pathlib.Path, value: Mapping[str, Any]) -> None:
    file.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")


def _ids(value: int | list[int] | None) -> list[int]:
    return [] if value is None else list(value) if isinstance(value, list) else [value]
