"""Log-probs of chosen tokens and the entropy over the vocabulary, a chunk of tokens at a time.

Invariants:
* Forward and backward hold the logits of one chunk of a device's tokens, never those of a micro-batch: the backward pass computes them anew
  (arXiv 2411.09009's idea, without a kernel). Where all tokens are one chunk, its log-probs are kept instead.
* Logits, their sums and the head's gradient are float32; the products' operands are of the hidden states' type.
* Under a mesh tokens stay where they are (rows over data and fsdp, positions over context), the vocabulary is divided over tensor, and the head is
  gathered over fsdp once a pass and its gradient scattered back.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from areal_jax.models.axes import divided, fitting, logical_to_mesh, names_of
from areal_jax.models.layers import precision


def product(x: jax.Array, y: jax.Array) -> jax.Array:
    """x @ y, both in x's type, accumulated and returned in float32."""
    return jnp.matmul(x, y.astype(x.dtype), precision=precision(x.dtype), preferred_element_type=jnp.float32)


NOWHERE = P()


@dataclasses.dataclass(frozen=True)
class _Layout:
    """How the arrays lie on a mesh, and how many tokens are computed together.

    Attributes:
      chunk: tokens a device whose logits exist at once.
      mesh: None on a single device.
      tokens: spec of [rows, length].
      head: spec of [hidden, vocab].
    """

    chunk: int
    mesh: Mesh | None = None
    tokens: P = NOWHERE
    head: P = NOWHERE

    @property
    def gather(self) -> tuple[str, ...]:
        """Axes over which the head's hidden dimension is divided."""
        return names_of(self.head[0]) if self.mesh is not None else ()

    @property
    def vocabulary(self) -> tuple[str, ...]:
        return names_of(self.head[1]) if self.mesh is not None else ()

    @property
    def summed(self) -> tuple[str, ...]:
        """Axes over which tokens, but not the head, are divided."""
        parts = names_of(self.tokens[0]) + names_of(self.tokens[1]) if self.mesh is not None else ()
        return tuple(name for name in parts if name not in self.gather)


def token_scores(hidden: jax.Array, head: jax.Array, targets: jax.Array, temperature: Any, chunk: int, mesh: Mesh | None = None) -> tuple[jax.Array, jax.Array]:
    """Log-probs of targets and the entropy under softmax(hidden @ head / temperature).

    Args:
      hidden: [rows, length, hidden], in the compute type.
      head: [hidden, vocab].
      targets: int [rows, length].
      temperature: float [].
      chunk: tokens a device whose logits exist at once.
      mesh: that the arrays lie on; None: one device.

    Returns:
      (log-probs, entropy), float32 [rows, length].
    """
    layout = _Layout(chunk)
    if mesh is not None and divided(mesh):
        layout = _Layout(
            chunk, mesh, fitting(mesh, logical_to_mesh("batch", "length"), targets.shape), fitting(mesh, logical_to_mesh("hidden", "vocab"), head.shape)
        )
    return _scores(layout, hidden, head, targets, jnp.asarray(temperature, jnp.float32))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _scores(layout: _Layout, hidden: jax.Array, head: jax.Array, targets: jax.Array, temperature: jax.Array) -> tuple[jax.Array, jax.Array]:
    return _forward(layout, hidden, head, targets, temperature)[0]


def _mapped(layout: _Layout, function: Any, inputs: tuple[P, ...], outputs: Any) -> Any:
    if layout.mesh is None:
        return function
    return jax.shard_map(function, mesh=layout.mesh, in_specs=inputs, out_specs=outputs, check_vma=False)


def _specs(layout: _Layout) -> tuple[P, P, P]:
    return P(*layout.tokens, None), layout.head, layout.tokens


def _forward(layout: _Layout, hidden: jax.Array, head: jax.Array, targets: jax.Array, temperature: jax.Array) -> tuple[Any, Any]:
    tokens, inputs = layout.tokens, (*_specs(layout), P())
    kept = P(*tokens, *layout.head[1:2])
    local = functools.partial(_local_forward, layout)
    logprobs, entropy, normaliser, normal = _mapped(layout, local, inputs, (tokens, tokens, tokens, kept))(hidden, head, targets, temperature)
    return (logprobs, entropy), (hidden, head, targets, temperature, entropy, normaliser, normal)


def _backward(layout: _Layout, kept: Any, cotangents: tuple[jax.Array, jax.Array]) -> tuple[Any, ...]:
    hidden, head, targets, temperature, entropy, normaliser, normal = kept
    states, columns, tokens = _specs(layout)
    inputs = (states, columns, tokens, P(), tokens, tokens, P(*tokens, *columns[1:2]), tokens, tokens)
    local = functools.partial(_local_backward, layout)
    d_hidden, d_head = _mapped(layout, local, inputs, (states, columns))(hidden, head, targets, temperature, entropy, normaliser, normal, *cotangents)
    return d_hidden, d_head, None, None


_scores.defvjp(_forward, _backward)


def _whole_head(layout: _Layout, head: jax.Array, dtype: Any) -> jax.Array:
    head = head.astype(dtype)
    return jax.lax.all_gather(head, layout.gather, axis=0, tiled=True) if layout.gather else head


