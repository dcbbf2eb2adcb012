"""From conversations to token ids, and to which of them are learnt.

Invariants:
* What is learnt of an assistant turn is what the policy would sample there: the tokens after the prompt that generation is given at that turn (the chat
  template up to it, with its generation prompt), through the token that ends the turn. Nothing else is learnt.
* This is exact in tokens: the ids of the prompt are the first ids of the whole conversation. Where a chat template (or a join of tokens at the boundary)
  does not allow it, the row is refused; masks are never guessed from texts.
* Without a chat template a pair of texts is the prompt's ids, the answer's ids and the end-of-text token, each encoded by itself, as generation has it.
* A turn that the template writes without its text, or a text that spells out an end-of-text token, is refused.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from areal_jax.data.conversations import Conversation, Turn
from areal_jax.data.problems import apply_template
from areal_jax.data.records import Refused
from areal_jax.data.render import DATE, task_renderer
from areal_jax.types import Chat, TextTokenizer, TrainingSequence

ONE_TURN = "learn the last turn alone (sft.learn_turns=last), or write the template's marks into rows of two texts and set task.chat=off"


class Encoder:
    """Makes training sequences for one tokenizer and one ``task`` section (its keys ``chat``, ``prompt_template``, ``system_prompt``, ``enable_thinking``).

    Raises:
      ValueError: a key asks for what the chat template is not there for, or does not know; or the chat template is broken.
    """

    def __init__(self, tokenizer: TextTokenizer, section: Any):
        task_renderer(section, tokenizer)  # refuses what the chat template does not know
        self._tokenizer, self._template, self._system = tokenizer, section.prompt_template, section.system_prompt
        self._chat = tokenizer.chat if section.chat != "off" else None
        self._variables: dict[str, Any] = {} if section.enable_thinking is None else {"enable_thinking": section.enable_thinking}

    def __call__(self, conversation: Conversation) -> TrainingSequence:
        """The tokens of a conversation up to the last learnt one.

        Raises:
          Refused: see the module.
          ValueError: the chat template refuses the turns.
        """
        turns, learnt = list(conversation.turns), conversation.learnt
        for place, turn in enumerate(turns):
            if np.isin(self._tokenizer.encode(turn.get("content", "")), self._tokenizer.eos_ids).any():
                raise Refused(f"turn {place + 1} must not spell out an end-of-text token, which would end the answer there; it does; take it out of the text")
        if conversation.texts:
            turns[0] = {**turns[0], "content": apply_template(self._template, turns[0]["content"])}
        if self._chat is None:
            return self._plain(conversation, turns)
        if self._system and turns[0]["role"] not in ("system", "developer"):
            turns, learnt = [{"role": "system", "content": self._system}, *turns], tuple(place + 1 for place in learnt)
        return self._templated(self._chat, turns, learnt, conversation.tools)

    def _plain(self, conversation: Conversation, turns: Sequence[Turn]) -> TrainingSequence:
        if not conversation.texts:
            raise Refused(
                "messages need a chat template, and the tokenizer has none or 'task.chat' is off; take a checkpoint with one, or give two texts "
                "(prompt and completion)"
            )
        prompt, answer = (self._tokenizer.encode(turn["content"]) for turn in turns)
        before = np.concatenate([np.asarray(self._tokenizer.prefix, np.int32), prompt])
        if not before.size:
            raise Refused("the prompt must have a token; it is empty; write one")
        tokens = np.concatenate([before, answer, self._tokenizer.eos_ids[:1]]).astype(np.int32)
        return TrainingSequence(tokens, np.arange(tokens.size) >= before.size)

    def _templated(self, chat: Chat, turns: list[Turn], learnt: Sequence[int], tools: Any) -> TrainingSequence:
        def rendered(count: int, more: bool) -> tuple[str, np.ndarray]:
            text = chat.render(turns[:count], now=DATE, add_generation_prompt=more, tools=tools, **self._variables)
            return text, self._tokenizer.encode(text)

        text, tokens = rendered(len(turns), more=False)
        trained = np.zeros(tokens.size, bool)
        for place in learnt:
            where = f"turn {place + 1} ({turns[place]['role']})"
            before_text, before = rendered(place, more=True)
            upto_text, upto = (text, tokens) if place == len(turns) - 1 else rendered(place + 1, more=False)
            start = before.size
            if not start or not np.array_equal(before, tokens[:start]):
                raise Refused(
                    f"{where}: the tokens that generation is given must be the first ones of the whole conversation; with the chat template of '{chat.origin}' "
                    f"they are not ({_difference(before_text, text)}); {ONE_TURN}"
                )
            ends = start + np.flatnonzero(np.isin(upto[start:], self._tokenizer.eos_ids))
            if ends.size:
                end = int(ends[-1]) + 1
            elif place == len(turns) - 1:
                tokens = np.concatenate([tokens, self._tokenizer.eos_ids[:1]]).astype(np.int32)
                trained, upto, end = np.r_[trained, False], tokens, tokens.size
            else:
                raise Refused(f"{where}: the chat template of '{chat.origin}' must end an assistant's turn with an end-of-text token; it does not; {ONE_TURN}")
            if not np.array_equal(upto[:end], tokens[:end]):
                raise Refused(
                    f"{where}: the chat template of '{chat.origin}' must write a turn alike whether or not others follow; it does not "
                    f"({_difference(upto_text, text)}); {ONE_TURN}"
                )
            if _squeezed(turns[place].get("content", "")) not in _squeezed(upto_text[len(before_text) :]):
                raise Refused(f"{where}: the chat template of '{chat.origin}' must write what is learnt; it leaves a part out; mend the turn or the template")
            trained[start:end] = True
        for turn in turns:
            if turn["role"] in ("system", "developer") and _squeezed(turn["content"]) not in _squeezed(text):
                raise Refused(f"the chat template of '{chat.origin}' must write the {turn['role']} turn; it leaves it out; put its text into the user's turn")
        length = int(np.flatnonzero(trained)[-1]) + 1
        return TrainingSequence(tokens[:length], trained[:length])


def _squeezed(text: str) -> str:
    return "".join(text.split())


def _difference(one: str, other: str) -> str:
    """Where two texts part, for people."""
    place = next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))
    if place == len(one):
        return f"a token reaches over its end, {one[-12:]!r} and {other[place : place + 12]!r}"
    return f"from character {place} on {one[place : place + 24]!r} against {other[place : place + 24]!r}"
