"""The sampler's engine: the programs of prefill and decoding over a paged KV cache, with weights as an argument of every dispatch.

Invariants:
* Stateless: the decode state goes in and comes out of every call (donated), so several drivers may share one engine's
  compiled programs. Which page is whose is the caller's business; tables say it anew in every call.
* Shapes come from a declared set: ``block_buckets`` for prefill, ``row_buckets`` for decoding; the driver's ``warm_up`` compiles them all.
* What a program computes at once is bounded: ``prefill_chunk`` tokens, or one token a slot.
* The state's sharding is pinned on the way out; parameters of another sharding, shape or type are refused by
  ``check_params``, never converted.
* Programs are enqueued one at a time (``DISPATCH``), so that all devices of a mesh see the programs of several drivers in one order.
"""

from __future__ import annotations

import dataclasses
import functools
import threading
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from areal_jax.models.architecture import ModelConfig
from areal_jax.models.paged import paged_attention, write_pages
from areal_jax.models.policy import bind, param_shapes
from areal_jax.models.sharding import named_shardings, param_specs
from areal_jax.sampler import jetstream
from areal_jax.sampler.jetstream_methods import JetStreamMethods
from areal_jax.sampler.sampling import raw_logprobs, request_keys, sample, sample_rows, uniforms
from areal_jax.sampler.state import Blocks, Chunk, DecodeState, Insertion

DISPATCH = threading.Lock()
"""Held while a program is enqueued: programs with collectives must come in one order on all devices."""
CPU_BLOCK, BLOCK = 8, 64
"""Tokens of a sequence that one row of a prefill computes: few on a CPU, where padding costs what it is; elsewhere what fills a matrix unit (not measured)."""
FEWEST_ROWS, FEWEST_BLOCKS = 4, 4
"""Decoding is not compiled for fewer rows, prefill not for fewer blocks."""


