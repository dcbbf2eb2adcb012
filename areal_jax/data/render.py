"""From a problem to its prompt: the template around the question, and the checkpoint's chat around that.

Invariants:
* The question goes through ``task.prompt_template`` first; the result is the user's turn of the chat, or with no chat the whole text.
* A row's own turns stand before it, and its own system turn replaces ``task.system_prompt``.
* The same problem gives the same prompt on every day: a template that asks for the date is told ``DATE``, so that a run can be resumed.
* What the tokenizer puts before a text (a beginning token) stands before a plain prompt; a chat template writes its own.
"""

from __future__ import annotations

import dataclasses
import datetime
from typing import Any

import numpy as np

from areal_jax.data.problems import Problem, apply_template
from areal_jax.types import TextTokenizer

DATE = datetime.datetime(2024, 7, 26)
"""Llama 3's templates write it where they cannot ask for the date."""


@dataclasses.dataclass(frozen=True)
class Rendered:
    """Attributes:
    text: the prompt, special tokens of the chat included.
    tokens: int32 [prompt_length].
    """

    text: str
    tokens: np.ndarray

    @property
    def opens_thinking(self) -> bool:
        """The prompt ends in "<think>", so the response begins inside (DeepSeek-R1's distillations)."""
        return self.text.rstrip().endswith("<think>")


class Renderer:
    """Makes prompts for one tokenizer and one ``task`` section.

    Args:
      tokenizer: makes the tokens, and has the chat template.
      template: holds "{question}".
      chat: 'auto' uses the chat template where there is one, 'on' needs it, 'off' does not use it.
      system_prompt: system turn; empty: what the chat template does without one.
      enable_thinking: given to the chat template; None: its default.

    Raises:
      ValueError: a key asks for what the chat template is not there for, or does not know; or the chat template is broken.
    """

    def __init__(
        self,
        tokenizer: TextTokenizer,
        template: str = "{question}",
        chat: str = "auto",
        system_prompt: str = "",
        enable_thinking: bool | None = None,
    ):
        self._tokenizer, self._template, self._system = tokenizer, template, system_prompt
        self._chat = tokenizer.chat if chat != "off" else None
        if self._chat is None:
            for key, wanted in (("chat=on", chat == "on"), ("system_prompt", bool(system_prompt)), ("enable_thinking", enable_thinking is not None)):
                if wanted:
                    raise ValueError(
                        f"'task.{key}' needs a chat template, and the tokenizer has none; leave it, and write what you want into task.prompt_template"
                    )
        elif enable_thinking is not None and "enable_thinking" not in self._chat.variables:
            raise ValueError(f"'task.enable_thinking' is for chat templates that read it; that of '{self._chat.origin}' does not; set it to None")
        self._variables: dict[str, Any] = {} if enable_thinking is None else {"enable_thinking": enable_thinking}

    def __call__(self, problem: Problem) -> Rendered:
        """The prompt of a problem.

        Raises:
          ValueError: the template lacks "{question}", the chat template refuses the turns, or a conversation has no chat template to stand in.
        """
        if self._chat is None:
            text = self._plain(problem)
            return Rendered(text, np.concatenate([np.asarray(self._tokenizer.prefix, np.int32), self._tokenizer.encode(text)]))
        turns = [*problem.turns, {"role": "user", "content": apply_template(self._template, problem.question)}]
        given = bool(self._system) and turns[0]["role"] != "system"
        if given:
            turns.insert(0, {"role": "system", "content": self._system})
        text = self._chat.render(turns, now=DATE, **self._variables)
        if given and self._system.strip() not in text:
            raise ValueError(f"the chat template of '{self._chat.origin}' leaves 'task.system_prompt' out; write it into task.prompt_template instead")
        return Rendered(text, self._tokenizer.encode(text))

    def _plain(self, problem: Problem) -> str:
        if any(turn["role"] != "system" for turn in problem.turns):
            raise ValueError(
                f"'{problem.problem_id}' is a conversation of {len(problem.turns) + 1} turns, which needs a chat template; take one, or remove the row"
            )
        return apply_template(self._template, "\n\n".join([*(turn["content"] for turn in problem.turns), problem.question]))


def task_renderer(section: Any, tokenizer: TextTokenizer) -> Renderer:
    """The renderer of a configuration's ``task`` section."""
    return Renderer(tokenizer, section.prompt_template, section.chat, section.system_prompt, section.enable_thinking)
