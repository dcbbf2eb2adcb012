"""Bytes of one device, part by part, from shapes and shardings alone.

Invariants:
* What lies on a device between programs (parameters, moments, gradients, caches) is exact: it is the trees' own shards.
* What a program needs while it runs comes from ``activations`` and, of the sampler, from here; tests compare it with the compiled program's own figures.
* A role's need is its fullest moment: everything that lies there plus the largest program's working memory.
"""

from __future__ import annotations

import bisect
import dataclasses
import functools

import jax

from areal_jax.models.adapters import split
from areal_jax.models.architecture import ModelConfig
from areal_jax.models.work import matrices
from areal_jax.planner.activations import activation_parts
from areal_jax.planner.counts import batch_of, item, kv_bytes_per_token, kv_parts
from areal_jax.planner.hardware import Chip
from areal_jax.planner.setup import Axes, Setup, shard_bytes, sharded_params, train_state, with_meshes
from areal_jax.trainer.objective import in_loss, needs_reference
from areal_jax.trainer.versions import earlier_versions

MICRO_BATCH_ARRAYS = 10
"""Of 4 bytes a position: a micro-batch's nine, and the proximal log-probs; with ``rollout.exact_logprobs`` also what the sampler said, with a KL in the loss
the reference's."""

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
        **({"reference policy": params} if needs_reference(setup.config.algorithm) and not setup.model.lora else {}),
        "optimizer": shard_bytes(state.opt_state),
        "gradients": shard_bytes(state.params, "float32"),
        "batch": batch_of(setup).positions // (setup.trainer.shards * setup.trainer.context) * 4 * batch_arrays(setup),
    }
    working, update = activation_parts(setup), UPDATE * staying["gradients"]
    return Memory(staying, working if sum(working.values()) >= update else {"mean gradient and AdamW's direction": update})


def batch_arrays(setup: Setup) -> int:
    """Arrays of 4 bytes a position that a micro-batch consists of."""
    return MICRO_BATCH_ARRAYS + setup.config.rollout.exact_logprobs + in_loss(setup.config.algorithm)


def accumulate_bytes(setup: Setup, widened: bool | None = None) -> int:
    """What the program that accumulates one micro-batch's gradient holds: its arguments, results and working memory (``widened``: see ``activations``)."""
    staying = trainer_memory(setup).staying
    batch = setup.local_tokens * 4 * batch_arrays(setup)
    return staying["parameters"] + staying.get("frozen parameters", 0) + staying["gradients"] + batch + sum(activation_parts(setup, widened).values())


def apply_bytes(memory: Memory) -> int:
    """What the update holds, which overwrites the state that it gets."""
    return sum(memory.staying[name] for name in ("parameters", "optimizer", "gradients")) + UPDATE * memory.staying["gradients"]


def sampler_memory(setup: Setup) -> Memory:
    """Of a device of one replica of the sampler: it decodes or prefills, new weights arrive, and an evaluation's cache lies beside the rollout's."""
    axes, dtype = setup.replica, setup.config.model.sampler_dtype
    cache = setup.pages * page_bytes(setup, axes)
    staying = {
        "weights": sampler_weights(setup.model, axes, dtype),
        "arriving weights": pushed_bytes(setup.model, axes, dtype),
        "KV cache": cache,
        "evaluation's KV cache": cache,
    }
    working = {"decode": decode_working(setup), "prefill": prefill_working(setup)}
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


def page_bytes(setup: Setup, axes: Axes) -> int:
    """A device's part of one page of the cache."""
    return setup.config.rollout.page_size * kv_bytes_per_token(setup.model) // kv_parts(setup.model, axes)


def decode_working(setup: Setup, widened: bool | None = None) -> int:
    """Of decoding all slots of a replica: the logits and the weights of a draw over the vocabulary, float32, or one block forward.

    Args:
      setup: what is planned.
      widened: for a compiler that computes bfloat16 products in float32, of copies of the cache and of all matrices that it makes before the first
        step; None: where the topology's does.
    """
    r, m, axes, w = setup.config.rollout, setup.model, setup.replica, matrices(setup.model)
    widens = _widens(setup, widened)
    logits = setup.slots * m.vocab_size // axes.tensor * 4
    draw = (3 if 0 < r.top_k < m.vocab_size or r.top_p < 1.0 else 2) * logits  # a filter holds what it weighed beside what it kept
    working = max(draw, setup.slots * block_bytes(m, axes, m.layers - 1, widens))
    if widens:
        working += setup.pages * _widened_page(setup) + 4 * (m.layers * (w.block + w.adapters) + w.head) // (axes.tensor * axes.fsdp)
    return working


def prefill_working(setup: Setup, widened: bool | None = None) -> int:
    """Of one chunk of prefill: one block forward, of the last nothing but its keys and values; ``widened``: see ``decode_working``."""
    m, widens = setup.model, _widens(setup, widened)
    working = setup.config.rollout.prefill_chunk * block_bytes(m, setup.replica, max(0, m.layers - 2), widens)
    return working + (setup.pages * _widened_page(setup) * (m.layers - 1) // m.layers if widens else 0)


def _widens(setup: Setup, widened: bool | None) -> bool:
    return item(setup.model.dtype) < 4 and (setup.topology.chip.name == "cpu" if widened is None else widened)


def _widened_page(setup: Setup) -> int:
    """A page in float32."""
    return page_bytes(setup, setup.replica) // item(setup.model.dtype) * 4


def block_bytes(m: ModelConfig, axes: Axes, attended: int, widened: bool) -> int:
    """Of a sampler's token while one block goes forward: gate, up, their product, with fsdp a partial sum of one; the residual; attention's results.

    Args:
      m: the policy.
      axes: of a replica.
      attended: blocks whose attention's results have their place from the beginning on.
      widened: gate and up are float32.
    """
    mlp, c = m.expert_mlp_size * m.experts_per_token if m.experts else m.mlp_size, item(m.dtype)
    wide = mlp * ((2 * 4 if widened else 2 * c) + c + (c if axes.fsdp > 1 else 0))
    return (wide + attended * m.heads * m.head_dim * c) // axes.tensor + m.hidden_size // axes.fsdp * c


def slots_that_fit(setup: Setup) -> int:
    """The most slots a replica for which the sampler fits with the pages that the configuration says."""
    usable, replicas = setup.topology.chip.usable, setup.sampler.data
    each = decode_working(with_meshes(setup, slots=2 * replicas)) - decode_working(with_meshes(setup, slots=replicas))
    if not setup.config.rollout.kv_pages:
        each += 2 * setup.sequence_pages * page_bytes(setup, setup.replica)
    most = usable // max(1, each)
    return bisect.bisect_right(range(1, most + 1), usable, key=lambda slots: sampler_memory(with_meshes(setup, slots=slots * replicas)).total)


def pages_that_fit(setup: Setup) -> int:
    """The most pages a replica for which the sampler fits with its slots; 0 or less where not even one does."""
    now = sampler_memory(setup)
    each = 2 * page_bytes(setup, setup.replica) + (_widened_page(setup) if _widens(setup, None) else 0)
    return setup.pages + now.room(setup.topology.chip) // each


def param_count(setup: Setup) -> int:
    """Parameters of the policy."""
    return sum(leaf.size for leaf in jax.tree.leaves(sharded_params(setup.model, Axes().mesh())))
