"""The mixture of experts of a Qwen3-MoE block (arXiv 2505.09388, 2101.03961): a router, and a SwiGLU for each expert.

Invariants:
* Every token goes through its ``experts_per_token`` experts; none is dropped, whatever the load, and no token's result depends on others.
* Routing is float32: logits, softmax and the weights of the chosen experts.
* Under a mesh each device routes its own tokens; what is exchanged is the kernels (gathered over fsdp, as in a dense block) and one sum over tensor.

Experts are not divided among devices: the tokens would travel instead of the kernels, and a device's share of them is known only when it is computed,
so that shapes would need a capacity and tokens beyond it would be dropped.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from areal_jax.models.architecture import ModelConfig
from areal_jax.models.axes import fitting, logical_to_mesh, names_of
from areal_jax.models.layers import Linear, precision
from areal_jax.models.remat import GATHERED, SAVED


class ExpertKernels(nnx.Module):
    """One kernel an expert: [experts, in, out], initialised as ``Linear`` is."""

    def __init__(self, experts: int, size_in: int, size_out: int, *, rngs: nnx.Rngs, scale: float = 1.0):
        stddev = scale * size_in**-0.5
        self.kernel = nnx.Param(stddev * jax.random.truncated_normal(rngs.params(), -3.0, 3.0, (experts, size_in, size_out), jnp.float32))


class MixtureOfExperts(nnx.Module):
    """Σ over a token's experts e of weight_e · down_e(silu(gate_e(x)) · up_e(x))."""

    def __init__(self, model: ModelConfig, rngs: nnx.Rngs):
        experts, hidden, size = model.experts, model.hidden_size, model.expert_mlp_size
        self.router = Linear(hidden, experts, bias=False, dtype="float32", rngs=rngs)
        self.experts = nnx.Dict(
            gate=ExpertKernels(experts, hidden, size, rngs=rngs),
            up=ExpertKernels(experts, hidden, size, rngs=rngs),
            down=ExpertKernels(experts, size, hidden, rngs=rngs, scale=(2 * model.layers) ** -0.5),
        )
        self.model = model

    def __call__(self, x: jax.Array, mesh: Mesh | None = None) -> jax.Array:
        """The mixture of x [..., hidden]; with ``mesh`` each device takes the tokens and the part of each expert that lie on it."""
        router = self.router.kernel[...].astype(jnp.float32)
        kernels = [self.experts[name].kernel[...].astype(self.model.dtype) for name in ("gate", "up", "down")]
        if mesh is None or mesh.size == 1:
            return mixture(self.model, x, router, *kernels)
        tokens = token_spec(mesh, x.shape)
        inner = fitting(mesh, logical_to_mesh("experts", "hidden", "mlp"), kernels[0].shape)
        gather = names_of(inner[1]) if set(names_of(inner[1])) <= set(names_of(tokens[0])) else ()
        summed = tuple(name for part in tokens for name in names_of(part) if name not in gather)
        hidden, tensor = gather or None, inner[2] if mesh.shape["tensor"] > 1 else None
        inner, outer = P(None, hidden, tensor), P(None, tensor, hidden)

        def local(x: jax.Array, router: jax.Array, gate: jax.Array, up: jax.Array, down: jax.Array) -> jax.Array:
            def whole(kernel: jax.Array, axis: int) -> jax.Array:
                # Cast before it is gathered: its gradient is then scattered over fsdp before it is summed over the other axes of the tokens.
                kernel = jax.lax.pcast(kernel, summed, to="varying") if summed else kernel
                return checkpoint_name(jax.lax.all_gather(kernel, gather, axis=axis, tiled=True), GATHERED)

            kernels = (whole(gate, 1), whole(up, 1), whole(down, 2)) if gather else (gate, up, down)
            return mixture(self.model, x, router, *kernels, axis=tensor)

        return jax.shard_map(local, mesh=mesh, in_specs=(tokens, P(), inner, inner, outer), out_specs=tokens)(x, router, *kernels)


def token_spec(mesh: Mesh, shape: tuple[int, ...]) -> P:
    """How tokens [rows, hidden] or [rows, length, ..., hidden] are divided among devices."""
    axes = ("batch", "length")[: len(shape) - 1]
    return fitting(mesh, logical_to_mesh(*axes), shape)


def route(x: jax.Array, router: jax.Array, per_token: int, normalise: bool) -> tuple[jax.Array, jax.Array]:
    """The experts of tokens.

    Args:
      x: [tokens, hidden].
      router: float32 [hidden, experts].
      per_token: experts of a token.
      normalise: their weights sum to 1 ('norm_topk_prob'); else they are the router's probabilities.

    Returns:
      (weights float32 [tokens, per_token], falling; experts int32 [tokens, per_token]).
    """
    logits = jnp.matmul(x.astype(jnp.float32), router, precision=jax.lax.Precision.HIGHEST)
    weights, experts = jax.lax.top_k(jax.nn.softmax(logits, -1), per_token)
    return (weights / weights.sum(-1, keepdims=True) if normalise else weights), experts


def mixture(model: ModelConfig, x: jax.Array, router: jax.Array, gate: jax.Array, up: jax.Array, down: jax.Array, axis: str | None = None) -> jax.Array:
    """The mixture on one device.

    Args:
      model: for the experts a token, the normalisation and the compute type.
      x: [..., hidden].
      router: float32 [hidden, experts].
      gate, up: [experts, hidden, size], in the compute type.
      down: [experts, size, hidden].
      axis: mesh axis over which ``size`` is divided, to sum over; None: it is whole.

    Returns:
      [..., hidden] in the compute type.
    """
    flat = x.reshape(-1, x.shape[-1])
    weights, experts = route(flat, router, model.experts_per_token, model.normalise_experts)
    # One row a (token, expert) pair, ordered by expert: each expert's rows are then one block of a ragged product.
    order = jnp.argsort(experts.reshape(-1), stable=True)
    rows = flat.astype(gate.dtype)[order // model.experts_per_token]
    sizes = jnp.bincount(experts.reshape(-1), length=model.experts).astype(jnp.int32)
    product = functools.partial(jax.lax.ragged_dot, group_sizes=sizes, precision=precision(gate.dtype))
    opened, wide = (checkpoint_name(product(rows, kernel), SAVED) for kernel in (gate, up))
    mixed = product(jax.nn.silu(opened) * wide, down)
    mixed = mixed[jnp.argsort(order)].reshape(*experts.shape, -1)
    total = jnp.einsum("tk,tkh->th", weights, mixed.astype(jnp.float32), precision=jax.lax.Precision.HIGHEST)
    if axis is not None:
        total = jax.lax.psum(total, axis)
    return total.astype(gate.dtype).reshape(x.shape)
