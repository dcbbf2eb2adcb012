"""The policy's tokenizer behind JetStream's tokenizer interface.

Invariants:
* The ids are those of ``models.tokenizer.Tokenizer``; a text gets what the tokenizer puts before it, whatever ``is_bos`` says.
* Generation stops where the engine's own driver stops; the padding token is no stop token, as it is none in the driver.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from areal_jax.models.tokenizer import Tokenizer
from areal_jax.sampler import jetstream


class JetStreamTokenizer(jetstream.Tokenizer):
    """Adapter.

    Args:
      tokenizer: the policy's.
      stop_ids: tokens that end a response; empty: the tokenizer's end-of-text tokens.
    """

    def __init__(self, tokenizer: Tokenizer | None, stop_ids: Sequence[int] = ()):
        if tokenizer is None:
            raise ValueError("JetStream's interface needs a tokenizer; pass tokenizer= to SamplerEngine")
        self.tokenizer = tokenizer
        self._stop_ids = set(stop_ids) or set(tokenizer.eos_ids)

    def encode(self, s: str, **kwargs: Any) -> tuple[jax.Array | np.ndarray, int]:
        """Ids of ``s``, padded to one of JetStream's prefill lengths.

        Args:
          s: the text.
          kwargs: JetStream's: ``prefill_lengths``, ``max_prefill_length`` and ``jax_padding``; ``is_bos`` has no meaning here.

        Returns:
          (int [padded_length], true length).

        Raises:
          ValueError: the text has more tokens than ``max_prefill_length``.
        """
        options = {key: kwargs[key] for key in ("prefill_lengths", "max_prefill_length", "jax_padding") if key in kwargs}
        ids = np.concatenate([np.asarray(self.tokenizer.prefix, np.int32), self.tokenizer.encode(s)])
        longest = options.get("max_prefill_length")
        if longest is not None and len(ids) > longest:
            raise ValueError(f"a prompt must have at most {longest} tokens; got {len(ids)}; shorten it or raise the engine's max_length")
        return jetstream.pad_tokens(ids, self.bos_id, self.pad_id, is_bos=False, **options)

    def decode(self, token_ids: list[int], **kwargs: Any) -> str:
        """Text of ``token_ids``, special tokens left out."""
        return self.tokenizer.decode(token_ids)

    @property
    def pad_id(self) -> int:
        return self.tokenizer.pad_id

    @property
    def eos_id(self) -> int:
        return self.tokenizer.eos_ids[0]

    @property
    def bos_id(self) -> int:
        """JetStream puts it before a prompt of token ids; where the policy has none it is the token that ends the text before."""
        return self.tokenizer.prefix[0] if self.tokenizer.prefix else self.eos_id

    @property
    def stop_tokens(self) -> set[int]:
        return self._stop_ids
