"""The host's records of what is being generated: a sequence in a slot, and a prompt whose pages several sequences share.

Invariants:
* The record of a sequence is complete: it is enough to rebuild its pages, to preempt it and to go on elsewhere.
* ``filled`` tokens of a record stand in its pages, or will once the programs enqueued so far have run.
"""

from __future__ import annotations

import dataclasses

import numpy as np

from areal_jax.types import GenerationRequest, Trajectory

WAITS = -1
"""``filled`` of a sequence whose prompt's pages are not filled yet."""


class SharedPrompt:
    """A prompt that is prefilled once for the samples of a group: its whole pages are shared, its last, partial page is copied.

    Attributes:
      tokens: int32 [length].
      pages: of the tokens that a sample does not feed itself (all but the last), while they are held.
      whole: pages that are shared.
      filled: tokens in the pages.
      users: sequences that hold the shared pages.
    """

    def __init__(self, group_id: int, tokens: np.ndarray, pages: list[int], page_size: int):
        self.group_id, self.tokens, self.pages, self.page_size = group_id, tokens, pages, page_size
        self.whole = (len(tokens) - 1) // page_size
        self.filled = self.users = 0

    @property
    def end(self) -> int:
        """Tokens that its pages are to hold."""
        return min(len(self.tokens) - 1, len(self.pages) * self.page_size)

    @property
    def partial(self) -> int | None:
        """The page to be copied; None where there is none (any more)."""
        return self.pages[self.whole] if len(self.pages) > self.whole else None


class Sequence:
    """One request in a slot.

    Attributes:
      pages: its table, the shared ones first.
      prompt: whose whole pages those are; None: all pages are its own.
      filled: tokens in its pages, or ``WAITS``.
      entered: the engine's state knows it, so that it is decoded.
      gone: finished, cancelled or preempted; tokens of it that are still on their way are dropped.
      order: of admission.
    """

    def __init__(self, request: GenerationRequest, slot: int, order: int):
        self.request, self.slot, self.order = request, slot, order
        self.pages: list[int] = []
        self.prompt: SharedPrompt | None = None
        self.filled = 0
        self.entered = self.gone = False
        done, capacity = len(request.tokens), request.max_new_tokens
        self.count = done
        self.tokens = np.zeros(capacity, np.int32)
        self.logprobs = np.zeros(capacity, np.float32)
        self.versions = np.zeros(capacity, np.int32)
        self.tokens[:done], self.logprobs[:done], self.versions[:done] = request.tokens, request.behaviour_logprobs, request.versions

    @property
    def length(self) -> int:
        return len(self.request.prompt_tokens) + self.count

    @property
    def longest(self) -> int:
        """Its length if it goes to its limit."""
        return len(self.request.prompt_tokens) + self.request.max_new_tokens

    def piece(self, start: int, end: int) -> np.ndarray:
        """Its tokens from ``start`` to ``end``, prompt and response."""
        prompt, given = self.request.prompt_tokens, len(self.request.prompt_tokens)
        if end <= given:
            return prompt[start:end]
        return np.concatenate([prompt[start:], self.tokens[max(0, start - given) : end - given]])

    def add(self, tokens: np.ndarray, logprobs: np.ndarray, version: int) -> None:
        """New tokens of one version."""
        at = slice(self.count, self.count + len(tokens))
        self.tokens[at], self.logprobs[at], self.versions[at] = tokens, logprobs, version
        self.count += len(tokens)

    def partial(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """(tokens, behaviour log-probs, versions) so far."""
        n = self.count
        return self.tokens[:n].copy(), self.logprobs[:n].copy(), self.versions[:n].copy()

    def resumable(self) -> GenerationRequest:
        """The request that goes on from here."""
        tokens, logprobs, versions = self.partial()
        return dataclasses.replace(self.request, tokens=tokens, behaviour_logprobs=logprobs, versions=versions)

    def trajectory(self, eos_ids: tuple[int, ...]) -> Trajectory:
        """The finished sample."""
        tokens, logprobs, versions = self.partial()
        return Trajectory(
            group_id=self.request.group_id,
            sample_index=self.request.sample_index,
            prompt_tokens=self.request.prompt_tokens,
            tokens=tokens,
            behaviour_logprobs=logprobs,
            versions=versions,
            truncated=not len(tokens) or int(tokens[-1]) not in eos_ids,
        )
