"""JetStream's gRPC protocol: Decode and HealthCheck, over the same service as HTTP.

Invariants:
* A prompt of text is answered with text and tokens, a prompt of tokens with tokens; the end token is not handed on, as JetStream does not.
* A call that its client cancels, or whose time is up, ends its sample in the sampler.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from typing import Any

import grpc
import numpy as np

from areal_jax.models.tokenizer import Tokenizer
from areal_jax.sampler import jetstream
from areal_jax.serving.requests import Limits
from areal_jax.serving.responses import Responses
from areal_jax.serving.service import Draining, Generation, Overloaded, Refused, Service, ServiceError, TimedOut
from areal_jax.serving.text import Vocabulary


class BadRequest(ValueError):
    """A call that cannot be answered; the text says why."""


def status(error: Exception) -> grpc.StatusCode:
    """How gRPC says it."""
    kinds = {
        BadRequest: grpc.StatusCode.INVALID_ARGUMENT,
        Refused: grpc.StatusCode.INVALID_ARGUMENT,
        Overloaded: grpc.StatusCode.RESOURCE_EXHAUSTED,
        Draining: grpc.StatusCode.UNAVAILABLE,
        TimedOut: grpc.StatusCode.DEADLINE_EXCEEDED,
    }
    return kinds.get(type(error), grpc.StatusCode.INTERNAL)


class Orchestrator:
    """The two methods of JetStream's service.

    Args:
      service: the sampler; samples are drawn from its own distribution, as the protocol names none.
      tokenizer: the policy's.
      limits: what is served.
      end_ids: tokens that end a response.
    """

    def __init__(self, service: Service, tokenizer: Tokenizer, limits: Limits, end_ids: Sequence[int]):
        self._service, self._tokenizer, self._limits, self._end_ids = service, tokenizer, limits, frozenset(end_ids)
        self._vocabulary = Vocabulary(tokenizer)
        self._messages = jetstream.protocol()[0]

    async def Decode(self, request: Any, context: grpc.aio.ServicerContext) -> AsyncIterator[Any]:
        """Streams one response."""
        try:
            prompt = self._prompt(request)
            text = request.WhichOneof("content") == "text_content"
            async with self._service.submit([prompt], samples=1, max_new_tokens=request.max_tokens, sampling=None) as generation:
                async for content, ids in self._with_text(generation) if text else self._tokens(generation):
                    yield self._response(content, ids)
        except (BadRequest, ServiceError) as error:
            await context.abort(status(error), str(error))

    async def HealthCheck(self, request: Any, context: grpc.aio.ServicerContext) -> Any:
        """Whether requests are taken."""
        return self._messages.HealthCheckResponse(is_live=self._service.failure is None and not self._service.draining)

    async def _with_text(self, generation: Generation) -> AsyncIterator[tuple[str, list[int]]]:
        async for update in Responses(generation, 1, self._vocabulary, tuple(self._end_ids)).updates():
            if update.tokens or update.text:
                yield update.text, [token.id for token in update.tokens]

    async def _tokens(self, generation: Generation) -> AsyncIterator[tuple[str, list[int]]]:
        async for event in generation.events():
            ids = [] if event.new is None else [token for token in event.new.tokens.tolist() if token not in self._end_ids]
            if ids:
                yield "", ids

    def _prompt(self, request: Any) -> np.ndarray:
        for key in ("session_cache", "priority"):
            if getattr(request, key):
                raise BadRequest(f"'{key}' is not supported; got {getattr(request, key)!r}; leave it out")
        kind = request.WhichOneof("content")
        if kind is None:
            raise BadRequest("'content' is missing; set text_content or token_content")
        if kind == "text_content":
            tokens = np.concatenate([np.asarray(self._tokenizer.prefix, np.int32), self._tokenizer.encode(request.text_content.text)])
        else:
            tokens = np.asarray(request.token_content.token_ids, np.int32)
        if not len(tokens) or tokens.min() < 0 or tokens.max() >= self._limits.vocab_size:
            raise BadRequest(f"a prompt must have at least one token, of ids 0 to {self._limits.vocab_size - 1}; got {len(tokens)} tokens")
        if not 1 <= request.max_tokens <= self._limits.max_length - len(tokens):
            raise BadRequest(
                f"'max_tokens' must be 1 to {self._limits.max_length} less the prompt's tokens; got {request.max_tokens} after a prompt of {len(tokens)}"
            )
        return tokens

    def _response(self, text: str, token_ids: Sequence[int]) -> Any:
        content = self._messages.DecodeResponse.StreamContent
        return self._messages.DecodeResponse(stream_content=content(samples=[content.Sample(text=text, token_ids=token_ids)]))


def make_server(orchestrator: Orchestrator) -> grpc.aio.Server:
    """A server of the running event loop, with no port yet."""
    server = grpc.aio.server(options=(("grpc.so_reuseport", 0),))
    jetstream.protocol()[1].add_OrchestratorServicer_to_server(orchestrator, server)
    return server
