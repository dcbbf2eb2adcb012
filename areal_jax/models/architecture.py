"""The sizes and switches of a decoder-only policy, one frozen value.

Invariant: two policies with equal ``ModelConfig`` have equal parameter trees.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from areal_jax.config import ConfigError

FAMILIES = ("qwen2", "qwen3", "llama", "qwen3_moe")


@dataclasses.dataclass(frozen=True)
class RopeScaling:
    """Llama 3's stretching of the slow rotary frequencies (arXiv 2407.21783; ``rope_type`` 'llama3')."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_positions: int


@dataclasses.dataclass(frozen=True)
class Lora:
    """Low-rank adapters (arXiv 2106.09685): W x + (alpha / rank) · B A x on the named linear layers.

    Attributes:
      rank: of A and B.
      alpha: scale of the product.
      targets: names of linear layers inside a block, of 'query', 'key', 'value', 'output', 'gate', 'up', 'down'.
    """

    rank: int
    alpha: float
    targets: tuple[str, ...]

    @property
    def scale(self) -> float:
        return self.alpha / self.rank


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """Qwen-style decoder: RMSNorm, RoPE, grouped-query attention, SwiGLU (arXiv 2412.15115, 2505.09388, 2407.21783).

    Attributes:
      family: 'qwen2' (bias on q, k, v), 'qwen3' (RMSNorm on q and k per head), 'llama', or 'qwen3_moe' (qwen3 with experts in every block).
      eos_ids: tokens at which generation stops; the first is the tokenizer's.
      pad_id: the padding token.
      dtype: compute type of the blocks; logits and log-probs are float32 always.
      max_positions: longest sequence that the policy was made for; 0: not known.
      rope_scaling: of Llama 3.1 and later; None: plain.
      experts, experts_per_token, expert_mlp_size: of 'qwen3_moe'; 0 elsewhere.
      normalise_experts: the weights of a token's experts sum to 1 ('norm_topk_prob').
      lora: adapters, None without.
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
    max_positions: int = 0
    rope_scaling: RopeScaling | None = None
    experts: int = 0
    experts_per_token: int = 0
    expert_mlp_size: int = 0
    normalise_experts: bool = True
    lora: Lora | None = None

    def lora_on(self, name: str) -> Lora | None:
        """The adapters of the linear layer of this name in each block; None without."""
        return self.lora if self.lora is not None and name in self.lora.targets else None

    @property
    def attention_bias(self) -> bool:
        return self.family == "qwen2"

    @property
    def query_key_norm(self) -> bool:
        return self.family in ("qwen3", "qwen3_moe")


def new_model(section: Any, vocab_size: int, eos_ids: tuple[int, ...], pad_id: int) -> ModelConfig:
    """The architecture of a new policy from the ``model`` section of a run's configuration."""
    mixture = section.family == "qwen3_moe"
    model = ModelConfig(
        family=section.family,
        vocab_size=section.vocab_size or vocab_size,
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
        experts=section.experts if mixture else 0,
        experts_per_token=section.experts_per_token if mixture else 0,
        expert_mlp_size=section.expert_mlp_size if mixture else 0,
    )
    return adapted(model, section)


def adapted(model: ModelConfig, section: Any) -> ModelConfig:
    """The architecture with the adapters that the ``model`` section asks for; none for 'lora_rank' 0.

    Raises:
      ConfigError: adapters are asked for on the layers of experts.
    """
    if not section.lora_rank:
        return model
    on_experts = [name for name in section.lora_targets if name in ("gate", "up", "down")]
    if model.experts and on_experts:
        raise ConfigError(
            f"'model.lora_targets' must not name the layers of experts, which have no adapters here, and the policy is a mixture of them; "
            f"got {', '.join(on_experts)}; set --config.model.lora_targets=\"('query','key','value','output')\""
        )
    return dataclasses.replace(model, lora=Lora(section.lora_rank, section.lora_alpha, tuple(section.lora_targets)))
