"""Between config.json (with generation_config.json) and ``ModelConfig``.

Invariants:
* Whatever changes the computation is either expressed by ``ModelConfig`` or refused by its name: a key that is neither read nor listed as harmless may only
  be null, false, 0 or empty.
* Values that are left out are those that ``transformers`` takes for the family.
* Both spellings are read: of ``transformers`` 4 (torch_dtype, rope_theta, rope_scaling) and 5 (dtype, rope_parameters).
"""

from __future__ import annotations

import math
import pathlib
from collections.abc import Mapping
from typing import Any

from areal_jax.models.architecture import ModelConfig, RopeScaling
from areal_jax.models.files import PolicyFilesError, policy_directory, read_json, read_json_if_there

ARCHITECTURES = {"qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM", "llama": "LlamaForCausalLM", "qwen3_moe": "Qwen3MoeForCausalLM"}

COMPUTE_TYPES = ("float32", "bfloat16")

LONGEST_KNOWN = 32768
"""'max_position_embeddings' of an exported policy whose limit is not known."""

READ = """architectures model_type vocab_size hidden_size intermediate_size num_hidden_layers num_attention_heads num_key_value_heads head_dim hidden_act
    rms_norm_eps rope_theta rope_scaling rope_parameters partial_rotary_factor max_position_embeddings tie_word_embeddings attention_bias mlp_bias
    use_sliding_window sliding_window layer_types dtype torch_dtype compute_dtype eos_token_id pad_token_id quantization_config"""
"""Keys that ``read_model`` looks at."""

MIXTURE = "num_experts num_local_experts num_experts_per_tok moe_intermediate_size norm_topk_prob decoder_sparse_step mlp_only_layers"
"""And those of a mixture of experts besides."""

HARMLESS = """_name_or_path _commit_hash _attn_implementation _attn_implementation_autoset attn_implementation _flash_attn_2_enabled transformers_version
    transformers.js_config auto_map tokenizer_class name_or_path unsloth_version unsloth_fixed
    attention_dropout hidden_dropout resid_pdrop embd_pdrop attn_pdrop initializer_range pretraining_tp use_cache max_window_layers bos_token_id
    is_llama_config output_router_logits router_aux_loss_coef output_attentions output_hidden_states return_dict use_return_dict torchscript
    chunk_size_feed_forward id2label label2id num_labels problem_type task_specific_params finetuning_task neftune_noise_alpha gradient_checkpointing
    do_sample early_stopping num_beams num_beam_groups diversity_penalty temperature top_k top_p typical_p min_p repetition_penalty length_penalty
    no_repeat_ngram_size encoder_no_repeat_ngram_size bad_words_ids num_return_sequences output_scores return_dict_in_generate forced_bos_token_id
    forced_eos_token_id remove_invalid_values exponential_decay_length_penalty suppress_tokens begin_suppress_tokens max_length max_new_tokens
    min_length sep_token_id decoder_start_token_id prefix keys_to_ignore_at_inference"""
"""Keys that say how a policy is trained, sampled, stored or made, not what it computes."""

ROPE_KEYS = {"rope_type", "type", "rope_theta", "partial_rotary_factor"}
LLAMA3_KEYS = {"factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"}


