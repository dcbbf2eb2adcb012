"""The train state, its shardings and the optimizer update, shared by the warm-up and reinforcement learning.

Invariants:
* Parameters lie as ``models.sharding`` says, optimizer moments and gradients like their parameters, counters everywhere.
* Accumulated gradients and moments are float32 whatever the parameters' type. A micro-batch's own gradients of kernels are of the compute type, and
  are summed over data, fsdp and context in it, before they are added.
* A gradient that is not finite changes nothing but the count of skipped updates.
* With adapters the state holds them alone, in float32; the frozen rest lies beside it, in a type of its own, and no program changes or donates it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import struct
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from areal_jax.models.adapters import fingerprint, join, split
from areal_jax.models.architecture import ModelConfig
from areal_jax.models.policy import param_shapes
from areal_jax.models.sharding import logical_to_mesh, named_shardings, param_specs
from areal_jax.trainer.checkpoint import CheckpointError


@struct.dataclass
class TrainState:
    """All that a training step changes.

    Attributes:
      params: nested dict of the arrays that are trained.
      opt_state: of ``optimizer``.
      step: int32 [], training steps done; with reinforcement learning the policy version.
      skipped: int32 [], updates left out in a row because their gradient was not finite.
    """

    params: Any
    opt_state: Any
    step: Any
    skipped: Any


@dataclasses.dataclass(frozen=True)
class Placement:
    """Where a trainer's arrays lie.

    Attributes:
      state: ``TrainState`` of shardings.
      frozen: tree of the shardings of the parameters that are not trained; empty without adapters.
      rows: of a micro-batch's arrays [rows, length]: rows over the data-parallel axes, positions over context.
      scalar: replicated.
      shards: number of data-parallel shards.
      mesh: the trainer's.
    """

    state: TrainState
    frozen: Any
    rows: NamedSharding
    scalar: NamedSharding
    shards: int
    mesh: Mesh


MUON_RMS = 0.2
"""Root mean square of an update of Muon at learning rate 1: about AdamW's."""


class NonFiniteError(RuntimeError):
    """Too many updates in a row had a gradient that is not finite."""


def float32(tree: Any) -> Any:
    """The tree with float32 leaves."""
    return jax.tree.map(lambda leaf: leaf.astype(jnp.float32), tree)


def make_optimizer(section: Any) -> optax.GradientTransformation:
    """The optimizer's direction, before the learning rate, from the ``trainer`` or ``sft`` section of a configuration: AdamW (arXiv 1711.05101) or Muon."""
    if getattr(section, "optimizer", "adamw") == "muon":
        return _muon(section)
    return optax.chain(
        optax.scale_by_adam(b1=section.adam_b1, b2=section.adam_b2, eps=getattr(section, "adam_epsilon", 1e-8)),
        optax.add_decayed_weights(section.weight_decay),
    )


def _muon(section: Any) -> optax.GradientTransformation:
    """Muon for the matrices of the blocks, scaled as arXiv 2502.16982 does so that AdamW's learning rates fit; AdamW with Nesterov's momentum for the rest."""

    def matrices(params: Any) -> Any:
        def dimensions(path: tuple[Any, ...], leaf: Any) -> Any:
            matrix = path[0].key == "layers" and leaf.ndim >= 2
            return optax.contrib.MuonDimensionNumbers(leaf.ndim - 2, leaf.ndim - 1) if matrix else None

        return jax.tree_util.tree_map_with_path(dimensions, params)

    muon = optax.contrib.muon(
        learning_rate=1.0,
        beta=section.muon_beta,
        weight_decay=section.weight_decay,
        adam_b1=section.adam_b1,
        adam_b2=section.adam_b2,
        adam_weight_decay=section.weight_decay,
        muon_weight_dimension_numbers=matrices,
        consistent_rms=MUON_RMS,
    )
    return optax.chain(muon, optax.scale(-1.0))


def make_schedule(section: Any) -> optax.Schedule:
    """The learning rate of a training step (from 0): linear warm-up, then constant, or a cosine or a line to 0 at ``trainer.steps``."""
    rate, warm, length = section.learning_rate, section.warmup_steps, max(1, section.steps - section.warmup_steps)
    after = {
        "constant": lambda: optax.constant_schedule(rate),
        "cosine": lambda: optax.cosine_decay_schedule(rate, length),
        "linear": lambda: optax.linear_schedule(rate, 0.0, length),
    }[section.schedule]()
    rising = optax.linear_schedule(rate / max(1, warm), rate, max(1, warm - 1))
    return optax.join_schedules([rising, after], [warm]) if warm else after


def new_state(optimizer: optax.GradientTransformation, params: Any) -> TrainState:
    """The state before the first step."""
    return TrainState(params=params, opt_state=optimizer.init(float32(params)), step=jnp.zeros((), jnp.int32), skipped=jnp.zeros((), jnp.int32))


def abstract_parts(model: ModelConfig, optimizer: optax.GradientTransformation, param_dtype: str) -> tuple[TrainState, Any]:
    """(state, frozen parameters) of ``jax.ShapeDtypeStruct``; ``param_dtype`` is the type of the whole policy, or of what is frozen in it."""

    def typed(tree: Any, dtype: str) -> Any:
        return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, dtype), tree)

    trained, frozen = split(model, param_shapes(model))
    state = jax.eval_shape(lambda p: new_state(optimizer, p), typed(trained, "float32" if model.lora else param_dtype))
    return state, typed(frozen, param_dtype)


