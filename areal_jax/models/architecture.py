"""The sizes and switches of a decoder-only policy, one frozen value.

Invariant: two policies with equal ``ModelConfig`` have equal parameter trees.
"""

from __future__ import annotations

import dataclasses
from typing import Any


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """Qwen-style decoder: RMSNorm, RoPE, grouped-query attention, SwiGLU (arXiv 2412.15115, 2505.09388, 2407.21783).

    Attributes:
      family: 'qwen2' (bias on q, k, v), 'qwen3' (RMSNorm on q and k per head) or 'llama'.
      eos_ids: tokens at which generation stops; the first is the tokenizer's.
      pad_id: the padding token.
      dtype: compute type of the blocks; logits and log-probs are float32 always.
    """

    family: str
    vocab_size: int
    layers: int
    hidden_size: int
    heads: int
    kv_heads: int
    head_dim: int
    mlp_size: int
    rope_theta: float = 10000.0
    norm_epsilon: float = 1e-6
    tie_embeddings: bool = False
    dtype: str = "float32"
    eos_ids: tuple[int, ...] = (1,)
    pad_id: int = 0

    @property
    def attention_bias(self) -> bool:
        return self.family == "qwen2"

    @property
    def query_key_norm(self) -> bool:
        return self.family == "qwen3"


def new_model(section: Any, vocab_size: int, eos_ids: tuple[int, ...], pad_id: int) -> ModelConfig:
    """The architecture of a new policy from the ``model`` section of a run's configuration."""
    return ModelConfig(
        family=section.family,
        vocab_size=vocab_size,
        layers=section.layers,
        hidden_size=section.hidden_size,
        heads=section.heads,
        kv_heads=section.kv_heads,
        head_dim=section.head_dim,
        mlp_size=section.mlp_size,
        rope_theta=section.rope_theta,
        norm_epsilon=section.norm_epsilon,
        tie_embeddings=section.tie_embeddings,
        dtype=section.dtype,
        eos_ids=tuple(eos_ids),
        pad_id=pad_id,
    )