def read_model(directory: str | pathlib.Path, dtype: str | None = None) -> ModelConfig:
    """The architecture of a Hugging Face checkpoint, from its JSON files alone.

    Args:
      directory: with config.json; generation_config.json is read where there is one.
      dtype: compute type; None: what an export of ours says, else the type that config.json names.

    Raises:
      PolicyFilesError: the files are not there, or name an architecture, a switch or a size that is not known here.
    """
    path = policy_directory(directory)
    file = path / "config.json"
    config = read_json(file)
    generation = read_json_if_there(path / "generation_config.json")
    family = _family(file, config)
    for broken, rule in _refusals(config, family):
        if broken:
            raise PolicyFilesError(f"'{file}': {rule}; take another checkpoint")
    compute = dtype or config.get("compute_dtype") or config.get("torch_dtype") or config.get("dtype") or "float32"
    if compute not in COMPUTE_TYPES:
        raise PolicyFilesError(f"'{file}': the compute type must be one of {', '.join(COMPUTE_TYPES)}; got {compute}; name one (model.dtype)")
    heads = _size(file, config, "num_attention_heads")
    hidden = _size(file, config, "hidden_size")
    kv_heads = _size(file, config, "num_key_value_heads", heads if family == "llama" or config.get("num_key_value_heads", 0) is None else None)
    if heads % kv_heads:
        raise PolicyFilesError(
            f"'{file}': 'num_attention_heads' must be a multiple of 'num_key_value_heads'; got {heads} and {kv_heads}; take another checkpoint"
        )
    if not config.get("head_dim") and hidden % heads and family != "qwen3":
        raise PolicyFilesError(
            f"'{file}': 'hidden_size' must be a multiple of 'num_attention_heads' without 'head_dim'; got {hidden} and {heads}; add head_dim"
        )
    head_dim = _size(file, config, "head_dim", 128 if family == "qwen3" and "head_dim" not in config else hidden // heads)
    if head_dim % 2:
        raise PolicyFilesError(f"'{file}': 'head_dim' must be even (rotary pairs); got {head_dim}; take another checkpoint")
    vocab_size = _size(file, config, "vocab_size")
    eos = _token_ids(path, "eos_token_id", generation, config, vocab_size)
    if not eos:
        raise PolicyFilesError(f"'{file}' or generation_config.json must name 'eos_token_id', where generation stops; it is missing; add it")
    pad = _token_ids(path, "pad_token_id", generation, config, vocab_size) or eos
    longest = config.get("max_position_embeddings")
    theta, scaling = _rotary(file, config)
    return ModelConfig(
        family=family,
        vocab_size=vocab_size,
        layers=_size(file, config, "num_hidden_layers"),
        hidden_size=hidden,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        mlp_size=_size(file, config, "intermediate_size"),
        rope_theta=theta,
        norm_epsilon=_number(file, config, "rms_norm_eps", 1e-6),
        tie_embeddings=_switch(file, config, "tie_word_embeddings"),
        dtype=compute,
        eos_ids=eos,
        pad_id=pad[0],
        max_positions=0 if longest is None else _size(file, config, "max_position_embeddings"),
        rope_scaling=scaling,
        **(_experts(file, config) if family == "qwen3_moe" else {}),
    )


def config_json(model: ModelConfig, dtype: str, source: Mapping[str, Any]) -> dict[str, Any]:
    """config.json of a policy whose parameters are stored as ``dtype``, in the spelling that every ``transformers`` from 4.40 and vLLM read.

    Args:
      model: the architecture.
      dtype: 'float32' or 'bfloat16'.
      source: config.json that the policy came with; its beginning-of-text id and initialiser are kept.
    """
    scaling = model.rope_scaling
    rope = None
    if scaling is not None:
        rope = {
            "rope_type": "llama3",
            "factor": scaling.factor,
            "low_freq_factor": scaling.low_freq_factor,
            "high_freq_factor": scaling.high_freq_factor,
            "original_max_position_embeddings": scaling.original_max_positions,
        }
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
        "rope_scaling": rope,
        "max_position_embeddings": model.max_positions or LONGEST_KNOWN,
        "tie_word_embeddings": model.tie_embeddings,
        "attention_dropout": 0.0,
        "use_cache": True,
        "torch_dtype": dtype,
        "compute_dtype": model.dtype,
        "bos_token_id": source.get("bos_token_id"),
        "eos_token_id": list(model.eos_ids),
        "pad_token_id": model.pad_id,
    }
    if "initializer_range" in source:
        config["initializer_range"] = source["initializer_range"]
    if not model.attention_bias:
        config["attention_bias"] = False
    config |= {"mlp_bias": False} if model.family == "llama" else {"use_sliding_window": False}
    if model.family == "qwen3_moe":
        config |= {
            "num_experts": model.experts,
            "num_experts_per_tok": model.experts_per_token,
            "moe_intermediate_size": model.expert_mlp_size,
            "norm_topk_prob": model.normalise_experts,
            "decoder_sparse_step": 1,
            "mlp_only_layers": [],
        }
    return config


