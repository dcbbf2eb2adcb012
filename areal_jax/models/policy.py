"""The policy: one definition for sampler and trainer, with its parameters as a plain nested dict.

Invariants:
* Parameters are a nested dict of arrays with string keys, for example ``layers/layer_0/attention/query/kernel``
  [hidden, heads·head_dim]; kernels are [in, out]. ``bind`` gives the module over such a tree, inside or outside ``jit``.
* Logits and log-probs are float32 whatever the compute type.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
from flax import nnx
from jax.sharding import Mesh

from areal_jax.models.architecture import ModelConfig
from areal_jax.models.attention import packed_attention
from areal_jax.models.block import Block
from areal_jax.models.layers import Attend, Linear, RMSNorm, rotary_tables
from areal_jax.models.scores import product

Params = Any
"""Nested dict of arrays."""


class Policy(nnx.Module):
    """Decoder-only language model."""

    def __init__(self, model: ModelConfig, rngs: nnx.Rngs):
        self.model = model
        self.embedding = nnx.Param(jax.random.normal(rngs.params(), (model.vocab_size, model.hidden_size)) * model.hidden_size**-0.5)
        self.layers = nnx.Dict({f"layer_{i}": Block(model, rngs) for i in range(model.layers)})
        self.final_norm = RMSNorm(model.hidden_size, model.norm_epsilon)
        self.lm_head = None if model.tie_embeddings else Linear(model.hidden_size, model.vocab_size, bias=False, dtype="float32", rngs=rngs)

    def embedded(self, tokens: jax.Array, positions: jax.Array) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
        """The residual stream [..., hidden_size] before the first block, and the rotary tables."""
        return self.embedding[...][tokens].astype(self.model.dtype), self.rotary(positions)

    def rotary(self, positions: jax.Array) -> tuple[jax.Array, jax.Array]:
        """The rotary tables of positions."""
        return rotary_tables(positions, self.model.head_dim, self.model.rope_theta, self.model.rope_scaling)

    def hidden(self, tokens: jax.Array, positions: jax.Array, attend: Attend, mesh: Mesh | None = None) -> jax.Array:
        """Final hidden states [..., hidden_size] of tokens and positions [...]; ``mesh``: see ``Block``."""
        x, tables = self.embedded(tokens, positions)
        for i in range(self.model.layers):
            x = self.layers[f"layer_{i}"](i, x, tables, attend, mesh)
        return self.final_norm(x)

    @property
    def head(self) -> jax.Array:
        """[hidden_size, vocab_size]."""
        return self.embedding[...].T if self.lm_head is None else self.lm_head.kernel[...]

    def logits(self, hidden: jax.Array) -> jax.Array:
        """Float32 logits [..., vocab_size] of hidden states in the compute type."""
        return product(hidden, self.head)


@functools.cache
def _definition(model: ModelConfig) -> tuple[Any, Any]:
    return nnx.split(nnx.eval_shape(lambda: Policy(model, nnx.Rngs(0))), nnx.Param)


def param_shapes(model: ModelConfig) -> Params:
    """The parameter tree as ``jax.ShapeDtypeStruct`` (float32)."""
    return nnx.to_pure_dict(_definition(model)[1])


def init_params(model: ModelConfig, key: jax.Array) -> Params:
    """New float32 parameters: truncated normal of variance 1/fan-in, output projections scaled by 1/√(2·layers).

    Adapters have a stream of random numbers of their own, so that the rest does not depend on them.
    """
    return nnx.to_pure_dict(nnx.state(Policy(model, nnx.Rngs(params=key, lora=jax.random.fold_in(key, 1))), nnx.Param))


def bind(model: ModelConfig, params: Params) -> Policy:
    """The module whose parameters are ``params``."""
    definition, shapes = _definition(model)
    state = jax.tree.map(lambda leaf: leaf, shapes)
    nnx.replace_by_pure_dict(state, params)
    return nnx.merge(definition, state)


def packed_logits(model: ModelConfig, params: Params, tokens: jax.Array, positions: jax.Array, segment_ids: jax.Array) -> jax.Array:
    """Logits float32 [rows, length, vocab] of packed rows (int [rows, length] each; segment 0 is padding)."""
    policy = bind(model, params)
    return policy.logits(policy.hidden(tokens, positions, lambda _, q, k, v: packed_attention(q, k, v, segment_ids)))
