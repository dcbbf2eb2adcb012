"""What the engine keeps on its devices: the decode state, a prefix, and what a dispatch returns.

Invariants of a live slot with sequence x (prompt, then generated tokens), p = ``positions``:
* ``tokens`` is x[p], the newest token, not yet fed; the slot's pages hold keys and values of x[0..p-1];
* ``counts`` generated tokens so far; the slot ends at ``limits`` of them or at an end token.
A slot that is not live changes nothing that is read: page 0 takes what nobody may keep, and no sequence holds it.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import numpy as np
from flax import struct

SCRAP = 0
"""The page that nobody holds."""


@struct.dataclass
class DecodeState:
    """Keys and values [kv_heads, pages, page_size, head_dim] a layer; the rest [slots]."""

    keys: Any
    values: Any
    tokens: Any
    positions: Any
    counts: Any
    limits: Any
    live: Any
    request_keys: Any
    temperature: Any
    top_k: Any
    top_p: Any


@struct.dataclass
class Prefix:
    """Keys and values of one prompt in pages of its own [kv_heads, pages, page_size, head_dim] a layer, with its last token and its length [1]."""

    keys: Any
    values: Any
    last_token: Any
    true_length: Any


@struct.dataclass
class Blocks:
    """Pieces of sequences whose keys and values are computed together, each of up to ``width`` tokens at consecutive positions.

    Attributes:
      tokens: int32 [blocks, width].
      starts: int32 [blocks], the position of a block's first token.
      counts: int32 [blocks], how many of its tokens are some; 0 for a block that is not used.
      tables: int32 [blocks, pages of the longest sequence].
    """

    tokens: Any
    starts: Any
    counts: Any
    tables: Any


@struct.dataclass
class Insertion:
    """Requests that enter slots together; rows of a fixed number N, unused ones with ``slots`` out of range.

    int32 [N], but for ``temperature`` and ``top_p`` (float32) and ``streams`` (uint32 [N, 2], the names of their random streams).
    """

    slots: Any
    last_tokens: Any
    positions: Any
    counts: Any
    limits: Any
    streams: Any
    temperature: Any
    top_k: Any
    top_p: Any


@dataclasses.dataclass(frozen=True)
class Decoded:
    """One dispatch on the host: arrays [rows, K], of which the first ``valid`` of a row are some.

    The last three are None unless the engine is made with ``per_request=True``; the top ones are [rows, K, top_logprobs].
    """

    tokens: np.ndarray
    logprobs: np.ndarray
    valid: np.ndarray
    live: np.ndarray
    raw_logprobs: np.ndarray | None = None
    top_ids: np.ndarray | None = None
    top_logprobs: np.ndarray | None = None


@struct.dataclass
class Chunk:
    """What one dispatch of up to K steps made: one integer array, so that one copy brings all to the host.

    ``data`` int32 [rows, 2 + K · (2 | 3 + 2 · top)]: the number of valid tokens, whether still live, then K of each: tokens, log-probs (float32
    bits) and, per request, raw log-probs, top ids, top log-probs.
    """

    data: jax.Array
    steps: int = struct.field(pytree_node=False)
    top: int | None = struct.field(pytree_node=False)

    def unpack(self) -> Decoded:
        """On the host; waits for the device."""
        host = np.asarray(self.data)

        def take(first: int, each: int = 1) -> np.ndarray:
            return np.ascontiguousarray(host[:, 2 + first * self.steps : 2 + (first + each) * self.steps])

        decoded = Decoded(take(0), take(1).view(np.float32), host[:, 0], host[:, 1].astype(bool))
        if self.top is None:
            return decoded
        shape = (len(host), self.steps, self.top)
        ids, logprobs = take(3, self.top).reshape(shape), take(3 + self.top, self.top).view(np.float32).reshape(shape)
        return dataclasses.replace(decoded, raw_logprobs=take(2).view(np.float32), top_ids=ids, top_logprobs=logprobs)
