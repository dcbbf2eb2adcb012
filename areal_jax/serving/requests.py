"""OpenAI's request bodies: read, checked, and turned into what the service runs.

Invariants:
* Nothing that would change the answer is ignored: an unknown or unsupported parameter is refused by its name, unless it has its neutral value.
* Every refusal is an ``ApiError`` with OpenAI's fields.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np

from areal_jax.models.chat import ChatError
from areal_jax.models.tokenizer import Tokenizer
from areal_jax.types import Sampling

MOST_CHOICES = 128
LEAST_TEMPERATURE = 1e-6
"""Logits divided by less are beyond float32."""
MOST_STOPS = 4
MOST_LOGPROBS = {"completions": 5, "chat": 20}
COMMON = ("model", "n", "max_tokens", "temperature", "top_p", "top_k", "seed", "stop", "stream", "stream_options", "logprobs")
COMPLETION_KEYS = {*COMMON, "prompt", "echo", "best_of", "suffix"}
CHAT_KEYS = {*COMMON, "messages", "max_completion_tokens", "top_logprobs", "chat_template_kwargs"}
MESSAGE_KEYS = {"role", "content", "name", "tool_calls", "tool_call_id", "reasoning_content"}
WITHOUT_EFFECT = {"user", "metadata", "safety_identifier", "prompt_cache_key"}
"""Accepted: they are about bookkeeping, not about the answer."""
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "frequency_penalty": (0,),
    "presence_penalty": (0,),
    "logit_bias": ({},),
    "response_format": ({"type": "text"},),
    "tools": ([],),
    "tool_choice": ("none",),
    "functions": ([],),
    "function_call": ("none",),
    "modalities": (["text"],),
    "store": (False,),
    "service_tier": ("auto", "default"),
    "suffix": ("",),
}
"""Of parameters that are not supported: the values that ask for nothing (beside null)."""


class ApiError(Exception):
    """An answer that is an error, with the fields of OpenAI's."""

    def __init__(self, status: int, message: str, *, type: str = "invalid_request_error", param: str | None = None, code: str | None = None):
        super().__init__(message)
        self.status, self.message, self.type, self.param, self.code = status, message, type, param, code

    def body(self) -> dict[str, Any]:
        return {"error": {"message": self.message, "type": self.type, "param": self.param, "code": self.code}}


@dataclasses.dataclass(frozen=True)
class Call:
    """A checked request.

    Attributes:
      chat: a chat completion; else a completion.
      prompts: int32 [length] each; ``texts``: what ``echo`` puts before the answers ('' without).
      limits: most new tokens, a prompt each.
      samples: choices of each prompt.
      logprobs: likeliest tokens to be told beside each; None: no log-probs.
    """

    chat: bool
    prompts: tuple[np.ndarray, ...]
    texts: tuple[str, ...]
    limits: tuple[int, ...]
    samples: int
    sampling: Sampling
    seed: int | None
    stops: tuple[str, ...]
    stream: bool
    include_usage: bool
    logprobs: int | None

    @property
    def prompt_tokens(self) -> int:
        return sum(len(prompt) for prompt in self.prompts)

    @property
    def choices(self) -> int:
        return len(self.prompts) * self.samples


@dataclasses.dataclass(frozen=True)
class Limits:
    """What is served.

    Attributes:
      model: its name.
      max_length: longest sequence, prompt and response, in tokens.
      vocab_size: ids a prompt may have.
      most_samples: of one request.
    """

    model: str
    max_length: int
    vocab_size: int
    most_samples: int


