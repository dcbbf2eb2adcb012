"""The samples of one request as they grow: text, log-probs and ends, the same for every protocol.

Invariants:
* ``updates`` gives each token and each character once; a sample's last update, and no other, has its finish reason.
* A sample whose stop text has come is cancelled in the sampler at once; what it made after that is not counted.
"""

from __future__ import annotations

import dataclasses
from collections.abc import AsyncIterator, Sequence

from areal_jax.serving.service import Generation
from areal_jax.serving.text import Part, ResponseText, Vocabulary
from areal_jax.types import NewTokens


@dataclasses.dataclass(frozen=True)
class Token:
    """One token of an answer.

    Attributes:
      id: of the token.
      offset: where its text begins in the answer, in characters.
      logprob: under temperature 1 and without filters; None where the engine does not tell it.
      top: the likeliest (id, log-prob) in that sense, descending.
    """

    id: int
    offset: int
    logprob: float | None
    top: tuple[tuple[int, float], ...]


@dataclasses.dataclass(frozen=True)
class Update:
    """What sample ``index`` has more of; ``finish_reason`` with the last one."""

    index: int
    text: str
    tokens: tuple[Token, ...]
    finish_reason: str | None


class Responses:
    """All samples of one request.

    Args:
      generation: from the service; whoever made it closes it.
      samples: how many there are.
      vocabulary: the tokenizer's.
      end_ids: tokens that end a response.
      stops: stop texts.
      top: likeliest tokens wanted beside each.
    """

    def __init__(self, generation: Generation, samples: int, vocabulary: Vocabulary, end_ids: Sequence[int], stops: Sequence[str] = (), top: int = 0):
        self._generation, self._top = generation, top
        self._texts = [ResponseText(vocabulary, end_ids, stops) for _ in range(samples)]
        self._made: list[dict[int, Token]] = [{} for _ in range(samples)]

    @property
    def completion_tokens(self) -> int:
        """Generated tokens of all samples, ending ones included."""
        return sum(text.tokens for text in self._texts)

    async def updates(self) -> AsyncIterator[Update]:
        """Updates of all samples until every one has ended.

        Raises:
          ServiceError: as of ``Generation.events``.
        """
        async for event in self._generation.events():
            text = self._texts[event.index]
            if text.finish_reason:
                continue
            parts = [self._push(event.index, event.new)] if event.new is not None else []
            if text.finish_reason and not event.ended:
                self._generation.stop(event.index)
            elif event.ended and not text.finish_reason:
                parts.append(text.finish())
            whole, tokens = "".join(part.text for part in parts), [token for part in parts for token in part.tokens]
            if whole or tokens or text.finish_reason:
                made = self._made[event.index]
                told = tuple(dataclasses.replace(made.pop(place), offset=offset) for place, offset in tokens)
                yield Update(event.index, whole, told, text.finish_reason)

    def _push(self, index: int, new: NewTokens) -> Part:
        text, made = self._texts[index], self._made[index]
        for i, token in enumerate(new.tokens.tolist()):
            logprob = None if new.raw_logprobs is None else float(new.raw_logprobs[i])
            top: tuple[tuple[int, float], ...] = ()
            if self._top and new.top_ids is not None and new.top_logprobs is not None:
                top = tuple(zip(new.top_ids[i, : self._top].tolist(), new.top_logprobs[i, : self._top].tolist(), strict=True))
            made[text.tokens + i] = Token(token, 0, logprob, top)
        return text.push(new.tokens.tolist())