def _family(file: pathlib.Path, config: Mapping[str, Any]) -> str:
    kind = str(config.get("model_type"))
    names = config.get("architectures") or [ARCHITECTURES.get(kind, kind)]
    name = str(names[0] if isinstance(names, list) else names)
    family = {known: family for family, known in ARCHITECTURES.items()}.get(name)
    if family is None:
        raise PolicyFilesError(f"'{file}': the architecture must be one of {', '.join(ARCHITECTURES.values())}; got {name}; take another checkpoint")
    if config.get("model_type", family) != family:
        raise PolicyFilesError(f"'{file}': 'model_type' of {name} must be {family}; got {config['model_type']}; fetch the file again")
    return family


def _refusals(config: Mapping[str, Any], family: str) -> list[tuple[bool, str]]:
    """(broken, rule) of every switch that changes the computation."""
    layers = config.get("layer_types") or []
    others = sorted({str(kind) for kind in layers} - {"full_attention"}) if isinstance(layers, list) else []
    window = config.get("sliding_window") if family == "llama" and config.get("use_sliding_window") is None else None
    ours = {"qwen2": (None, True)}.get(family, (None, False))
    refusals = [
        (config.get("hidden_act", "silu") != "silu", f"'hidden_act' must be silu; got {config.get('hidden_act')}"),
        (bool(config.get("quantization_config")), "'quantization_config' must be absent: quantised weights are not read"),
        (bool(config.get("use_sliding_window")), "'use_sliding_window' must be false: attention here is full"),
        (window is not None, f"'sliding_window' must be null: attention here is full; got {window}"),
        (not isinstance(layers, list), f"'layer_types' must be a list; got {str(layers)[:80]}"),
        (bool(others), f"'layer_types' must all be full_attention; got {', '.join(others)}"),
        (config.get("attention_bias") not in ours, f"'attention_bias' of a {family} policy must be {str(ours[1]).lower()}; got {config.get('attention_bias')}"),
        (bool(config.get("mlp_bias")), f"'mlp_bias' must be false; got {config.get('mlp_bias')}"),
        (config.get("partial_rotary_factor") not in (None, 1), f"'partial_rotary_factor' must be 1; got {config.get('partial_rotary_factor')}"),
    ]
    if family == "qwen3_moe":
        step, dense = config.get("decoder_sparse_step", 1), config.get("mlp_only_layers")
        refusals += [
            (step != 1, f"'decoder_sparse_step' must be 1 (experts in every block); got {step}"),
            (bool(dense), f"'mlp_only_layers' must be empty (experts in every block); got {dense}"),
        ]
    known = {*READ.split(), *HARMLESS.split(), *(MIXTURE.split() if family == "qwen3_moe" else ())}
    refusals += [
        (bool(value), f"'{key}' is not known here and may change what the policy computes; got {str(value)[:80]}")
        for key, value in config.items()
        if key not in known
    ]
    return refusals


