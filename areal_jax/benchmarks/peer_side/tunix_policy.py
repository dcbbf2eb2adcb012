"""Tunix's Qwen2 from a checkpoint, in float32, on all of this process's devices."""

# pyright: reportMissingImports=false

from __future__ import annotations

import functools
import json
import pathlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from tunix.models.qwen2 import model as qwen2
from tunix.models.qwen2 import params as qwen2_params


@functools.cache
def mesh() -> Any:
    """The devices that JAX_NUM_CPU_DEVICES says, as fsdp."""
    return jax.sharding.Mesh(np.asarray(jax.devices())[:, None], ("fsdp", "tp"))


def policy(checkpoint: str) -> Any:
    """The module, nothing rematerialised."""
    sizes = json.loads((pathlib.Path(checkpoint) / "config.json").read_text())
    config = qwen2.ModelConfig(
        num_layers=sizes["num_hidden_layers"],
        vocab_size=sizes["vocab_size"],
        embed_dim=sizes["hidden_size"],
        hidden_dim=sizes["intermediate_size"],
        num_heads=sizes["num_attention_heads"],
        head_dim=sizes.get("head_dim") or sizes["hidden_size"] // sizes["num_attention_heads"],
        num_kv_heads=sizes["num_key_value_heads"],
        rope_theta=sizes.get("rope_theta") or sizes["rope_parameters"]["rope_theta"],
        norm_eps=sizes["rms_norm_eps"],
        use_tied_embedding=sizes["tie_word_embeddings"],
        dtype=jnp.float32,
        param_dtype=jnp.float32,
    )
    return qwen2_params.create_model_from_safe_tensors(checkpoint, config, mesh(), dtype=jnp.float32)
