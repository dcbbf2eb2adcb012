"""Rows in chat format as conversations.

Invariants:
* A row has exactly one layout, known by its own field names: ``messages`` (OpenAI's: objects with 'role' and 'content'), or one of ``PAIRS``, each side
  a text or messages.
* What is learnt are assistant turns: all of ``messages``, those of the second side of a pair. A turn of ``weight`` 0 (OpenAI's) is context only.
* Turns keep whatever else the chat template may read (``tool_calls``, ``reasoning_content``, ``name``); ``tools`` of a row go with them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from areal_jax.data.records import Refused
from areal_jax.data.rows import normalise

PAIRS = (("prompt", "completion"), ("prompt", "response"), ("question", "answer"))
ROLES = ("system", "developer", "user", "assistant", "tool")
Turn = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Conversation:
    """Attributes:
    turns: chat turns with 'role' and 'content'.
    learnt: places of the assistant turns that are learnt, rising; at least one.
    texts: it was made of two texts, so that it can stand without a chat template.
    tools: what the row says of tools, for the chat template; None without.
    """

    turns: tuple[Turn, ...]
    learnt: tuple[int, ...]
    texts: bool = False
    tools: Any = None

    @property
    def context(self) -> str:
        """What stands before the first learnt turn, system turns apart, normalised."""
        asked = (str(turn.get("content", "")) for turn in self.turns[: self.learnt[0]] if turn["role"] not in ("system", "developer"))
        return normalise("\n\n".join(asked))


def conversation(row: Mapping[str, Any], learn: str = "all") -> Conversation:
    """The conversation of a row.

    Args:
      row: of a file; a key whose value is None counts as absent.
      learn: 'all' assistant turns, or the 'last' alone.

    Raises:
      Refused: the row has no layout or several, or its turns are none.
    """
    layout = _layout(row)
    if layout == ("messages",):
        turns, learnt = checked_turns(row["messages"], "messages")
    else:
        before, _ = side(row[layout[0]], layout[0], "user")
        after, places = side(row[layout[1]], layout[1], "assistant")
        turns, learnt = [*before, *after], [len(before) + place for place in places]
    if not learnt:
        raise Refused(f"a row must hold an assistant turn to learn; got {', '.join(turn['role'] for turn in turns)}; add one, or remove the row")
    texts = len(layout) == 2 and all(isinstance(row[name], str) for name in layout)
    return Conversation(tuple(turns), tuple(learnt if learn == "all" else learnt[-1:]), texts, row.get("tools"))


def _layout(row: Mapping[str, Any]) -> tuple[str, ...]:
    present = {name for name, value in row.items() if value is not None}
    found = [names for names in (("messages",), *PAIRS) if present.issuperset(names)]
    known = "messages, " + ", ".join(" and ".join(names) for names in PAIRS)
    if not found:
        hint = ""
        if {"chosen", "rejected"} <= present:
            hint = "; these are preferences: set sft.objective=dpo"
        raise Refused(f"a row must have {known}; it has {', '.join(sorted(present)) or 'none'}{hint or '; rename its fields'}")
    if len(found) > 1:
        both = " as well as ".join(" and ".join(names) for names in found)
        raise Refused(f"a row must have one of {known}; it has {both}; remove one of them")
    return found[0]


def side(value: Any, name: str, role: str) -> tuple[list[Turn], list[int]]:
    """(turns, places of those to be learnt) of one side of a pair: a text is one turn of ``role``."""
    if isinstance(value, str):
        return checked_turns([{"role": role, "content": value}], name)
    return checked_turns(value, name)


def checked_turns(messages: Any, name: str) -> tuple[list[Turn], list[int]]:
    """(turns without empty keys, places of the assistant turns to learn).

    Raises:
      Refused: these are no messages; the text names the field and the turn.
    """
    if not isinstance(messages, Sequence) or isinstance(messages, str) or not messages:
        got = type(messages).__name__ if messages else "none"
        raise Refused(f"'{name}' must be a list of at least one message with 'role' and 'content'; got {got}; mend the row")
    turns, learnt = [], []
    for place, message in enumerate(messages):
        where = f"'{name}', turn {place + 1}"
        if not isinstance(message, Mapping):
            raise Refused(f"{where}: a message must be an object with 'role' and 'content'; got {type(message).__name__}; mend the row")
        turn = {key: value for key, value in message.items() if value is not None and key != "weight"}
        if turn.get("tool_calls"):
            turn.setdefault("content", "")  # OpenAI's null, which templates take for a missing text
        _check_turn(turn, where)
        weight = message.get("weight")
        if weight is not None and weight not in (0, 1):
            raise Refused(f"{where}: 'weight' must be 0 (not learnt) or 1; got {weight!r}; set one of them")
        turns.append(turn)
        if turn["role"] == "assistant" and weight != 0:
            learnt.append(place)
    return turns, learnt


def _check_turn(turn: Turn, where: str) -> None:
    role, content = turn.get("role"), turn.get("content")
    if role not in ROLES:
        raise Refused(f"{where}: 'role' must be one of {', '.join(ROLES)}; got {role!r}; rename it")
    if not isinstance(content, str):
        raise Refused(f"{where}: 'content' must be a text; got {type(content).__name__}; write the text itself there")
    if role == "assistant" and not content.strip() and not turn.get("tool_calls"):
        raise Refused(f"{where}: an assistant's 'content' must hold a text; got {content!r}; write it, or remove the row")
    if any("\ud800" <= character <= "\udfff" for character in content):
        raise Refused(f"{where}: 'content' must be text; it holds half of a surrogate pair; mend the row")