def _rotary(file: pathlib.Path, config: Mapping[str, Any]) -> tuple[float, RopeScaling | None]:
    """(base of the frequencies, their scaling)."""
    given: dict[str, Any] = {}
    for key in ("rope_parameters", "rope_scaling"):
        value = config.get(key) or {}
        if not isinstance(value, dict):
            raise PolicyFilesError(f"'{file}': '{key}' must be an object or null; got {value}; fetch the file again")
        given |= value
    kind = given.get("rope_type") or given.get("type") or "default"
    known = {"default": ROPE_KEYS, "llama3": ROPE_KEYS | LLAMA3_KEYS}.get(kind) if isinstance(kind, str) else None
    if known is None:
        raise PolicyFilesError(f"'{file}': 'rope_type' must be default or llama3; got {str(kind)[:80]}; take another checkpoint")
    for key, value in given.items():
        if key not in known and value is not None:
            raise PolicyFilesError(f"'{file}': rotary positions of 'rope_type' {kind} must not have '{key}'; got {str(value)[:80]}; take another checkpoint")
    if given.get("partial_rotary_factor") not in (None, 1):
        raise PolicyFilesError(f"'{file}': 'partial_rotary_factor' must be 1; got {given['partial_rotary_factor']}; take another checkpoint")
    thetas = [_number(file, place, "rope_theta", 0.0) for place in (given, config) if place.get("rope_theta") is not None]
    if len(set(thetas)) > 1:
        raise PolicyFilesError(f"'{file}': 'rope_theta' is given twice, as {thetas[0]} and {thetas[1]}; remove one")
    theta = thetas[0] if thetas else 10000.0
    if kind == "default":
        return theta, None
    factor, low, high = (_number(file, given, key) for key in ("factor", "low_freq_factor", "high_freq_factor"))
    if factor < 1 or low >= high:
        raise PolicyFilesError(
            f"'{file}': llama3 rotary positions need 'factor' ≥ 1 and 'low_freq_factor' < 'high_freq_factor'; "
            f"got {factor}, {low} and {high}; take another checkpoint"
        )
    return theta, RopeScaling(factor, low, high, _size(file, given, "original_max_position_embeddings"))


def _experts(file: pathlib.Path, config: Mapping[str, Any]) -> dict[str, Any]:
    key = "num_local_experts" if config.get("num_experts") is None and "num_local_experts" in config else "num_experts"
    experts, chosen = _size(file, config, key), _size(file, config, "num_experts_per_tok")
    if chosen > experts:
        raise PolicyFilesError(f"'{file}': 'num_experts_per_tok' must be at most '{key}' = {experts}; got {chosen}; take another checkpoint")
    return {
        "experts": experts,
        "experts_per_token": chosen,
        "expert_mlp_size": _size(file, config, "moe_intermediate_size"),
        "normalise_experts": _switch(file, config, "norm_topk_prob"),
    }


def _size(file: pathlib.Path, config: Mapping[str, Any], key: str, default: int | None = None) -> int:
    value = config.get(key)
    value = default if value is None else value
    if value is None:
        raise PolicyFilesError(f"'{file}' must hold '{key}'; it is missing; fetch the file again")
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise PolicyFilesError(f"'{file}': '{key}' must be a whole number from 1; got {value}; fetch the file again")
    return value


def _number(file: pathlib.Path, config: Mapping[str, Any], key: str, default: float | None = None) -> float:
    value = config.get(key)
    value = default if value is None else value
    if value is None:
        raise PolicyFilesError(f"'{file}' must hold '{key}'; it is missing; fetch the file again")
    if not isinstance(value, int | float) or isinstance(value, bool) or not math.isfinite(value) or value <= 0:
        raise PolicyFilesError(f"'{file}': '{key}' must be a number above 0; got {value}; fetch the file again")
    return float(value)


def _switch(file: pathlib.Path, config: Mapping[str, Any], key: str) -> bool:
    value = config.get(key)
    if value not in (None, True, False):
        raise PolicyFilesError(f"'{file}': '{key}' must be true or false; got {value}; fetch the file again")
    return bool(value)


def _token_ids(path: pathlib.Path, key: str, generation: Mapping[str, Any], config: Mapping[str, Any], vocab_size: int) -> tuple[int, ...]:
    """Ids that generation_config.json, else config.json, names; () if neither does."""
    for name, place in (("generation_config.json", generation), ("config.json", config)):
        value = place.get(key)
        ids = value if isinstance(value, list) else [] if value is None else [value]
        for i in ids:
            if not isinstance(i, int) or isinstance(i, bool) or not 0 <= i < vocab_size:
                raise PolicyFilesError(f"'{path / name}': '{key}' must lie in the vocabulary of {vocab_size}; got {i}; fetch the file again")
        if ids:
            return tuple(ids)
    return ()
