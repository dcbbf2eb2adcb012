"""A checkpoint's chat template: from turns to the text that its policy was trained to answer.

Invariants:
* The text is byte for byte that of ``transformers``' ``apply_chat_template(turns, tokenize=False, add_generation_prompt=True)``
  (release 5), which gives templates the same sandbox, filters and functions.
* A template is code of the checkpoint's author: it runs in Jinja's immutable sandbox.
* Nothing is compiled before it is used, so a broken template harms only runs that want it; every failure is a ``ChatError`` of one line.
"""

from __future__ import annotations

import datetime
import functools
import json
import pathlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jinja2
import jinja2.ext
import jinja2.meta
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox

from areal_jax.models.files import read_json_if_there

REASONING_KEYS = ("reasoning_content", "thinking", "reasoning")
"""Under any of them a turn may carry its reasoning; templates read the first, or the second."""


class ChatError(ValueError):
    """The chat template cannot be used for these turns; the text says which template, why and what to do."""


class ChatTemplate:
    """One template and the checkpoint's special tokens.

    Args:
      source: the Jinja text.
      special_tokens: 'bos_token' and the like, as the template sees them.
      origin: the file, for errors.
    """

    def __init__(self, source: str, special_tokens: Mapping[str, str], origin: str):
        self.source, self.special_tokens, self.origin = source, dict(special_tokens), origin

    def render(self, turns: Sequence[Mapping[str, Any]], now: datetime.datetime | None = None, **variables: Any) -> str:
        """The text of a conversation, up to where the policy's next turn begins.

        Args:
          turns: each with 'role' and 'content' and whatever else the template knows ('reasoning_content', 'tool_calls').
          now: what 'strftime_now' tells; None: the clock.
          variables: further ones, such as ``enable_thinking`` or ``tools``.

        Raises:
          ChatError: the template is broken, or refuses these turns.
        """
        seen: dict[str, Any] = {"tools": None, "documents": None, "add_generation_prompt": True, **self.special_tokens, **variables}
        if now is not None:
            seen["strftime_now"] = now.strftime
        try:
            return self._compiled.render(messages=[_plain(turn) for turn in turns], **seen)
        except ChatError:
            raise
        except Exception as error:  # a template can raise anything: it is a program
            raise ChatError(f"the chat template of '{self.origin}' refuses the prompt: {_line(error)}; change the turns, or 'task.chat=off'") from error

    @property
    def variables(self) -> frozenset[str]:
        """Names that the template reads and does not set.

        Raises:
          ChatError: the template is broken.
        """
        return frozenset(jinja2.meta.find_undeclared_variables(self._compiled.environment.parse(self.source)))

    @functools.cached_property
    def _compiled(self) -> jinja2.Template:
        try:
            return _environment().from_string(self.source)
        except jinja2.TemplateSyntaxError as error:
            raise ChatError(f"the chat template of '{self.origin}' is broken in line {error.lineno}: {_line(error)}; mend it, or 'task.chat=off'") from error


def load_chat(path: pathlib.Path, config: Mapping[str, Any], special_tokens: Mapping[str, str]) -> ChatTemplate | None:
    """The template of a checkpoint's directory, None where there is none.

    It is in chat_template.jinja, else under 'chat_template' of tokenizer_config.json (a text, or a list of named ones of which
    'default' is taken), else of chat_template.json.

    Args:
      path: the directory.
      config: content of its tokenizer_config.json.
      special_tokens: see ``ChatTemplate``.

    Raises:
      ValueError: what stands there is no template, or there are several and none is 'default'.
    """
    file = path / "chat_template.jinja"
    if file.is_file():
        try:
            return ChatTemplate(file.read_text(encoding="utf-8"), special_tokens, str(file))
        except UnicodeDecodeError as error:
            raise ValueError(f"'{file}' must be UTF-8 text: {error}; fetch it again") from error
    file, source = path / "tokenizer_config.json", config.get("chat_template")
    legacy = path / "chat_template.json"
    if source is None and legacy.is_file():
        file, source = legacy, read_json_if_there(legacy).get("chat_template")
    if source is None:
        return None
    if isinstance(source, list) and all(isinstance(entry, dict) and {"name", "template"} <= entry.keys() for entry in source):
        source = {entry["name"]: entry["template"] for entry in source}
    if isinstance(source, dict):
        if "default" not in source:
            raise ValueError(f"one of the chat templates of '{file}' must be named 'default'; they are {', '.join(sorted(source))}; rename one")
        source = source["default"]
    if not isinstance(source, str):
        raise ValueError(
            f"'chat_template' of '{file}' must be a text, or a list of objects with 'name' and 'template'; got a {type(source).__name__}; mend the file"
        )
    return ChatTemplate(source, special_tokens, str(file))


class _Generation(jinja2.ext.Extension):
    """``{% generation %}``, by which training code finds the assistant's part: here its content alone, in a scope of its own."""

    tags = {"generation"}

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.CallBlock(self.call_method("_content"), [], [], body).set_lineno(line)

    def _content(self, caller: Callable[[], str]) -> str:
        return caller()


@functools.cache
def _environment() -> jinja2.sandbox.ImmutableSandboxedEnvironment:
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, jinja2.ext.loopcontrols])
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise
    environment.globals["strftime_now"] = lambda text: datetime.datetime.now().strftime(text)
    return environment


def _to_json(value: Any, ensure_ascii: bool = False, indent: int | None = None, separators: tuple[str, str] | None = None, sort_keys: bool = False) -> str:
    """Jinja's own filter escapes HTML, which a prompt is not."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise(message: str) -> None:
    raise jinja2.TemplateError(message)


def _plain(turn: Mapping[str, Any]) -> dict[str, Any]:
    """The turn as templates expect it: no key without a value, the reasoning under the names that they read."""
    kept = {key: value for key, value in turn.items() if value is not None}
    reasoning = next((kept[key] for key in REASONING_KEYS if key in kept), None)
    return kept if reasoning is None else {"thinking": reasoning, **kept, "reasoning_content": reasoning}


def _line(error: Exception) -> str:
    return " ".join(str(error).split()) or type(error).__name__
