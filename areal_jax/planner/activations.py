"""Working memory of the program that accumulates a micro-batch's gradient: what the backward pass needs of the forward one, and one block at work."""

from __future__ import annotations

from areal_jax.planner.setup import Setup
from areal_jax.planner.work import item, matrices


def activation_parts(setup: Setup) -> dict[str, int]:
    """Bytes of a device at the fullest moment, by part."""
    m, axes, t = setup.model, setup.trainer, setup.config.trainer
    c, tokens, w = item(m.dtype), setup.local_tokens, matrices(setup.model)
    hidden = tokens * m.hidden_size
    wide = tokens * m.mlp_size // axes.tensor
    heads = tokens * (m.heads + 2 * m.kv_heads) * m.head_dim // axes.tensor
    block = (6 * hidden + 3 * wide + 2 * heads) * c
    saved = {"full": hidden * c, "dots": (3 * hidden + 2 * wide + heads) * c, "none": block + 2 * hidden * 4}[t.remat]
    chunk = min(tokens, t.logprob_chunk) * m.vocab_size // axes.tensor * 4
    return {
        "compute copy": 2 * m.layers * w.block * c // (axes.fsdp * axes.tensor),
        "saved activations": m.layers * saved,
        "one block": block + w.block // axes.tensor * c * 2,
        "logits": 3 * chunk + w.head // axes.tensor * (c + 4),
    }
