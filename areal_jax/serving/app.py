"""The HTTP endpoint: routes, errors, streams and disconnects, over starlette.

Invariants:
* Every answer that is an error has OpenAI's body; one that comes up in a stream is its last event.
* A client that goes away ends its request: its samples are cancelled in the sampler.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Awaitable, Sequence
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from areal_jax.models.tokenizer import Tokenizer
from areal_jax.serving import metrics, openai
from areal_jax.serving.requests import ApiError, Limits, parse
from areal_jax.serving.responses import Responses
from areal_jax.serving.service import Draining, Generation, Overloaded, Refused, Service, ServiceError, TimedOut
from areal_jax.serving.text import Vocabulary

LARGEST_BODY = 16 * 2**20
"""Bytes."""
QUICK_BODY = 2**16
"""Bytes; larger ones are tokenised in a thread, so that streams do not wait for them."""
GONE = 499
"""Status of an answer that nobody is there to read (nginx's)."""
EVENTS = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-cache"), (b"x-accel-buffering", b"no")]


def as_api_error(error: ServiceError) -> ApiError:
    """How OpenAI says it."""
    if isinstance(error, Refused):
        return ApiError(400, str(error))
    if isinstance(error, Overloaded):
        return ApiError(429, str(error), type="rate_limit_error", code="rate_limit_exceeded")
    if isinstance(error, Draining):
        return ApiError(503, str(error), type="server_error", code="server_shutting_down")
    if isinstance(error, TimedOut):
        return ApiError(504, str(error), type="server_error", code="timeout")
    return ApiError(500, str(error), type="server_error", code="internal_error")


class App:
    """The handlers.

    Args:
      service: the sampler.
      tokenizer: the policy's.
      limits: what is served.
      end_ids: tokens that end a response.
    """

    def __init__(self, service: Service, tokenizer: Tokenizer, limits: Limits, end_ids: Sequence[int]):
        self._service, self._tokenizer, self._limits, self._end_ids = service, tokenizer, limits, end_ids
        self._vocabulary = Vocabulary(tokenizer)
        self._created = int(time.time())

    def starlette(self) -> Starlette:
        """The application."""
        routes = [
            Route("/v1/completions", self._completions, methods=["POST"]),
            Route("/v1/chat/completions", self._chat, methods=["POST"]),
            Route("/v1/models", self._models),
            Route("/v1/models/{name:path}", self._model),
            Route("/health", self._health),
            Route("/metrics", self._metrics),
        ]
        return Starlette(routes=routes, exception_handlers=HANDLERS)

    async def _completions(self, request: Request) -> Response:
        return await self._answer(request, chat=False)

    async def _chat(self, request: Request) -> Response:
        return await self._answer(request, chat=True)

    async def _answer(self, request: Request, *, chat: bool) -> Response:
        body, size = await _body(request)
        if size > QUICK_BODY:
            call = await asyncio.to_thread(parse, body, self._tokenizer, self._limits, chat=chat)
        else:
            call = parse(body, self._tokenizer, self._limits, chat=chat)
        generation = self._service.submit(call.prompts, samples=call.samples, max_new_tokens=call.limits, sampling=call.sampling, seed=call.seed)
        responses = Responses(generation, call.choices, self._vocabulary, self._end_ids, call.stops, call.logprobs or 0)
        writer = openai.Writer(call, self._limits.model, self._vocabulary)
        if call.stream:
            return EventStream(generation, writer.chunks(responses))
        async with generation:
            answer = await _unless_gone(request.receive, writer.whole(responses))
        return JSONResponse(answer) if answer is not None else Response(status_code=GONE)

    async def _models(self, request: Request) -> Response:
        return JSONResponse(openai.models(self._limits.model, self._created))

    async def _model(self, request: Request) -> Response:
        name = request.path_params["name"]
        if name != self._limits.model:
            raise ApiError(404, f"the model '{name}' does not exist; this server has '{self._limits.model}'", param="model", code="model_not_found")
        return JSONResponse(openai.model(name, self._created))

    async def _health(self, request: Request) -> Response:
        if self._service.failure is not None:
            return JSONResponse({"status": "failed"}, 500)
        return JSONResponse({"status": "draining"}, 503) if self._service.draining else JSONResponse({"status": "ok"})

    async def _metrics(self, request: Request) -> Response:
        return PlainTextResponse(metrics.exposition(self._service), media_type="text/plain; version=0.0.4")


class EventStream(Response):
    """Server-sent events of a request; ends it when the client goes away."""

    def __init__(self, generation: Generation, chunks: AsyncIterator[dict[str, Any]]):
        super().__init__()
        self._generation, self._chunks = generation, chunks

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with self._generation:
            await _unless_gone(receive, self._send(send))

    async def _send(self, send: Send) -> bool:
        await send({"type": "http.response.start", "status": 200, "headers": EVENTS})
        try:
            async for chunk in self._chunks:
                await send(_event(json.dumps(chunk, ensure_ascii=False, separators=(",", ":"))))
                await asyncio.sleep(0)  # a client that is gone is seen here, and other streams have their turn
            await send(_event("[DONE]"))
        except ServiceError as error:
            await send(_event(json.dumps(as_api_error(error).body())))
        await send({"type": "http.response.body", "body": b"", "more_body": False})
        return True


def _event(data: str) -> dict[str, Any]:
    return {"type": "http.response.body", "body": f"data: {data}\n\n".encode(), "more_body": True}


async def _unless_gone(receive: Receive, work: Awaitable[Any]) -> Any:
    """What ``work`` gives, or None as soon as the client is gone."""

    async def gone() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass

    working, watching = asyncio.ensure_future(work), asyncio.ensure_future(gone())
    try:
        await asyncio.wait((working, watching), return_when=asyncio.FIRST_COMPLETED)
        return working.result() if working.done() else None
    finally:
        for task in (working, watching):
            task.cancel()
        await asyncio.gather(working, watching, return_exceptions=True)


async def _body(request: Request) -> tuple[Any, int]:
    """(the JSON value, its bytes)."""
    parts, size = [], 0
    async for part in request.stream():
        size += len(part)
        if size > LARGEST_BODY:
            raise ApiError(413, f"a request's body must have at most {LARGEST_BODY} bytes; send several requests")
        parts.append(part)
    try:
        return json.loads(b"".join(parts)), size
    except (ValueError, RecursionError) as error:
        raise ApiError(400, f"the body must be JSON: {error}"[:300]) from error


def _respond(error: ApiError) -> Response:
    return JSONResponse(error.body(), error.status, headers={"retry-after": "1"} if error.status in (429, 503) else None)


async def _api_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    return _respond(error)


async def _service_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, ServiceError)
    return _respond(as_api_error(error))


async def _http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    return _respond(ApiError(error.status_code, f"{request.method} {request.url.path}: {error.detail}", code="not_found" if error.status_code == 404 else None))


async def _gone(request: Request, error: Exception) -> Response:
    return Response(status_code=GONE)


async def _bug(request: Request, error: Exception) -> Response:
    """What nobody foresaw: the client gets an answer, and starlette raises the error once more, so that the log has it."""
    return _respond(ApiError(500, f"the server failed: {type(error).__name__}", type="server_error", code="internal_error"))


HANDLERS: dict[Any, Any] = {
    ApiError: _api_error,
    ServiceError: _service_error,
    HTTPException: _http_error,
    ClientDisconnect: _gone,
    Exception: _bug,
}