def place(model: ModelConfig, mesh: Mesh, optimizer: optax.GradientTransformation, param_dtype: str) -> Placement:
    """The shardings of a trainer's arrays."""
    state, frozen = abstract_parts(model, optimizer, param_dtype)
    specs = split(model, param_specs(model))
    scalar = NamedSharding(mesh, P())
    of_params, of_frozen = named_shardings(mesh, specs[0], state.params), named_shardings(mesh, specs[1], frozen)

    def absent(leaf: Any) -> bool:
        return isinstance(leaf, optax.MaskedNode)

    of_optimizer = optax.tree_map_params(
        optimizer,
        lambda leaf, sharding: leaf if absent(leaf) else sharding,
        state.opt_state,
        of_params,
        transform_non_params=lambda _: scalar,
        is_leaf=absent,
    )
    placed = TrainState(params=of_params, opt_state=of_optimizer, step=scalar, skipped=scalar)
    return Placement(placed, of_frozen, NamedSharding(mesh, logical_to_mesh("batch", "length")), scalar, mesh.shape["data"] * mesh.shape["fsdp"], mesh)


def owned(params: Any, shardings: Any, dtype: Any) -> Any:
    """A copy of the parameters, in place and of the trainer's type, that a later step may overwrite."""
    placed = jax.device_put(params, shardings)
    return jax.jit(lambda tree: jax.tree.map(lambda leaf: jnp.array(leaf, dtype=dtype, copy=True), tree), out_shardings=shardings)(placed)


def abstract(tree: Any, shardings: Any) -> Any:
    """Shapes, types and shardings of a tree, for a compilation or a checkpoint to restore."""
    return jax.tree.map(lambda leaf, sharding: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding), tree, shardings)


class StateHolder:
    """What every trainer offers of its state to checkpoints and to the weight push.

    Attributes:
      state: the train state; a step replaces it and reuses its buffers.
      frozen: the parameters that are not trained; {} without adapters.
      base: a checksum of what never changes (the frozen parameters, a reference policy), to recognise it by; '' without.
      version: training steps done.
    """

    def __init__(self, model: ModelConfig, mesh: Mesh, section: Any, params: Any, param_dtype: str):
        """Copies what is trained of ``params`` into a new state, and puts the rest in place; ``section`` is ``trainer`` or ``sft`` of a configuration."""
        self.model = model
        self.optimizer = make_optimizer(section)
        self.placement = place(model, mesh, self.optimizer, param_dtype)
        trained, frozen = split(model, params)
        own = owned(trained, self.placement.state.params, "float32" if model.lora else param_dtype)
        self.state: TrainState = jax.jit(lambda p: new_state(self.optimizer, p), out_shardings=self.placement.state, donate_argnums=0)(own)
        self.frozen = jax.tree.map(lambda leaf, sharding: jax.device_put(leaf, sharding).astype(param_dtype), frozen, self.placement.frozen)
        self.base = fingerprint(self.frozen)
        self.version = 0

    @property
    def params(self) -> Any:
        """The parameters that are trained, until the next step."""
        return self.state.params

    @property
    def policy(self) -> Any:
        """All parameters, until the next step."""
        return join(self.state.params, self.frozen)

    def check_base(self, meta: Mapping[str, Any]) -> None:
        """Refuses the facts of a checkpoint that was trained on, or held to, other weights.

        Raises:
          CheckpointError: the checksums differ.
        """
        if meta.get("base", "") != self.base:
            raise CheckpointError(
                "adapters must go on from the weights they were trained on, and a reference policy must be the one that the run started from "
                f"(checksum {meta.get('base') or 'none'}); 'model.path' or the warm-up gives others ({self.base or 'none'}); "
                "put the first ones back, or take another --workdir"
            )

    def abstract_state(self) -> TrainState:
        """Shapes, types and shardings of the state, for a checkpoint to restore into."""
        return abstract(self.state, self.placement.state)

    def abstract_frozen(self) -> Any:
        """Shapes, types and shardings of what is frozen."""
        return abstract(self.frozen, self.placement.frozen)

    def load_state(self, state: TrainState) -> None:
        """Goes on from a restored state."""
        self.state = jax.device_put(state, self.placement.state)
        self.version = int(jax.device_get(state.step))


def update(
    optimizer: optax.GradientTransformation, state: TrainState, gradients: Any, learning_rate: jax.Array, grad_clip: float
) -> tuple[TrainState, jax.Array, jax.Array]:
    """One optimizer update; ``step`` is left to the caller, as several updates may make one step.

    Args:
      optimizer: from ``make_optimizer``.
      state: before.
      gradients: float32, like the parameters.
      learning_rate: float32 [].
      grad_clip: global norm at which gradients are clipped.

    Returns:
      (state, global norm before clipping [], whether the update was applied [] bool).
    """
    norm = optax.tree.norm(gradients)
    finite = jnp.isfinite(norm)
    scale = jnp.minimum(1.0, grad_clip / jnp.maximum(norm, 1e-12))
    clipped = jax.tree.map(lambda g: jnp.where(finite, g * scale, 0.0), gradients)
    direction, opt_state = optimizer.update(clipped, state.opt_state, float32(state.params))
    params = jax.tree.map(lambda p, d: (p.astype(jnp.float32) - learning_rate * d).astype(p.dtype), state.params, direction)

    def keep(new: Any, old: Any) -> Any:
        return jax.tree.map(lambda a, b: jnp.where(finite, a, b), new, old)

    skipped = jnp.where(finite, 0, state.skipped + 1)
    state = dataclasses.replace(state, params=keep(params, state.params), opt_state=keep(opt_state, state.opt_state), skipped=skipped)
    return state, norm, finite
