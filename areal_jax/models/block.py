"""The decoder block, with a SwiGLU or a mixture of experts. Sampler and trainer apply this same module."""

from __future__ import annotations

import jax
from flax import nnx
from jax.sharding import Mesh

from areal_jax.models.architecture import ModelConfig
from areal_jax.models.layers import Attend, Attention, RMSNorm, SwiGLU
from areal_jax.models.moe import MixtureOfExperts


class Block(nnx.Module):
    """One pre-norm decoder block."""

    def __init__(self, model: ModelConfig, rngs: nnx.Rngs):
        self.attention_norm = RMSNorm(model.hidden_size, model.norm_epsilon)
        self.attention = Attention(model, rngs)
        self.mlp_norm = RMSNorm(model.hidden_size, model.norm_epsilon)
        self.mlp = MixtureOfExperts(model, rngs) if model.experts else SwiGLU(model, rngs)

    def __call__(self, layer: int, x: jax.Array, tables: tuple[jax.Array, jax.Array], attend: Attend, mesh: Mesh | None = None) -> jax.Array:
        """The block's output [..., hidden].

        Args:
          layer: passed on to ``attend``.
          x: [..., hidden].
          tables: rotary, of the tokens' positions.
          attend: attention over the past.
          mesh: where a mixture of experts is computed; None: on one device, or as the compiler divides it.
        """
        x = x + self.attention(layer, self.attention_norm(x), tables, attend)
        y = self.mlp_norm(x)
        return x + (self.mlp(y, mesh) if isinstance(self.mlp, MixtureOfExperts) else self.mlp(y))
