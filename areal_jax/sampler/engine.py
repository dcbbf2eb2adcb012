"""The sampler's engine: JetStream's ``Engine`` with weights as an argument of every dispatch.

Invariants:
* Stateless: the decode state goes in and comes out of every call (donated), so several drivers may share one engine's
  compiled programs.
* Shapes come from a declared set: cache lengths ``buckets``, prefill and rebuild widths ``widths``; the driver's ``warm_up`` compiles them all.
* The state's sharding is pinned on the way out; parameters of another sharding, shape or type are refused by
  ``check_params``, never converted.
* Programs are enqueued one at a time (``DISPATCH``), so that all devices of a mesh see the programs of several drivers in one order.
* Beyond JetStream 0.2.2: log-probs of tokens, several steps a dispatch, one prefix into many slots, slots freed
  early, and the cache rebuilt under new weights.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import threading
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from areal_jax.models.architecture import ModelConfig
from areal_jax.models.attention import cached_attention, packed_attention
from areal_jax.models.policy import bind, param_shapes
from areal_jax.models.sharding import logical_to_mesh, named_shardings, param_specs
from areal_jax.sampler import jetstream
from areal_jax.sampler.caches import shared, together, within_shards
from areal_jax.sampler.sampling import request_keys, sample, uniforms
from areal_jax.sampler.state import Chunk, DecodeState, Insertion, Prefix

DISPATCH = threading.Lock()
"""Held while a program is enqueued: programs with collectives must come in one order on all devices."""


class SamplerEngine(jetstream.Engine):
    """A JetStream engine over the policy.

    Args:
      model: architecture.
      mesh: the sampler's mesh; slots are sharded over data and fsdp, heads over tensor.
      slots: sequences decoded together.
      max_length: longest sequence, prompt and response.
      buckets: lengths at which the cache is allocated; those from ``max_length`` on are replaced by it.
      widths: lengths to which sequences are padded when they are prefilled or rebuilt; likewise.
      steps: decode steps of a dispatch (K).
      temperature, top_k, top_p: the sampling distribution.
      seed: the run's seed, for requests that come through JetStream's own interface.
      tokenizer: a ``models.tokenizer.Tokenizer``, for JetStream's own interface; may be None.
      dtype: type of the parameters on the sampler.
      attention: backend of prefills and rebuilds, as for ``packed_attention``.
    """

    def __init__(
        self,
        model: ModelConfig,
        mesh: Mesh,
        *,
        slots: int,
        max_length: int,
        buckets: tuple[int, ...] = (),
        widths: tuple[int, ...] = (),
        steps: int = 8,
        temperature: float = 1.0,
        top_k: int = 0,
        top_p: float = 1.0,
        seed: int = 0,
        tokenizer: Any = None,
        dtype: str = "float32",
        attention: str = "auto",
    ):
        self.model, self._mesh, self.steps, self.seed, self._tokenizer = model, mesh, steps, seed, tokenizer
        self._slots, self.max_length, self._attention = slots, max_length, attention
        self.buckets = (*(b for b in sorted(buckets) if b < max_length), max_length)
        self.widths = (*(w for w in sorted(widths) if w < max_length), max_length)
        self._sampling = (temperature, top_k, top_p)
        self.param_shardings = named_shardings(mesh, param_specs(model), param_shapes(model))
        self.param_dtype = jnp.dtype(dtype)
        slot_axes = logical_to_mesh("slots")[0]
        self.shards = math.prod(mesh.shape[axis] for axis in slot_axes)
        tensor = "tensor" if model.kv_heads % mesh.shape["tensor"] == 0 else None
        self._replicated = NamedSharding(mesh, P())
        by_slot = NamedSharding(mesh, P(slot_axes))
        cache = tuple(NamedSharding(mesh, P(slot_axes, tensor, None, None)) for _ in range(model.layers))
        self.state_shardings = DecodeState(cache, cache, by_slot, by_slot, by_slot, by_slot, by_slot, NamedSharding(mesh, P(slot_axes, None)))
        state, copy, params = self.state_shardings, self._replicated, self.param_shardings
        self._generate_k = {
            k: jax.jit(functools.partial(self._generate_body, steps=k), donate_argnums=1, in_shardings=(params, state), out_shardings=(state, copy))
            for k in {1, steps}
        }
        self._new = jax.jit(
            lambda length: jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), self.abstract_state(length)), static_argnums=0, out_shardings=state
        )
        self._enter = jax.jit(self._enter_body, donate_argnums=1, in_shardings=(params, state, copy, copy, copy), out_shardings=state)
        self._rebuild = jax.jit(self._rebuild_body, donate_argnums=1, in_shardings=(params, state, by_slot, by_slot), out_shardings=state)
        self._resize = jax.jit(self._resize_body, static_argnums=1, out_shardings=state)
        self._free = jax.jit(self._free_body, donate_argnums=0, in_shardings=(state, copy), out_shardings=state)
        self._prefill_one = jax.jit(self._prefill_one_body, in_shardings=(params, copy, copy), out_shardings=copy)
        self._insert_one = jax.jit(self._insert_one_body, donate_argnums=0, in_shardings=(state, copy, copy), out_shardings=state)

    # What the driver calls.

    def new_state(self, length: int | None = None) -> DecodeState:
        """An empty decode state with a cache of ``length`` (the shortest bucket if None), made where it lies."""
        return self._new(length or self.buckets[0])

    def abstract_state(self, length: int) -> DecodeState:
        """Shapes, types and shardings of a decode state with a cache of ``length``."""
        m, s = self.model, self._slots

        def array(dtype: Any, *shape: int) -> jax.ShapeDtypeStruct:
            return jax.ShapeDtypeStruct((s, *shape), dtype)

        state = DecodeState(
            keys=(array(m.dtype, m.kv_heads, m.head_dim, length),) * m.layers,
            values=(array(m.dtype, m.kv_heads, length, m.head_dim),) * m.layers,
            tokens=array(jnp.int32),
            positions=array(jnp.int32),
            counts=array(jnp.int32),
            limits=array(jnp.int32),
            live=array(jnp.bool_),
            request_keys=array(jnp.uint32, 2),
        )
        return jax.tree.map(lambda leaf, sharding: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding), state, self.state_shardings)

    def abstract_params(self) -> Any:
        """Shapes, types and shardings of the parameters."""
        return jax.tree.map(
            lambda leaf, sharding: jax.ShapeDtypeStruct(leaf.shape, self.param_dtype, sharding=sharding), param_shapes(self.model), self.param_shardings
        )

    def lower_generate(self, length: int) -> jax.stages.Lowered:
        """The program of ``generate_chunk`` for a cache of ``length``, from shapes alone."""
        return self._generate_k[self.steps].lower(self.abstract_params(), self.abstract_state(length))

    def check_params(self, params: Any) -> None:
        """Refuses parameters that the programs would have to convert, move or be compiled anew for.

        Raises:
          ValueError: naming the first parameter that differs, and how.
        """
        shapes = param_shapes(self.model)
        if jax.tree.structure(params) != jax.tree.structure(shapes):
            raise ValueError("the sampler's parameters must be the policy's tree; names are missing or too many; take the tree of init_params")

        def check(path: tuple[Any, ...], leaf: Any, shape: jax.ShapeDtypeStruct, sharding: NamedSharding) -> None:
            name = "/".join(str(part.key) for part in path)
            if not isinstance(leaf, jax.Array) or leaf.shape != shape.shape or leaf.dtype != self.param_dtype:
                kind = f"{leaf.dtype}{list(leaf.shape)}" if isinstance(leaf, jax.Array) else type(leaf).__name__
                raise ValueError(f"'{name}' must be a device array {self.param_dtype}{list(shape.shape)}; got {kind}; pass it through load_params or a push")
            if not leaf.sharding.is_equivalent_to(sharding, leaf.ndim):
                raise ValueError(f"'{name}' must lie on the sampler's mesh as {sharding}; got {leaf.sharding}; pass it through load_params or a push")

        jax.tree_util.tree_map_with_path(check, params, shapes, self.param_shardings)

    def bucket(self, length: int) -> int:
        """The shortest cache length that holds ``length``."""
        return next((b for b in self.buckets if b >= length), self.buckets[-1])

    def width(self, length: int) -> int:
        """The shortest prefill width that holds ``length``."""
        return next((w for w in self.widths if w >= length), self.widths[-1])

    def rebuild_rows(self, width: int) -> int:
        """Sequences of a rebuild at a width: a quarter of the slots, fewer where they are long, as many of each shard."""
        return self.shards * max(1, min(self._slots // self.shards // 4, together(width)))

    def enter_shape(self, width: int, groups: int, group_size: int) -> tuple[int, int]:
        """(sequences, requests) of one ``enter`` at a width: ``groups`` sequences, fewer where they are long, with ``group_size`` requests over each."""
        rows = min(groups, together(width))
        return rows, rows * group_size

    def lower_enter(self, width: int, length: int, groups: int, group_size: int) -> jax.stages.Lowered:
        """The program of ``enter`` at a width for a cache of ``length``, from shapes alone."""
        rows, entries = self.enter_shape(width, groups, group_size)
        insertion = Insertion(*(jax.ShapeDtypeStruct((entries,), jnp.int32) for _ in range(8)))
        sequences, seed = jax.ShapeDtypeStruct((rows, width), jnp.int32), jax.ShapeDtypeStruct((), jnp.uint32)
        return self._enter.lower(self.abstract_params(), self.abstract_state(length), sequences, insertion, seed)

    def lower_rebuild(self, width: int, length: int) -> jax.stages.Lowered:
        """The program of ``rebuild`` at a width for a cache of ``length``, from shapes alone."""
        rows, by_slot = self.rebuild_rows(width), self.state_shardings.positions
        sequences, slots = (jax.ShapeDtypeStruct(shape, jnp.int32, sharding=by_slot) for shape in ((rows, width), (rows,)))
        return self._rebuild.lower(self.abstract_params(), self.abstract_state(length), sequences, slots)

    def generate_chunk(self, params: Any, state: DecodeState) -> tuple[DecodeState, Chunk]:
        """Up to K decode steps; ends early when no slot is live."""
        with DISPATCH:
            return self._generate_k[self.steps](params, state)

    def enter(self, params: Any, state: DecodeState, sequences: np.ndarray, insertion: Insertion, seed: int) -> DecodeState:
        """Prefills int32 sequences [rows, length] and puts requests over them into slots (one prefix into many slots)."""
        with DISPATCH:
            return self._enter(params, state, sequences, insertion, np.uint32(seed))

    def rebuild(self, params: Any, state: DecodeState, sequences: np.ndarray, slots: np.ndarray) -> DecodeState:
        """The state with the cache of some slots recomputed under ``params``.

        Args:
          sequences: int32 [``rebuild_rows(width)``, width], their tokens so far; equal parts of the rows for each shard of the slots, in order.
          slots: int32 [``rebuild_rows(width)``], numbers within the row's own shard; rows out of range are not used.
        """
        with DISPATCH:
            return self._rebuild(params, state, sequences, slots)

    def resize(self, state: DecodeState, length: int) -> DecodeState:
        """The state with a cache of another length."""
        if state.length == length:
            return state
        with DISPATCH:
            return self._resize(state, length)

    def free_resource(self, state: DecodeState, slots: np.ndarray) -> DecodeState:
        """The state with slots marked by bool [slots] not live any more."""
        with DISPATCH:
            return self._free(state, slots)

    # The programs.

    def _generate_body(self, params: Any, state: DecodeState, *, steps: int) -> tuple[DecodeState, Chunk]:
        policy = bind(self.model, params)
        slots = jnp.arange(state.slots)
        eos = jnp.asarray(self.model.eos_ids)
        temperature, top_k, top_p = self._sampling

        def decode(carry: tuple[Any, ...]) -> tuple[Any, ...]:
            step, state, tokens, bits, valid = carry
            keys, values = list(state.keys), list(state.values)

            def attend(layer: int, query: jax.Array, key: jax.Array, value: jax.Array) -> jax.Array:
                keys[layer] = keys[layer].at[slots, :, :, state.positions].set(key)
                values[layer] = values[layer].at[slots, :, state.positions].set(value)
                return cached_attention(query, keys[layer], values[layer], state.positions)

            logits = policy.logits(policy.hidden(state.tokens, state.positions, attend, self._mesh))
            token, logprob = sample(logits, uniforms(state.request_keys, state.counts), temperature, top_k, top_p)
            live = state.live
            counts = state.counts + live
            ended = jnp.any(token[:, None] == eos[None, :], -1) | (counts >= state.limits)
            state = dataclasses.replace(
                state,
                keys=tuple(keys),
                values=tuple(values),
                tokens=jnp.where(live, token, state.tokens),
                positions=jnp.minimum(state.positions + live, state.length - 1),
                counts=counts,
                live=live & ~ended,
            )
            column = (slots, jnp.full_like(slots, step))
            tokens = tokens.at[column].set(jnp.where(live, token, self.model.pad_id))
            bits = bits.at[column].set(jax.lax.bitcast_convert_type(jnp.where(live, logprob, 0.0), jnp.int32))
            return step + 1, state, tokens, bits, valid + live

        empty = jnp.zeros((state.slots, steps), jnp.int32)
        carry = (jnp.int32(0), state, empty, empty, jnp.zeros(state.slots, jnp.int32))
        _, state, tokens, bits, valid = jax.lax.while_loop(lambda c: (c[0] < steps) & jnp.any(c[1].live), decode, carry)
        return state, Chunk(jnp.concatenate([tokens, bits, valid[:, None], state.live[:, None].astype(jnp.int32)], 1))

    def _caches(self, params: Any, sequences: jax.Array) -> tuple[list[jax.Array], list[jax.Array]]:
        """Keys and values of whole sequences [rows, length], in the cache's layout."""
        policy = bind(self.model, params)
        keys, values = [], []
        segments = jnp.ones_like(sequences)

        def attend(_: int, query: jax.Array, key: jax.Array, value: jax.Array) -> jax.Array:
            keys.append(key.transpose(0, 2, 3, 1))
            values.append(value.transpose(0, 2, 1, 3))
            return packed_attention(query, key, value, segments, self._attention, self._mesh)

        policy.hidden(sequences, jnp.broadcast_to(jnp.arange(sequences.shape[1]), sequences.shape), attend, self._mesh)
        return keys, values

    def _enter_body(self, params: Any, state: DecodeState, sequences: jax.Array, new: Insertion, seed: jax.Array) -> DecodeState:
        return dataclasses.replace(
            shared(state, *self._caches(params, sequences), new),
            tokens=state.tokens.at[new.slots].set(new.last_tokens, mode="drop"),
            positions=state.positions.at[new.slots].set(new.positions, mode="drop"),
            counts=state.counts.at[new.slots].set(new.counts, mode="drop"),
            limits=state.limits.at[new.slots].set(new.limits, mode="drop"),
            live=state.live.at[new.slots].set(True, mode="drop"),
            request_keys=state.request_keys.at[new.slots].set(request_keys(seed, new.group_ids, new.sample_indices), mode="drop"),
        )

    def _rebuild_body(self, params: Any, state: DecodeState, sequences: jax.Array, slots: jax.Array) -> DecodeState:
        return within_shards(state, *self._caches(params, sequences), slots, self.shards)

    def _resize_body(self, state: DecodeState, length: int) -> DecodeState:
        def fit(cache: jax.Array, axis: int) -> jax.Array:
            widths = [(0, max(0, length - cache.shape[axis])) if i == axis else (0, 0) for i in range(4)]
            return jax.lax.slice_in_dim(jnp.pad(cache, widths), 0, length, axis=axis)

        return dataclasses.replace(state, keys=tuple(fit(c, 3) for c in state.keys), values=tuple(fit(c, 2) for c in state.values))

    def _free_body(self, state: DecodeState, slots: jax.Array) -> DecodeState:
        return dataclasses.replace(state, live=state.live & ~slots)

    def _prefill_one_body(self, params: Any, tokens: jax.Array, true_length: jax.Array) -> Prefix:
        keys, values = self._caches(params, tokens[None])
        return Prefix(tuple(keys), tuple(values), tokens[true_length - 1][None], true_length[None])

    def _insert_one_body(self, state: DecodeState, prefix: Prefix, slot: jax.Array) -> DecodeState:
        length = min(prefix.keys[0].shape[3], state.length)
        one = jnp.ones(1, jnp.int32)
        return dataclasses.replace(
            state,
            keys=tuple(c.at[slot, :, :, :length].set(k[0, :, :, :length]) for c, k in zip(state.keys, prefix.keys, strict=True)),
            values=tuple(c.at[slot, :, :length].set(v[0, :, :length]) for c, v in zip(state.values, prefix.values, strict=True)),
            tokens=state.tokens.at[slot].set(prefix.last_token[0]),
            positions=state.positions.at[slot].set(prefix.true_length[0] - 1),
            counts=state.counts.at[slot].set(0),
            limits=state.limits.at[slot].set(self.max_length - prefix.true_length[0]),
            live=state.live.at[slot].set(True),
            request_keys=state.request_keys.at[slot].set(request_keys(jnp.uint32(self.seed), 0 * one, 0 * one)[0]),
        )

    # JetStream's interface.

    def prefill(self, *, params: Any, existing_prefix: Any = None, padded_tokens: jax.Array, true_length: int) -> Prefix:
        """JetStream: keys and values of one prompt, int [length]."""
        if existing_prefix is not None:
            raise ValueError("existing_prefix must be None: this engine prefills whole prompts; pass all tokens as padded_tokens")
        longest = min(self.max_length - 1, len(padded_tokens))
        if not 1 <= true_length <= longest:
            raise ValueError(f"a prompt must have 1 to {longest} tokens, all of them passed, so that one can follow; got true_length {true_length}")
        tokens = np.asarray(padded_tokens, np.int32)[: self.max_length]
        return self._prefill_one(params, tokens, np.int32(true_length))

    def insert(self, prefix: Prefix, decode_state: DecodeState, slot: int) -> DecodeState:
        """JetStream: puts a prefilled prompt into a slot."""
        return self._insert_one(decode_state, prefix, np.int32(slot))

    def generate(self, params: Any, decode_state: DecodeState) -> tuple[DecodeState, jetstream.ResultTokens]:
        """JetStream: one decode step of all slots."""
        state, chunk = self._generate_k[1](params, decode_state)
        data = jnp.stack([chunk.data[:, 0], chunk.data[:, 2], state.counts], 1)
        return state, jetstream.ResultTokens(data=data, tokens_idx=(0, 1), valid_idx=(1, 2), length_idx=(2, 3), samples_per_slot=1)

    def init_decode_state(self, *args: Any, **kwargs: Any) -> DecodeState:
        """JetStream: an empty state, with room for the longest sequence."""
        return self.new_state(self.max_length)

    def load_params(self, params: Any) -> Any:
        """JetStream: parameters placed as this engine wants them."""
        return jax.device_put(jax.tree.map(lambda leaf: leaf.astype(self.param_dtype), params), self.param_shardings)

    def get_prefix_destination_sharding(self) -> Any:
        """JetStream: where a prefix must lie before insert."""
        return self._replicated

    def get_tokenizer(self) -> Any:
        """JetStream: facts to build a tokenizer from."""
        return jetstream.TokenizerParameters(path="", extra_ids=0)

    def build_tokenizer(self, metadata: Any) -> Any:
        """JetStream: the engine's tokenizer behind JetStream's interface."""
        from areal_jax.sampler.jetstream_tokenizer import JetStreamTokenizer

        return JetStreamTokenizer(self._tokenizer, self.model.eos_ids)

    @property
    def max_concurrent_decodes(self) -> int:
        return self._slots

    @property
    def samples_per_slot(self) -> int:
        return 1

    @property
    def max_prefill_length(self) -> int:
        """JetStream: the longest of its own prefill lengths (16, 32, 64, ...) after which a token still has room."""
        return max(16, 1 << ((self.max_length - 1).bit_length() - 1))

    @property
    def mesh(self) -> Mesh:
        return self._mesh

    @property
    def colocated_cpus(self) -> None:
        return None
