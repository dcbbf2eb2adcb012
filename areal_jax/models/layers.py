"""The layers of the policy, in Flax NNX. Sampler and trainer apply these same modules.

Invariants:
* Every layer acts on the last axis and takes any leading axes, so that a packed row, a batch of prompts and one token
  a slot go through the same code; attention over the past is passed in as a function.
* Products in float32 are computed at full precision on every backend.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from areal_jax.models.architecture import Lora, ModelConfig, RopeScaling

Attend = Callable[[int, jax.Array, jax.Array, jax.Array], jax.Array]
"""(layer, query [..., heads, head_dim], key [..., kv_heads, head_dim], value [..., kv_heads, head_dim]) → [..., heads, head_dim]"""


def precision(dtype: jnp.dtype) -> jax.lax.Precision | None:
    """Full precision for float32 (no TF32), the backend's own for the rest."""
    return jax.lax.Precision.HIGHEST if dtype == jnp.float32 else None


class Linear(nnx.Module):
    """x @ kernel + bias, computed in ``dtype``; with adapters + (alpha / rank) · x @ lora_a @ lora_b, whose start is 0 (arXiv 2106.09685)."""

    def __init__(self, size_in: int, size_out: int, *, bias: bool, dtype: str, rngs: nnx.Rngs, scale: float = 1.0, lora: Lora | None = None):
        stddev = scale * size_in**-0.5
        self.kernel = nnx.Param(stddev * jax.random.truncated_normal(rngs.params(), -3.0, 3.0, (size_in, size_out), jnp.float32))
        self.bias = nnx.Param(jnp.zeros(size_out)) if bias else None
        self.lora_a = nnx.Param(size_in**-0.5 * jax.random.normal(rngs.lora(), (size_in, lora.rank), jnp.float32)) if lora else None
        self.lora_b = nnx.Param(jnp.zeros((lora.rank, size_out))) if lora else None
        self.lora_scale = lora.scale if lora else 0.0
        self.dtype = jnp.dtype(dtype)

    def __call__(self, x: jax.Array) -> jax.Array:
        def times(x: jax.Array, matrix: nnx.Param) -> jax.Array:
            return jnp.matmul(x, matrix[...].astype(self.dtype), precision=precision(self.dtype))

        x = x.astype(self.dtype)
        y = times(x, self.kernel)
        if self.lora_a is not None and self.lora_b is not None:
            y = y + times(times(x, self.lora_a) * self.lora_scale, self.lora_b)
        return y if self.bias is None else y + self.bias[...].astype(self.dtype)


class RMSNorm(nnx.Module):
    """Root-mean-square norm, in float32 inside (arXiv 1910.07467)."""

    def __init__(self, size: int, epsilon: float):
        self.scale = nnx.Param(jnp.ones(size))
        self.epsilon = epsilon

    def __call__(self, x: jax.Array) -> jax.Array:
        y = x.astype(jnp.float32)
        y = y * jax.lax.rsqrt(jnp.mean(jnp.square(y), -1, keepdims=True) + self.epsilon)
        return (y * self.scale[...].astype(jnp.float32)).astype(x.dtype)


def rotary_frequencies(head_dim: int, theta: float, scaling: RopeScaling | None) -> np.ndarray:
    """Angle a position, float32 [head_dim / 2], of every rotary pair (arXiv 2104.09864).

    With ``scaling`` waves longer than ``original_max_positions / low_freq_factor`` are stretched by ``factor``, those shorter than
    ``original_max_positions / high_freq_factor`` stay, and those in between are mixed by their number of turns (Llama 3.1's "llama3").
    """
    frequency = theta ** (-np.arange(0, head_dim, 2, dtype=np.float64) / head_dim)
    if scaling is not None:
        turns = scaling.original_max_positions * frequency / (2 * np.pi)
        kept = np.clip((turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor), 0.0, 1.0)
        frequency = frequency * (kept + (1 - kept) / scaling.factor)
    return frequency.astype(np.float32)


def rotary_tables(positions: jax.Array, head_dim: int, theta: float, scaling: RopeScaling | None = None) -> tuple[jax.Array, jax.Array]:
    """cos and sin, each float32 [..., 1, head_dim], of integer positions [...] (halves layout)."""
    frequency = jnp.asarray(rotary_frequencies(head_dim, theta, scaling))
    angle = positions[..., None].astype(jnp.float32) * frequency
    angle = jnp.concatenate([angle, angle], -1)[..., None, :]
    return jnp.cos(angle), jnp.sin(angle)


def rotate(x: jax.Array, tables: tuple[jax.Array, jax.Array]) -> jax.Array:
    """Applies rotary positions to x [..., heads, head_dim]."""
    cos, sin = tables
    half = x.shape[-1] // 2
    turned = jnp.concatenate([-x[..., half:], x[..., :half]], -1)
    return (x.astype(jnp.float32) * cos + turned.astype(jnp.float32) * sin).astype(x.dtype)


class Attention(nnx.Module):
    """Grouped-query attention's projections (arXiv 2305.13245); what is attended to is the caller's."""

    def __init__(self, model: ModelConfig, rngs: nnx.Rngs):
        def linear(name: str, size_in: int, size_out: int, *, bias: bool = model.attention_bias, scale: float = 1.0) -> Linear:
            return Linear(size_in, size_out, bias=bias, dtype=model.dtype, rngs=rngs, scale=scale, lora=model.lora_on(name))

        hidden, queries, keys = model.hidden_size, model.heads * model.head_dim, model.kv_heads * model.head_dim
        self.query = linear("query", hidden, queries)
        self.key = linear("key", hidden, keys)
        self.value = linear("value", hidden, keys)
        self.output = linear("output", queries, hidden, bias=False, scale=(2 * model.layers) ** -0.5)
        self.query_norm = RMSNorm(model.head_dim, model.norm_epsilon) if model.query_key_norm else None
        self.key_norm = RMSNorm(model.head_dim, model.norm_epsilon) if model.query_key_norm else None
        self.head_dim = model.head_dim

    def __call__(self, layer: int, x: jax.Array, tables: tuple[jax.Array, jax.Array], attend: Attend) -> jax.Array:
        def heads(y: jax.Array) -> jax.Array:
            return y.reshape(*y.shape[:-1], -1, self.head_dim)

        query, key, value = heads(self.query(x)), heads(self.key(x)), heads(self.value(x))
        if self.query_norm is not None and self.key_norm is not None:
            query, key = self.query_norm(query), self.key_norm(key)
        mixed = attend(layer, rotate(query, tables), rotate(key, tables), value)
        return self.output(mixed.reshape(*mixed.shape[:-2], -1))


class SwiGLU(nnx.Module):
    """down(silu(gate(x)) · up(x)) (arXiv 2002.05202)."""

    def __init__(self, model: ModelConfig, rngs: nnx.Rngs):
        def linear(name: str, size_in: int, size_out: int, scale: float = 1.0) -> Linear:
            return Linear(size_in, size_out, bias=False, dtype=model.dtype, rngs=rngs, scale=scale, lora=model.lora_on(name))

        self.gate = linear("gate", model.hidden_size, model.mlp_size)
        self.up = linear("up", model.hidden_size, model.mlp_size)
        self.down = linear("down", model.mlp_size, model.hidden_size, (2 * model.layers) ** -0.5)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.down(jax.nn.silu(self.gate(x)) * self.up(x))
