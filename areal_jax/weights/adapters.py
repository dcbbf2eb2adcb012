"""Pushes adapters alone: the frozen rest of the policy went to the sampler once.

Invariants:
* An update's parameters are the whole policy's tree, of which the frozen leaves are the same arrays in every update.
* What is pushed goes the way of ``weights.push``: device to device, new and ready arrays.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from jax.sharding import Mesh

from areal_jax.models.adapters import join, split
from areal_jax.models.architecture import ModelConfig
from areal_jax.models.sharding import param_specs
from areal_jax.types import WeightUpdate
from areal_jax.weights.push import WeightPusher


class AdapterPusher:
    """A ``WeightPusher`` of a policy with adapters.

    Args:
      trainer_mesh, sampler_mesh, dtype: as there.
      model: the architecture, with ``lora``.
      frozen: the parameters that are not trained, on the trainer's mesh; pushed now and held on the sampler's.
    """

    def __init__(self, trainer_mesh: Mesh, sampler_mesh: Mesh, model: ModelConfig, frozen: Any, dtype: Any = None):
        adapters, rest = split(model, param_specs(model))
        self._frozen = WeightPusher(trainer_mesh, sampler_mesh, rest, dtype).push(frozen, 0).params
        self._pusher = WeightPusher(trainer_mesh, sampler_mesh, adapters, dtype)

    def push(self, params: Any, version: int) -> WeightUpdate:
        """Copies the adapters ``params`` to the sampler's mesh; see ``WeightPusher.push``. Seconds and bytes are theirs alone."""
        update = self._pusher.push(params, version)
        return dataclasses.replace(update, params=join(update.params, self._frozen))
