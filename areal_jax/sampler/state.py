"""What the engine keeps on its devices: the decode state, a prefix, and what a dispatch returns.

Invariants of a live slot with sequence x (prompt, then generated tokens), p = ``positions``:
* ``tokens`` is x[p], the newest token, not yet fed; the cache holds keys and values of x[0..p-1];
* ``counts`` generated tokens so far; the slot ends at ``limits`` of them or at an end token.
A slot that is not live computes along with the others and changes nothing that is read.
"""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
from flax import struct


@struct.dataclass
class DecodeState:
    """Keys [slots, kv_heads, head_dim, length] and values [slots, kv_heads, length, head_dim] a layer; the rest [slots]."""

    keys: Any
    values: Any
    tokens: Any
    positions: Any
    counts: Any
    limits: Any
    live: Any
    request_keys: Any

    @property
    def length(self) -> int:
        return self.keys[0].shape[3]

    @property
    def slots(self) -> int:
        return self.keys[0].shape[0]


@struct.dataclass
class Prefix:
    """Keys and values of one prompt, [1, ...] a layer, with the prompt's last token and its length [1]."""

    keys: Any
    values: Any
    last_token: Any
    true_length: Any


@struct.dataclass
class Chunk:
    """What one dispatch of up to K steps made: one integer array, so that one copy brings all to the host.

    ``data`` int32 [slots, 2K + 2]: K tokens, K log-probs (float32 bits), the number of valid ones, whether still live.
    """

    data: jax.Array

    def unpack(self) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        """(tokens [slots, K], log-probs float32 [slots, K], valid counts [slots], live [slots]) on the host."""
        host = np.asarray(self.data)
        steps = (host.shape[1] - 2) // 2
        logprobs = np.ascontiguousarray(host[:, steps : 2 * steps]).view(np.float32)
        return host[:, :steps], logprobs, host[:, -2], host[:, -1].astype(bool)


@struct.dataclass
class Insertion:
    """Requests that enter slots together; rows of a fixed number N, unused ones with ``slots`` out of range.

    ``rows`` names the prefilled sequence of each, so that the samples of a prompt share one prefill.
    All int32 [N].
    """

    rows: Any
    slots: Any
    last_tokens: Any
    positions: Any
    counts: Any
    limits: Any
    group_ids: Any
    sample_indices: Any
