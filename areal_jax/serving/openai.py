"""OpenAI's answers: objects, chunks and usage, from the updates of a request.

Invariants:
* Chunks of a stream, put together, are the object that the same request gets without a stream.
* ``usage`` counts a prompt once, however many choices it has, and every generated token, ending ones included.
"""

from __future__ import annotations

import math
import secrets
import time
from collections.abc import AsyncIterator, Sequence
from typing import Any

from areal_jax.serving.requests import Call
from areal_jax.serving.responses import Responses, Token, Update
from areal_jax.serving.text import Vocabulary

LEAST_LOGPROB = -9999.0
"""JSON has no infinity."""


class Writer:
    """Writes the answer to one call.

    Args:
      call: the request.
      model: name of what is served.
      vocabulary: the tokenizer's.
    """

    def __init__(self, call: Call, model: str, vocabulary: Vocabulary):
        self._call, self._model, self._vocabulary = call, model, vocabulary
        self._id = ("chatcmpl-" if call.chat else "cmpl-") + secrets.token_hex(12)
        self._created = int(time.time())
        self._begun: set[int] = set()

    async def whole(self, responses: Responses) -> dict[str, Any]:
        """The answer as one object.

        Raises:
          ServiceError: as of ``Generation.events``.
        """
        texts = [self._echo(index) for index in range(self._call.choices)]
        tokens: list[list[Token]] = [[] for _ in texts]
        reasons: list[str | None] = [None] * len(texts)
        async for update in responses.updates():
            texts[update.index] += update.text
            tokens[update.index] += update.tokens
            reasons[update.index] = update.finish_reason
        choices = []
        for index, (text, made, reason) in enumerate(zip(texts, tokens, reasons, strict=True)):
            content = {"message": {"role": "assistant", "content": text, "refusal": None}} if self._call.chat else {"text": text}
            choices.append({"index": index, **content, "logprobs": self._logprobs(made, index), "finish_reason": reason})
        return {**self._head("chat.completion" if self._call.chat else "text_completion"), "choices": choices, "usage": self._usage(responses)}

    async def chunks(self, responses: Responses) -> AsyncIterator[dict[str, Any]]:
        """The answer in parts.

        Raises:
          ServiceError: as of ``Generation.events``.
        """
        head = self._head("chat.completion.chunk" if self._call.chat else "text_completion")
        usage = {"usage": None} if self._call.include_usage else {}
        for choice in self._openings():
            yield {**head, "choices": [choice], **usage}
        async for update in responses.updates():
            yield {**head, "choices": [self._choice(update)], **usage}
        if self._call.include_usage:
            yield {**head, "choices": [], "usage": self._usage(responses)}

    def _openings(self) -> list[dict[str, Any]]:
        """What a choice begins with: the role in a chat, the prompt where it is to be echoed."""
        indices = range(self._call.choices)
        if self._call.chat:
            opening = {"role": "assistant", "content": "", "refusal": None}
            return [{"index": index, "delta": opening, "logprobs": None, "finish_reason": None} for index in indices]
        return [{"index": index, "text": self._echo(index), "logprobs": None, "finish_reason": None} for index in indices if self._echo(index)]

    def _choice(self, update: Update) -> dict[str, Any]:
        content: dict[str, Any] = {"text": update.text}
        if self._call.chat:
            content = {"delta": {"content": update.text} if update.text or update.tokens else {}}
        logprobs = self._logprobs(update.tokens, update.index) if update.tokens else None
        return {"index": update.index, **content, "logprobs": logprobs, "finish_reason": update.finish_reason}

    def _head(self, kind: str) -> dict[str, Any]:
        return {"id": self._id, "object": kind, "created": self._created, "model": self._model}

    def _usage(self, responses: Responses) -> dict[str, int]:
        prompt, completion = self._call.prompt_tokens, responses.completion_tokens
        return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}

    def _echo(self, index: int) -> str:
        return self._call.texts[index // self._call.samples]

    def _logprobs(self, tokens: Sequence[Token], index: int) -> dict[str, Any] | None:
        if self._call.logprobs is None:
            return None
        if self._call.chat:
            return {"content": [{**self._entry(t.id, t.logprob), "top_logprobs": [self._entry(*pair) for pair in t.top]} for t in tokens], "refusal": None}
        before = len(self._echo(index))
        text = self._vocabulary.text
        return {
            "tokens": [text(t.id) for t in tokens],
            "token_logprobs": [_number(t.logprob) for t in tokens],
            "top_logprobs": [{text(i): _number(p) for i, p in (*t.top, (t.id, t.logprob))} for t in tokens] if self._call.logprobs else None,
            "text_offset": [before + t.offset for t in tokens],
        }

    def _entry(self, token: int, logprob: float | None) -> dict[str, Any]:
        return {"token": self._vocabulary.text(token), "logprob": _number(logprob), "bytes": list(self._vocabulary.bytes(token))}


def _number(logprob: float | None) -> float | None:
    return None if logprob is None else logprob if math.isfinite(logprob) else LEAST_LOGPROB


def models(name: str, created: int) -> dict[str, Any]:
    """The list of models: one."""
    return {"object": "list", "data": [model(name, created)]}


def model(name: str, created: int) -> dict[str, Any]:
    """What is served."""
    return {"id": name, "object": "model", "created": created, "owned_by": "areal_jax"}