def parse(body: Any, tokenizer: Tokenizer, limits: Limits, *, chat: bool) -> Call:
    """Checks a body and tokenises its prompts.

    Raises:
      ApiError: 400 or 404.
    """
    if not isinstance(body, dict):
        raise ApiError(400, f"the body must be a JSON object; got {_kind(body)}")
    given = {key: value for key, value in body.items() if value is not None}
    _check_keys(given, CHAT_KEYS if chat else COMPLETION_KEYS)
    model = _get(given, "model", str, "")
    if model != limits.model:
        raise ApiError(404, f"the model '{model}' does not exist; this server has '{limits.model}'", param="model", code="model_not_found")
    samples = _integer(given, "n", 1, 1, MOST_CHOICES)
    if _integer(given, "best_of", samples, 1, MOST_CHOICES) != samples:
        raise _unsupported("best_of", given["best_of"], "leave it out, and choose among n choices yourself")
    if chat:
        prompts, texts = [_chat_prompt(given, tokenizer)], [""]
    else:
        prompts, texts = _completion_prompts(given, tokenizer, limits)
    if len(prompts) * samples > limits.most_samples:
        raise ApiError(
            400, f"prompts × n must be at most {limits.most_samples} on this server; got {len(prompts)} × {samples}; send several requests", param="n"
        )
    logprobs = _logprobs(given, chat)
    if logprobs is not None and any(texts):
        raise _unsupported("echo", True, "log-probs of a prompt are not computed: leave out echo or logprobs")
    stream = _get(given, "stream", bool, False)
    options = _get(given, "stream_options", dict, {})
    if options and not stream:
        raise ApiError(400, "'stream_options' is only allowed when 'stream' is true", param="stream_options")
    for key in options.keys() - {"include_usage", "include_obfuscation"}:
        raise _unknown(f"stream_options.{key}")
    return Call(
        chat=chat,
        prompts=tuple(prompts),
        texts=tuple(texts),
        limits=tuple(_limit(given, prompt, limits, chat) for prompt in prompts),
        samples=samples,
        sampling=Sampling(
            temperature=_temperature(given),
            top_k=_integer(given, "top_k", 0, 0, 2**31 - 1),
            top_p=_number(given, "top_p", 1.0, 0.0, 1.0, above=True),
        ),
        seed=_integer(given, "seed", 0, -(2**63), 2**63 - 1) if "seed" in given else None,
        stops=_stops(given),
        stream=stream,
        include_usage=_get(options, "include_usage", bool, False),
        logprobs=logprobs,
    )


def _check_keys(given: Mapping[str, Any], known: set[str]) -> None:
    for key, value in given.items():
        if key in NEUTRAL:
            if value not in NEUTRAL[key]:
                raise _unsupported(key, value, "leave it out")
        elif key not in known and key not in WITHOUT_EFFECT:
            raise _unknown(key)


def _completion_prompts(given: Mapping[str, Any], tokenizer: Tokenizer, limits: Limits) -> tuple[list[np.ndarray], list[str]]:
    if "prompt" not in given:
        raise ApiError(400, "'prompt' is missing: a text, a list of texts, token ids, or a list of lists of token ids", param="prompt")
    prompt = given["prompt"]
    items = prompt if isinstance(prompt, list) and prompt and all(isinstance(item, str | list) for item in prompt) else [prompt]
    echo = _get(given, "echo", bool, False)
    prompts, texts = [], []
    for item in items:
        if isinstance(item, str):
            tokens = np.concatenate([np.asarray(tokenizer.prefix, np.int32), tokenizer.encode(_encodable(item, "prompt"))])
        elif isinstance(item, list) and all(isinstance(i, int) and not isinstance(i, bool) for i in item):
            bad = next((i for i in item if not 0 <= i < limits.vocab_size), None)
            if bad is not None:
                raise ApiError(400, f"token ids of 'prompt' must be 0 to {limits.vocab_size - 1}; got {bad}", param="prompt")
            tokens = np.asarray(item, np.int32)
        else:
            raise ApiError(400, "'prompt' must be a text, a list of texts, token ids, or a list of lists of token ids", param="prompt")
        if not len(tokens):
            raise ApiError(400, "'prompt' must have at least one token; got an empty one", param="prompt")
        prompts.append(tokens)
        texts.append((item if isinstance(item, str) else tokenizer.decode(tokens)) if echo else "")
    return prompts, texts


def _chat_prompt(given: Mapping[str, Any], tokenizer: Tokenizer) -> np.ndarray:
    if tokenizer.chat is None:
        raise ApiError(400, "this model has no chat template; use /v1/completions", param="messages", code="chat_template_missing")
    messages = _get(given, "messages", list, [])
    if not messages:
        raise ApiError(400, "'messages' must be a list of at least one message", param="messages")
    turns = [_turn(message, f"messages[{i}]") for i, message in enumerate(messages)]
    variables = _get(given, "chat_template_kwargs", dict, {})
    try:
        for name in variables:
            if name not in tokenizer.chat.variables or name in ("messages", "add_generation_prompt", "tools"):
                raise ApiError(400, f"the model's chat template does not read '{name}'; leave it out", param=f"chat_template_kwargs.{name}")
        text = tokenizer.chat.render(turns, **variables)
    except ChatError as error:
        raise ApiError(400, str(error), param="messages") from error
    tokens = tokenizer.encode(text)
    if not len(tokens):
        raise ApiError(400, "the chat template makes an empty prompt of these messages", param="messages")
    return tokens


