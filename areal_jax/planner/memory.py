"""Bytes of one device, part by part, from shapes and shardings alone.

Invariants:
* What lies on a device between programs (parameters, moments, gradients, caches) is exact: it is the trees' own shards.
* What a program needs while it runs comes from ``activations`` and is compared with the compiled program's own figures in tests.
* A role's need is its fullest moment: everything that lies there plus the largest program's working memory.
"""

from __future__ import annotations

import bisect
import dataclasses
import functools

import jax

from areal_jax.models.adapters import split
from areal_jax.models.architecture import ModelConfig
from areal_jax.planner.activations import activation_parts
from areal_jax.planner.counts import batch_of, item, kv_bytes_per_token, kv_parts, prefill_rows, prefill_widths
from areal_jax.planner.hardware import Chip
from areal_jax.planner.setup import Axes, Setup, shard_bytes, sharded_params, train_state
from areal_jax.sampler.caches import together
from areal_jax.trainer.versions import earlier_versions

MICRO_BATCH_ARRAYS = 9
"""Of 4 bytes a position: a micro-batch's eight, and the proximal log-probs; with ``rollout.exact_logprobs`` also what the sampler said."""

UPDATE = 3
"""Trees of gradients' size that the update holds beside the state: the mean gradient and what AdamW makes of it."""


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
    """Of the trainer, while it accumulates a micro-batch's gradient or, where that needs more, updates."""
    _, _, state, frozen = train_state(setup, setup.trainer.mesh())
    params = shard_bytes(state.params)
    staying = {
        "parameters": params,
        **({"frozen parameters": shard_bytes(frozen)} if setup.model.lora else {}),
        **({f"parameters of {earlier} earlier versions": earlier * params} if (earlier := earlier_versions(setup.config)) else {}),
        "optimizer": shard_bytes(state.opt_state),
        "gradients": shard_bytes(state.params, "float32"),
        "batch": batch_of(setup).positions // (setup.trainer.shards * setup.trainer.context) * 4 * batch_arrays(setup),
    }
    working, update = activation_parts(setup), UPDATE * staying["gradients"]
    return Memory(staying, working if sum(working.values()) >= update else {"mean gradient and AdamW's direction": update})


def batch_arrays(setup: Setup) -> int:
    """Arrays of 4 bytes a position that a micro-batch consists of."""
    return MICRO_BATCH_ARRAYS + setup.config.rollout.exact_logprobs


def accumulate_bytes(setup: Setup, widened: bool | None = None) -> int:
    """What the program that accumulates one micro-batch's gradient holds: its arguments, results and working memory (``widened``: see ``activations``)."""
    staying = trainer_memory(setup).staying
    batch = setup.local_tokens * 4 * batch_arrays(setup)
    return staying["parameters"] + staying.get("frozen parameters", 0) + staying["gradients"] + batch + sum(activation_parts(setup, widened).values())


def apply_bytes(memory: Memory) -> int:
    """What the update holds, which overwrites the state that it gets."""
    return sum(memory.staying[name] for name in ("parameters", "optimizer", "gradients")) + UPDATE * memory.staying["gradients"]


def sampler_memory(setup: Setup, slots: int | None = None) -> Memory:
    """Of the sampler while it decodes, prefills or rebuilds caches, new weights arrive, and an evaluation's decode state lies beside the rollout's.

    Args:
      setup: what is planned.
      slots: a shard's; None: the configured ones.
    """
    axes, dtype, slots = setup.sampler, setup.config.model.sampler_dtype, slots or setup.slots
    weights = sampler_weights(setup.model, axes, dtype)
    cache = slots * slot_bytes(setup, axes)
    staying = {"weights": weights, "arriving weights": pushed_bytes(setup.model, axes, dtype), "KV cache": cache, "evaluation's KV cache": cache}
    working = {"decode": decode_working(setup, axes, slots), "prompts and partials prefilled": enter_working(setup, axes)}
    if setup.config.rollout.kv_on_update == "recompute":
        working["caches rebuilt after an update"] = rebuild_working(setup, axes, slots)
    largest = max(working, key=lambda name: working[name])
    return Memory(staying, {largest: working[largest]})


@functools.cache
def sampler_weights(model: ModelConfig, axes: Axes, dtype: str) -> int:
    """Parameters of a sampler's device."""
    return shard_bytes(sharded_params(model, axes.mesh()), dtype)


@functools.cache
def pushed_bytes(model: ModelConfig, axes: Axes, dtype: str) -> int:
    """What a push brings to a sampler's device: its parameters, or its adapters where only they are trained."""
    return shard_bytes(split(model, sharded_params(model, axes.mesh()))[0], dtype)


def slot_bytes(setup: Setup, axes: Axes) -> int:
    """A device's part of one slot's cache."""
    return setup.longest * kv_bytes_per_token(setup.model) // kv_parts(setup.model, axes)


def decode_working(setup: Setup, axes: Axes, slots: int) -> int:
    """Logits and the weights of the draw over the vocabulary, float32, and one layer's scores."""
    m = setup.model
    logits = slots * m.vocab_size * 4
    scores = slots * m.heads // axes.tensor * setup.longest * (4 + item(m.dtype))
    return 3 * logits + scores


def rebuild_working(setup: Setup, axes: Axes, slots: int) -> int:
    """One rebuild at the longest width: new keys and values of all layers, and one block forward."""
    tokens = setup.longest * max(1, min(slots // 4, together(setup.longest)))
    return tokens * (kv_bytes_per_token(setup.model) // kv_parts(setup.model, axes) + block_bytes(setup.model, axes))


def enter_working(setup: Setup, axes: Axes) -> int:
    """One prefill at the width that needs most: the block forward, then copies of the new keys and values for the slots that share them.

    Every shard computes all sequences where their number does not divide among the shards; where it does, each copy is summed up from all shards.
    """
    r, kv = setup.config.rollout, kv_bytes_per_token(setup.model) // kv_parts(setup.model, axes)

    def working(width: int) -> int:
        rows, own = prefill_rows(setup, axes, width)
        copies = min(rows * r.group_size, together(width)) * (1 if own == rows else 2)
        return width * (own * kv + max(own * block_bytes(setup.model, axes), copies * kv))

    return max(map(working, prefill_widths(setup)))


def block_bytes(m: ModelConfig, axes: Axes) -> int:
    """Of a token while one block goes forward: gate, up, their product; residual, norm, q and sums."""
    mlp = m.expert_mlp_size * m.experts_per_token if m.experts else m.mlp_size
    return ((3 * mlp + 2 * m.heads * m.head_dim) // axes.tensor + 4 * m.hidden_size) * item(m.dtype)


def slots_that_fit(setup: Setup) -> int:
    """The most slots a shard for which the sampler fits."""
    usable = setup.topology.chip.usable
    most = usable // (2 * slot_bytes(setup, setup.sampler))
    return bisect.bisect_right(range(1, most + 1), usable, key=lambda slots: sampler_memory(setup, slots).total)


def param_count(setup: Setup) -> int:
    """Parameters of the policy."""
    return sum(leaf.size for leaf in jax.tree.leaves(sharded_params(setup.model, Axes().mesh())))
