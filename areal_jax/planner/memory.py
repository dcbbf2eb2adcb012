"""Bytes of one device, part by part, from shapes and shardings alone.

Invariants:
* What lies on a device between programs (parameters, moments, gradients, caches) is exact: it is the trees' own shards.
* What a program needs while it runs comes from ``activations`` and is compared with the compiled program's own figures in tests.
* A role's need is its fullest moment: everything that lies there plus the largest program's working memory.
"""

from __future__ import annotations

import dataclasses

import jax

from areal_jax.planner.activations import activation_parts
from areal_jax.planner.hardware import Chip
from areal_jax.planner.setup import Axes, Setup, shard_bytes, sharded_params, train_state
from areal_jax.planner.work import batch_of, item, kv_bytes_per_token, kv_parts

MICRO_BATCH_ARRAYS = 9
"""Of 4 bytes a position: a micro-batch's eight, and the proximal log-probs."""


@dataclasses.dataclass(frozen=True)
class Memory:
    """Parts of one device's memory, in bytes, those that stay and those of the fullest program."""

    staying: dict[str, int]
    working: dict[str, int]

    @property
    def total(self) -> int:
        return sum(self.staying.values()) + sum(self.working.values())

    def room(self, chip: Chip) -> int:
        """Bytes that are left on a chip; negative where it does not fit."""
        return chip.usable - self.total


def trainer_memory(setup: Setup) -> Memory:
    """Of the trainer, while it accumulates a micro-batch's gradient."""
    _, _, state, frozen = train_state(setup, setup.trainer.mesh())
    params = shard_bytes(state.params)
    staying = {
        "parameters": params,
        **({"frozen parameters": shard_bytes(frozen)} if setup.model.lora else {}),
        "optimizer": shard_bytes(state.opt_state),
        "gradients": shard_bytes(state.params, "float32"),
        "batch": batch_of(setup).positions // (setup.trainer.shards * setup.trainer.context) * 4 * MICRO_BATCH_ARRAYS,
    }
    return Memory(staying, activation_parts(setup))


def accumulate_bytes(setup: Setup, widened: bool | None = None) -> int:
    """What the program that accumulates one micro-batch's gradient holds: its arguments, results and working memory (``widened``: see ``activations``)."""
    staying = trainer_memory(setup).staying
    batch = setup.local_tokens * 4 * MICRO_BATCH_ARRAYS
    return staying["parameters"] + staying.get("frozen parameters", 0) + staying["gradients"] + batch + sum(activation_parts(setup, widened).values())


def sampler_memory(setup: Setup) -> Memory:
    """Of the sampler, while it decodes, new weights arrive, and an evaluation's decode state lies beside the rollout's."""
    axes, dtype = setup.sampler, setup.config.model.sampler_dtype
    weights = shard_bytes(sharded_params(setup.model, axes.mesh()), dtype)
    cache = setup.slots * slot_bytes(setup, axes)
    staying = {"weights": weights, "arriving weights": weights, "KV cache": cache, "evaluation's KV cache": cache}
    return Memory(staying, {"decode": decode_working(setup, axes)})


def slot_bytes(setup: Setup, axes: Axes) -> int:
    """A device's part of one slot's cache."""
    return setup.longest * kv_bytes_per_token(setup.model) // kv_parts(setup.model, axes)


def decode_working(setup: Setup, axes: Axes) -> int:
    """Logits and the weights of the draw over the vocabulary, float32, and one layer's scores."""
    m = setup.model
    logits = setup.slots * m.vocab_size * 4
    scores = setup.slots * m.heads // axes.tensor * setup.longest * (4 + item(m.dtype))
    return 3 * logits + scores


def slots_that_fit(setup: Setup) -> int:
    """The most slots a shard for which the sampler fits."""
    memory = sampler_memory(setup)
    a_slot = (memory.total - memory.staying["weights"] - memory.staying["arriving weights"]) / setup.slots
    room = setup.topology.chip.usable - memory.staying["weights"] - memory.staying["arriving weights"]
    return max(0, int(room // a_slot))


def param_count(setup: Setup) -> int:
    """Parameters of the policy."""
    return sum(leaf.size for leaf in jax.tree.leaves(sharded_params(setup.model, Axes().mesh())))