def _chunks(chunk: int, *arrays: jax.Array) -> tuple[jax.Array, ...]:
    """Arrays [rows, length, ...] as [chunks, tokens, ...], the last chunk filled with zeros."""
    count = -(-arrays[0].shape[0] * arrays[0].shape[1] // chunk)

    def divide(x: jax.Array) -> jax.Array:
        flat = x.reshape(-1, *x.shape[2:])
        size = -(-flat.shape[0] // count)
        flat = jnp.pad(flat, [(0, count * size - flat.shape[0])] + [(0, 0)] * (flat.ndim - 1))
        return flat.reshape(count, size, *flat.shape[1:])

    return tuple(divide(x) for x in arrays)


def _joined(x: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """The inverse of ``_chunks``; ``shape`` is [rows, length]."""
    flat = x.reshape(-1, *x.shape[2:])
    return flat[: shape[0] * shape[1]].reshape(*shape, *x.shape[2:])


def _column(layout: _Layout, targets: jax.Array, size: int) -> jax.Array:
    """Targets as columns of this device's part of the vocabulary, out of range where another one has them."""
    return targets - jax.lax.axis_index(layout.vocabulary) * size if layout.vocabulary else targets


def _local_forward(layout: _Layout, hidden: jax.Array, head: jax.Array, targets: jax.Array, temperature: jax.Array) -> tuple[jax.Array, ...]:
    """(log-probs, entropy, normaliser [rows, length]; log-probs of the vocabulary if there is one chunk, else empty) on one device."""
    whole = _whole_head(layout, head, hidden.dtype)
    axes = layout.vocabulary

    def one(x: jax.Array, target: jax.Array) -> tuple[jax.Array, ...]:
        logits = product(x, whole) / temperature
        top = jnp.max(logits, -1)
        top = jax.lax.pmax(top, axes) if axes else top
        logits -= top[:, None]
        column = _column(layout, target, whole.shape[1])
        own = jnp.take_along_axis(logits, jnp.clip(column, 0, whole.shape[1] - 1)[:, None], -1)[:, 0]
        weights = jnp.exp(logits)
        sums = jnp.stack([jnp.sum(weights, -1), jnp.sum(weights * logits, -1), jnp.where((column >= 0) & (column < whole.shape[1]), own, 0.0)])
        total, mean, own = jax.lax.psum(sums, axes) if axes else sums
        normaliser = jnp.log(total)
        return own - normaliser, normaliser - mean / total, top + normaliser, logits - normaliser[:, None]

    x, target = _chunks(layout.chunk, hidden, targets)
    if len(x) == 1:
        return tuple(_joined(part[None], targets.shape) for part in one(x[0], target[0]))
    parts = jax.lax.map(lambda pair: one(*pair)[:3], (x, target))
    return *(_joined(part, targets.shape) for part in parts), jnp.zeros((*targets.shape, 0))


def _local_backward(layout: _Layout, hidden: jax.Array, head: jax.Array, *arrays: jax.Array) -> tuple[jax.Array, jax.Array]:
    targets, temperature, entropy, normaliser, normal, d_logprobs, d_entropy = arrays
    whole = _whole_head(layout, head, hidden.dtype)

    def one(
        x: jax.Array, target: jax.Array, entropy: jax.Array, normal: jax.Array, by_logprob: jax.Array, by_entropy: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        column = _column(layout, target, whole.shape[1])
        chosen = jnp.arange(whole.shape[1]) == column[:, None]
        d_logits = jnp.where(chosen, by_logprob[:, None], 0.0) - jnp.exp(normal) * (by_logprob[:, None] + by_entropy[:, None] * (normal + entropy[:, None]))
        d_logits = (d_logits / temperature).astype(x.dtype)
        return product(d_logits, whole.T), product(x.T, d_logits)

    chunks = _chunks(layout.chunk, hidden, targets, entropy, normaliser, d_logprobs, d_entropy)
    if len(chunks[0]) == 1:
        x, target, entropy, _, *by = (chunk[0] for chunk in chunks)
        d_hidden, d_head = one(x, target, entropy, normal.reshape(-1, normal.shape[-1]), *by)
        d_hidden = d_hidden[None]
    else:

        def step(d_head: jax.Array, chunk: tuple[jax.Array, ...]) -> tuple[jax.Array, jax.Array]:
            x, target, entropy, normaliser, *by = chunk
            d_hidden, more = one(x, target, entropy, product(x, whole) / temperature - normaliser[:, None], *by)
            return d_head + more, d_hidden.astype(hidden.dtype)

        d_head, d_hidden = jax.lax.scan(step, jnp.zeros(whole.shape, jnp.float32), chunks)
    d_hidden = jax.lax.psum(d_hidden, layout.vocabulary) if layout.vocabulary else d_hidden
    if layout.gather:
        copies = 1 if set(layout.gather) <= set(names_of(layout.tokens[0])) else jax.lax.axis_size(layout.gather)
        d_head = jax.lax.psum_scatter(d_head / copies, layout.gather, scatter_dimension=0, tiled=True)
    # After the scatter: only the own part of the head travels over the other axes.
    d_head = jax.lax.psum(d_head, layout.summed) if layout.summed else d_head
    return _joined(d_hidden, targets.shape).astype(hidden.dtype), d_head.astype(head.dtype)
