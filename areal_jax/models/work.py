"""The work of a policy's passes, counted from its architecture.

Invariant: everything is counted, nothing is measured: 2 FLOPs for each parameter of the matrix products that a token goes through (arXiv 2001.08361),
and 4 · heads · head_dim a layer for each position that it attends to.
"""

from __future__ import annotations

import dataclasses

from areal_jax.models.architecture import ModelConfig


@dataclasses.dataclass(frozen=True)
class Matrices:
    """Parameters of matrix products that a token goes through, and all of them; ``adapters`` are those of a block's low-rank ones."""

    block: int
    block_active: int
    head: int
    adapters: int = 0


def matrices(model: ModelConfig) -> Matrices:
    """Of one block and of the LM head; a mixture's token goes through some experts and the router."""
    m = model
    attention = m.hidden_size * m.head_dim * 2 * (m.heads + m.kv_heads)
    if m.experts:
        expert, router = 3 * m.hidden_size * m.expert_mlp_size, m.hidden_size * m.experts
        active = attention + router + m.experts_per_token * expert
        return Matrices(attention + router + m.experts * expert, active, m.hidden_size * m.vocab_size, adapter_elements(m))
    block = attention + 3 * m.hidden_size * m.mlp_size
    return Matrices(block, block, m.hidden_size * m.vocab_size, adapter_elements(m))


def adapter_parts(model: ModelConfig) -> tuple[int, int]:
    """Parameters of one block's adapters along the hidden size, which fsdp divides, and along the other, which tensor divides; (0, 0) without."""
    m, queries, keys = model, model.heads * model.head_dim, model.kv_heads * model.head_dim
    others = {"query": queries, "key": keys, "value": keys, "output": queries} | dict.fromkeys(("gate", "up", "down"), m.mlp_size)
    if m.lora is None:
        return 0, 0
    return m.lora.rank * len(m.lora.targets) * m.hidden_size, m.lora.rank * sum(others[name] for name in m.lora.targets)


def adapter_elements(model: ModelConfig) -> int:
    """Parameters of one block's adapters: rank · (in + out) of each layer that has one; 0 without."""
    return sum(adapter_parts(model))


def attention_flops(model: ModelConfig, seen: float) -> float:
    """Of one token that attends to ``seen`` positions, in all layers: scores and mixing."""
    return 4.0 * model.layers * model.heads * model.head_dim * seen


def forward_flops(model: ModelConfig, tokens: float, seen: float, head: bool = True) -> float:
    """Of a forward pass over tokens that attend to ``seen`` positions each on average."""
    w = matrices(model)
    return tokens * (2.0 * (model.layers * (w.block_active + w.adapters) + (w.head if head else 0)) + attention_flops(model, seen))


def attention_span(model: ModelConfig) -> float:
    """Positions that a token attends to for as many FLOPs as all its matrix products take."""
    return forward_flops(model, 1.0, 0.0) / attention_flops(model, 1.0)