class SamplerEngine(JetStreamMethods, jetstream.Engine):
    """A JetStream engine over the policy.

    Args:
      model: architecture.
      mesh: the sampler's mesh; heads are divided over tensor, parameters over tensor and fsdp.
      slots: sequences decoded together.
      max_length: longest sequence, prompt and response.
      page_size: tokens of a page of the KV cache.
      pages: of the cache; 0: as many as ``slots`` sequences of ``max_length`` need.
      prefill_chunk: most tokens that one prefill program computes, a multiple of ``block``.
      steps: most decode steps of a dispatch (K).
      temperature, top_k, top_p: the sampling distribution.
      per_request: requests bring their own distribution (``GenerationRequest.sampling``), and a dispatch tells raw log-probs too.
      top_logprobs: with ``per_request``, so many of the likeliest tokens are told at every step.
      seed: the run's seed, for requests that come through JetStream's own interface.
      tokenizer: a ``models.tokenizer.Tokenizer``, for JetStream's own interface; may be None.
      dtype: type of the parameters on the sampler.
      attention: backend of decoding, as for ``paged_attention``.

    Raises:
      ValueError: the pages cannot hold one sequence of ``max_length``, or the chunk is no multiple of ``block``.
    """

    def __init__(
        self,
        model: ModelConfig,
        mesh: Mesh,
        *,
        slots: int,
        max_length: int,
        page_size: int = 32,
        pages: int = 0,
        prefill_chunk: int = 512,
        steps: int = 8,
        temperature: float = 1.0,
        top_k: int = 0,
        top_p: float = 1.0,
        per_request: bool = False,
        top_logprobs: int = 0,
        seed: int = 0,
        tokenizer: Any = None,
        dtype: str = "float32",
        attention: str = "auto",
    ):
        self.model, self._mesh, self.steps, self.seed, self._tokenizer = model, mesh, steps, seed, tokenizer
        self._slots, self.max_length, self.page_size, self._attention = slots, max_length, page_size, attention
        self.sequence_pages = -(-max_length // page_size)
        self.pages = pages or max(slots * self.sequence_pages + 1, self.sequence_pages + 2)
        if self.pages <= self.sequence_pages + 1:
            raise ValueError(
                f"the cache's pages must exceed the {self.sequence_pages + 1} that one sequence of {max_length} tokens may need in pages of {page_size}; "
                f"got {self.pages}; raise 'rollout.kv_pages', or set it to 0"
            )
        cpu = mesh.devices.flat[0].platform == "cpu"
        self.block = CPU_BLOCK if cpu else BLOCK
        if prefill_chunk % self.block or prefill_chunk < self.block:
            raise ValueError(f"prefill_chunk must be a multiple of {self.block}; got {prefill_chunk}")
        self.block_buckets = _parts(prefill_chunk // self.block, FEWEST_BLOCKS, 2 if cpu else 4)
        halves = _parts(slots, FEWEST_ROWS, 2 if cpu else 4)
        # On a CPU rows cost what they are: a size between each two of the larger ones.
        self.row_buckets = tuple(sorted({*halves, *(rows * 3 // 4 for rows in halves if cpu and rows > 4 * FEWEST_ROWS)}))
        self._sampling, self.per_request, self.top_logprobs = (temperature, top_k, top_p), per_request, top_logprobs
        self.param_shardings = named_shardings(mesh, param_specs(model), param_shapes(model))
        self.param_dtype = jnp.dtype(dtype)
        self._replicated = copy = NamedSharding(mesh, P())
        tensor = "tensor" if model.kv_heads % mesh.shape["tensor"] == 0 else None
        cache = (NamedSharding(mesh, P(tensor, None, None, None)),) * model.layers
        self.state_shardings = state = DecodeState(cache, cache, copy, copy, copy, copy, copy, copy, copy, copy, copy)
        self.cache_shardings = cache
        params = self.param_shardings
        taken = (params, state, copy, copy, copy)
        self._decode = {
            k: jax.jit(functools.partial(self._decode_body, steps=k), donate_argnums=1, in_shardings=taken, out_shardings=(state, copy)) for k in {1, steps}
        }
        self._prefill = jax.jit(self._prefill_body, donate_argnums=1, in_shardings=(params, state, copy), out_shardings=state)
        self._new = jax.jit(lambda: jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), self.abstract_state()), out_shardings=state)
        self._copy = jax.jit(self._copy_body, donate_argnums=0, in_shardings=(state, copy, copy), out_shardings=state)
        self._enter = jax.jit(self._enter_body, donate_argnums=0, in_shardings=(state, copy, copy), out_shardings=state)
        self.compile_jetstream()

    # What the driver calls.

    def new_state(self) -> DecodeState:
        """An empty decode state, made where it lies."""
        return self._new()

    def abstract_state(self) -> DecodeState:
        """Shapes, types and shardings of the decode state."""
        m = self.model

        def array(dtype: Any, *shape: int) -> jax.ShapeDtypeStruct:
            return jax.ShapeDtypeStruct((self._slots, *shape), dtype)

        cache = (jax.ShapeDtypeStruct((m.kv_heads, self.pages, self.page_size, m.head_dim), jnp.dtype(m.dtype)),) * m.layers
        whole, real = jnp.int32, jnp.float32
        state = DecodeState(
            keys=cache,
            values=cache,
            tokens=array(whole),
            positions=array(whole),
            counts=array(whole),
            limits=array(whole),
            live=array(jnp.bool_),
            request_keys=array(jnp.uint32, 2),
            temperature=array(real),
            top_k=array(whole),
            top_p=array(real),
        )
        return jax.tree.map(lambda leaf, sharding: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding), state, self.state_shardings)

    def abstract_params(self) -> Any:
        """Shapes, types and shardings of the parameters."""
        return jax.tree.map(
            lambda leaf, sharding: jax.ShapeDtypeStruct(leaf.shape, self.param_dtype, sharding=sharding), param_shapes(self.model), self.param_shardings
        )

    def lower_decode(self) -> jax.stages.Lowered:
        """The program of ``decode`` for all slots, from shapes alone."""
        rows, table, bounds = (jax.ShapeDtypeStruct(shape, jnp.int32) for shape in ((self._slots,), (self._slots, self.sequence_pages), (2,)))
        return self._decode[self.steps].lower(self.abstract_params(), self.abstract_state(), rows, table, bounds)

    def lower_prefill(self) -> jax.stages.Lowered:
        """The largest program of ``prefill``, from shapes alone."""
        blocks = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), self.no_blocks(self.block_buckets[-1]))
        return self._prefill.lower(self.abstract_params(), self.abstract_state(), blocks)

    def no_blocks(self, count: int) -> Blocks:
        """Blocks on the host, none of them used, to be filled in."""
        zeros = np.zeros(count, np.int32)
        return Blocks(np.full((count, self.block), self.model.pad_id, np.int32), zeros, zeros.copy(), np.zeros((count, self.sequence_pages), np.int32))

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

    def prefill_blocks(self, params: Any, state: DecodeState, blocks: Blocks) -> DecodeState:
        """The state with the keys and values of the blocks' tokens in their pages.

        A block sees what stands in its table's pages before it, and what the other blocks of the call put there.
        """
        with DISPATCH:
            return self._prefill(params, state, blocks)

    def copy_pages(self, state: DecodeState, sources: np.ndarray, destinations: np.ndarray) -> DecodeState:
        """The state with pages copied; int32 [slots] each, 0 to 0 where there is none to copy."""
        with DISPATCH:
            return self._copy(state, sources, destinations)

    def enter(self, state: DecodeState, insertion: Insertion, seed: int) -> DecodeState:
        """Puts requests, whose pages are filled, into slots."""
        with DISPATCH:
            return self._enter(state, insertion, np.uint32(seed))

    def decode(
        self, params: Any, state: DecodeState, rows: np.ndarray, tables: np.ndarray, *, steps: int | None = None, stop_below: int = 1
    ) -> tuple[DecodeState, Chunk]:
        """Up to K decode steps of some slots.

        Args:
          params: of the policy.
          state: donated.
          rows: int32, as many as one of ``row_buckets``: the slots, those out of range unused; with neighbours of like length it costs least.
          tables: int32 [rows, pages of the longest sequence], with pages for the K tokens to come.
          steps: at most so many; None: K.
          stop_below: it ends early once fewer of the rows than this are live (at least 1).
        """
        with DISPATCH:
            return self._decode[self.steps](params, state, rows, tables, np.array([steps or self.steps, max(1, stop_below)], np.int32))

    # The programs.

    def _cached(self, params: Any, keys: list[Any], values: list[Any], tokens: jax.Array, tables: jax.Array, starts: jax.Array, counts: jax.Array) -> jax.Array:
        """Final hidden states of tokens [rows, width], whose keys and values are put into the pages ``keys`` and ``values`` (changed in place)."""
        policy = bind(self.model, params)

        def attend(layer: int, query: jax.Array, key: jax.Array, value: jax.Array) -> jax.Array:
            keys[layer] = write_pages(keys[layer], key, tables, starts, counts)
            values[layer] = write_pages(values[layer], value, tables, starts, counts)
            return paged_attention(query, keys[layer], values[layer], tables, starts, self._attention, self._mesh)

        positions = starts[:, None] + jnp.arange(tokens.shape[1], dtype=jnp.int32)
        return policy.hidden(tokens, positions, attend, self._mesh)

    def _prefill_body(self, params: Any, state: DecodeState, blocks: Blocks) -> DecodeState:
        keys, values = list(state.keys), list(state.values)
        self._cached(params, keys, values, blocks.tokens, blocks.tables, blocks.starts, blocks.counts)
        return dataclasses.replace(state, keys=tuple(keys), values=tuple(values))

    def _decode_body(self, params: Any, state: DecodeState, rows: jax.Array, tables: jax.Array, bounds: jax.Array, *, steps: int) -> tuple[DecodeState, Chunk]:
        policy = bind(self.model, params)
        eos = jnp.asarray(self.model.eos_ids, jnp.int32)

        def mine(x: jax.Array) -> jax.Array:
            return x.at[rows].get(mode="clip")

        keys_of_requests, limits = mine(state.request_keys), mine(state.limits)
        own = tuple(mine(x) for x in (state.temperature, state.top_k, state.top_p))

        def step(carry: tuple[Any, ...]) -> tuple[Any, ...]:
            index, keys, values, tokens, positions, counts, live, made = carry
            keys, values = list(keys), list(values)
            hidden = self._cached(params, keys, values, tokens[:, None], tables, jnp.where(live, positions, 0), live.astype(jnp.int32))
            logits = policy.logits(hidden[:, 0])
            numbers = uniforms(keys_of_requests, counts)
            token, logprob = sample_rows(logits, numbers, *own) if self.per_request else sample(logits, numbers, *self._sampling)
            columns = [jnp.where(live, token, self.model.pad_id)[:, None], _bits(jnp.where(live, logprob, 0.0))[:, None]]
            if self.per_request:
                raw, ids, likeliest = raw_logprobs(logits, token, self.top_logprobs)
                columns += [_bits(raw)[:, None], ids, _bits(likeliest)]
            made = [x.at[:, index].set(new) for x, new in zip(made, columns, strict=True)]
            counts = counts + live
            ended = jnp.any(token[:, None] == eos, -1) | (counts >= limits)
            return index + 1, tuple(keys), tuple(values), jnp.where(live, token, tokens), positions + live, counts, live & ~ended, made

        widths = [1, 1, *([1, self.top_logprobs, self.top_logprobs] if self.per_request else [])]
        made = [jnp.zeros((len(rows), steps, width), jnp.int32) for width in widths]
        before = mine(state.counts)
        live = mine(state.live) & (rows < self._slots)
        carry = (jnp.int32(0), state.keys, state.values, mine(state.tokens), mine(state.positions), before, live, made)
        carry = jax.lax.while_loop(lambda c: (c[0] < bounds[0]) & (jnp.sum(c[6]) >= bounds[1]), step, carry)
        _, keys, values, tokens, positions, counts, live, made = carry
        state = dataclasses.replace(
            state,
            keys=keys,
            values=values,
            tokens=state.tokens.at[rows].set(tokens, mode="drop"),
            positions=state.positions.at[rows].set(positions, mode="drop"),
            counts=state.counts.at[rows].set(counts, mode="drop"),
            live=state.live.at[rows].set(live, mode="drop"),
        )
        heads = [(counts - before)[:, None], live[:, None].astype(jnp.int32)]
        data = jnp.concatenate([*heads, *(x.reshape(len(rows), -1) for x in made)], 1)
        return state, Chunk(data, steps, self.top_logprobs if self.per_request else None)

    def _copy_body(self, state: DecodeState, sources: jax.Array, destinations: jax.Array) -> DecodeState:
        def copied(pages: jax.Array) -> jax.Array:
            return pages.at[:, destinations].set(pages[:, sources])

        return dataclasses.replace(state, keys=tuple(map(copied, state.keys)), values=tuple(map(copied, state.values)))

    def _enter_body(self, state: DecodeState, new: Insertion, seed: jax.Array) -> DecodeState:
        values = {name: getattr(new, name) for name in ("positions", "counts", "limits", "temperature", "top_k", "top_p")}
        values |= {"tokens": new.last_tokens, "live": True, "request_keys": request_keys(seed, new.streams[:, 0], new.streams[:, 1])}
        return dataclasses.replace(state, **{name: getattr(state, name).at[new.slots].set(value, mode="drop") for name, value in values.items()})

    @property
    def max_concurrent_decodes(self) -> int:
        return self._slots

    @property
    def mesh(self) -> Mesh:
        return self._mesh


def _bits(x: jax.Array) -> jax.Array:
    return jax.lax.bitcast_convert_type(x, jnp.int32)


def _parts(most: int, least: int, factor: int) -> tuple[int, ...]:
    """``most`` divided by the factor again and again, down to ``least``; rising."""
    sizes = [most]
    while sizes[0] > least:
        sizes.insert(0, max(least, -(-sizes[0] // factor)))
    return tuple(sizes)
