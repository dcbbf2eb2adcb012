"""JetStream's own interface over the paged engine: prefill one prompt, insert it into a slot, generate one token a slot.

Invariant: through this interface slot i holds the same pages for good (1 + i · n to (i + 1) · n), since JetStream's callers know of no pages.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from areal_jax.models.architecture import ModelConfig
from areal_jax.sampler import jetstream
from areal_jax.sampler.sampling import request_keys
from areal_jax.sampler.state import DecodeState, Prefix


class JetStreamMethods:
    """JetStream 0.2.2's ``Engine`` methods; mixed into ``SamplerEngine``, whose programs they use."""

    model: ModelConfig
    max_length: int
    pages: int
    sequence_pages: int
    page_size: int
    seed: int
    param_dtype: Any
    param_shardings: Any
    state_shardings: Any
    cache_shardings: Any
    new_state: Any
    _slots: int
    _tokenizer: Any
    _replicated: Any
    _decode: Any
    _cached: Any
    _sampling: Any

    def compile_jetstream(self) -> None:
        """Declares the programs of this interface; they are compiled when they are called."""
        cache, copy = self.cache_shardings, self._replicated
        prefix, state = Prefix(cache, cache, copy, copy), self.state_shardings
        self._prefill_one = jax.jit(self._prefill_one_body, in_shardings=(self.param_shardings, copy, copy), out_shardings=prefix)
        self._insert_one = jax.jit(self._insert_one_body, donate_argnums=0, in_shardings=(state, prefix, copy), out_shardings=state)
        own = 1 + np.arange(self._slots * self.sequence_pages, dtype=np.int32).reshape(self._slots, -1)
        self._every = (np.arange(self._slots, dtype=np.int32), own)

    def _prefill_one_body(self, params: Any, tokens: jax.Array, true_length: jax.Array) -> Prefix:
        m, shape = self.model, (self.model.kv_heads, self.sequence_pages + 1, self.page_size, self.model.head_dim)
        keys, values = ([jnp.zeros(shape, m.dtype) for _ in range(m.layers)] for _ in range(2))
        table = jnp.arange(1, self.sequence_pages + 1, dtype=jnp.int32)[None]
        self._cached(params, keys, values, tokens[None], table, jnp.zeros(1, jnp.int32), (true_length - 1)[None])
        return Prefix(tuple(keys), tuple(values), tokens[true_length - 1][None], true_length[None])

    def _insert_one_body(self, state: DecodeState, prefix: Prefix, slot: jax.Array) -> DecodeState:
        first = 1 + slot * self.sequence_pages
        one = jnp.ones(1, jnp.int32)

        def placed(pages: jax.Array, new: jax.Array) -> jax.Array:
            return jax.lax.dynamic_update_slice_in_dim(pages, new[:, 1:], first, axis=1)

        values = {
            "tokens": prefix.last_token[0],
            "positions": prefix.true_length[0] - 1,
            "counts": 0,
            "limits": self.max_length - prefix.true_length[0],
            "live": True,
            "request_keys": request_keys(jnp.uint32(self.seed), 0 * one, 0 * one)[0],
            **dict(zip(("temperature", "top_k", "top_p"), self._sampling, strict=True)),
        }
        return dataclasses.replace(
            state,
            keys=tuple(map(placed, state.keys, prefix.keys)),
            values=tuple(map(placed, state.values, prefix.values)),
            **{name: getattr(state, name).at[slot].set(value) for name, value in values.items()},
        )

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
        state, chunk = self._decode[1](params, decode_state, *self._every, np.ones(2, np.int32))
        data = jnp.stack([chunk.data[:, 2], chunk.data[:, 0], state.counts], 1)
        return state, jetstream.ResultTokens(data=data, tokens_idx=(0, 1), valid_idx=(1, 2), length_idx=(2, 3), samples_per_slot=1)

    def init_decode_state(self, *args: Any, **kwargs: Any) -> DecodeState:
        """JetStream: an empty state.

        Raises:
          ValueError: the cache has too few pages for every slot to hold the longest sequence.
        """
        needed = self._slots * self.sequence_pages + 1
        if self.pages < needed:
            raise ValueError(
                f"JetStream's interface holds the longest sequence in every slot, which needs {needed} pages; got {self.pages}; make it with pages=0"
            )
        return self.new_state()

    def load_params(self, params: Any) -> Any:
        """JetStream: parameters placed as this engine wants them."""
        return jax.device_put(jax.tree.map(lambda leaf: leaf.astype(self.param_dtype), params), self.param_shardings)

    def get_prefix_destination_sharding(self) -> Any:
        """JetStream: where a prefix must lie before insert."""
        return Prefix(self.cache_shardings, self.cache_shardings, self._replicated, self._replicated)

    def get_tokenizer(self) -> Any:
        """JetStream: facts to build a tokenizer from."""
        return jetstream.TokenizerParameters(path="", extra_ids=0)

    def build_tokenizer(self, metadata: Any) -> Any:
        """JetStream: the engine's tokenizer behind JetStream's interface."""
        from areal_jax.sampler.jetstream_tokenizer import JetStreamTokenizer

        return JetStreamTokenizer(self._tokenizer, self.model.eos_ids)

    @property
    def samples_per_slot(self) -> int:
        return 1

    @property
    def max_prefill_length(self) -> int:
        """JetStream: the longest of its own prefill lengths (16, 32, 64, ...) after which a token still has room."""
        return max(16, 1 << ((self.max_length - 1).bit_length() - 1))

    @property
    def colocated_cpus(self) -> None:
        return None