def _turn(message: Any, where: str) -> dict[str, Any]:
    if not isinstance(message, dict):
        raise ApiError(400, f"'{where}' must be an object; got {_kind(message)}", param=where)
    turn = {key: value for key, value in message.items() if value is not None}
    for key in turn.keys() - MESSAGE_KEYS:
        raise _unknown(f"{where}.{key}")
    _encodable(_get(turn, "role", str, None, where), f"{where}.role")
    content = turn.get("content")
    if isinstance(content, list):
        for part in content:
            if not isinstance(part, dict) or part.get("type") != "text" or not isinstance(part.get("text"), str):
                raise ApiError(400, f"'{where}.content' must be text or parts of type 'text': this model reads nothing else", param=f"{where}.content")
        content = turn["content"] = "".join(part["text"] for part in content)
    if content is None and "tool_calls" in turn:
        return turn
    if not isinstance(content, str):
        raise ApiError(400, f"'{where}.content' must be a text; got {_kind(content)}", param=f"{where}.content")
    _encodable(content, f"{where}.content")
    return turn


def _limit(given: Mapping[str, Any], prompt: np.ndarray, limits: Limits, chat: bool) -> int:
    longest = limits.max_length
    if "max_completion_tokens" in given and "max_tokens" in given:
        raise ApiError(400, "set one of 'max_tokens' and 'max_completion_tokens'", param="max_tokens")
    param = "max_completion_tokens" if "max_completion_tokens" in given else "max_tokens"
    room = longest - len(prompt)
    wanted = _integer(given, param, max(1, room) if chat else 16, 1, 2**31 - 1)
    if wanted > room:
        raise ApiError(
            400,
            f"this model's context is {longest} tokens; you asked for {len(prompt) + wanted} ({len(prompt)} of the prompt, {wanted} to be generated); "
            "shorten one of them",
            param="messages" if chat else "prompt",
            code="context_length_exceeded",
        )
    return wanted


def _logprobs(given: Mapping[str, Any], chat: bool) -> int | None:
    if not chat:
        return _integer(given, "logprobs", 0, 0, MOST_LOGPROBS["completions"]) if "logprobs" in given else None
    wanted = _get(given, "logprobs", bool, False)
    if "top_logprobs" in given and not wanted:
        raise ApiError(400, "'top_logprobs' needs 'logprobs' to be true", param="top_logprobs")
    return _integer(given, "top_logprobs", 0, 0, MOST_LOGPROBS["chat"]) if wanted else None


def _stops(given: Mapping[str, Any]) -> tuple[str, ...]:
    stop = given.get("stop", [])
    stops = [stop] if isinstance(stop, str) else stop
    if not isinstance(stops, list) or len(stops) > MOST_STOPS or not all(isinstance(text, str) and text for text in stops):
        raise ApiError(400, f"'stop' must be a text or a list of at most {MOST_STOPS} texts, none empty", param="stop")
    return tuple(stops)


def _get(given: Mapping[str, Any], key: str, kind: type, default: Any, where: str = "") -> Any:
    value = given.get(key, default)
    if not isinstance(value, kind):
        name = f"{where}.{key}" if where else key
        raise ApiError(400, f"'{name}' must be {_NAMES[kind]}; got {_kind(value)}", param=name)
    return value


def _temperature(given: Mapping[str, Any]) -> float:
    value = _number(given, "temperature", 1.0, 0.0, 2.0)
    if 0 < value < LEAST_TEMPERATURE:
        raise ApiError(400, f"'temperature' must be 0 (the likeliest token) or at least {LEAST_TEMPERATURE:g}; got {value!r}", param="temperature")
    return value


def _integer(given: Mapping[str, Any], key: str, default: int, low: int, high: int) -> int:
    value = given.get(key, default)
    if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
        raise ApiError(400, f"'{key}' must be a whole number from {low} to {high}; got {value!r}"[:300], param=key)
    return value


def _number(given: Mapping[str, Any], key: str, default: float, low: float, high: float, *, above: bool = False) -> float:
    value = given.get(key, default)
    if not isinstance(value, int | float) or isinstance(value, bool) or not low <= value <= high or (above and value == low):
        raise ApiError(400, f"'{key}' must be a number {'above' if above else 'from'} {low:g} to {high:g}; got {value!r}"[:300], param=key)
    return float(value)


def _encodable(text: str, where: str) -> str:
    """JSON may hold half of a surrogate pair, which is no text."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ApiError(400, f"'{where}' must be Unicode text; it holds a lone surrogate at character {error.start}", param=where) from error
    return text


_NAMES = {str: "a text", bool: "true or false", dict: "an object", list: "a list"}


def _kind(value: Any) -> str:
    return "null" if value is None else "a number" if isinstance(value, int | float) and not isinstance(value, bool) else _NAMES.get(type(value), "nothing")


def _unknown(key: str) -> ApiError:
    return ApiError(400, f"unknown parameter '{key}'; this server does not have it", param=key, code="unknown_parameter")


def _unsupported(key: str, value: Any, remedy: str) -> ApiError:
    return ApiError(400, f"'{key}' = {str(value)[:80]} is not supported; {remedy}", param=key, code="unsupported_parameter")
