"""Rows of preferences: a prompt, the chosen answer and the rejected one.

Invariants:
* Both conversations have the same turns before the answer, and other ones in it.
* Each of ``prompt``, ``chosen`` and ``rejected`` is a text or messages. Where ``chosen`` and ``rejected`` are whole conversations, the turns that both
  begin with are the prompt; a ``prompt`` beside them must be (the last of) these turns.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from areal_jax.data.conversations import Conversation, Turn, checked_turns, side
from areal_jax.data.records import Refused


def preference(row: Mapping[str, Any]) -> tuple[Conversation, Conversation]:
    """(chosen, rejected) of a row.

    Raises:
      Refused: a field is missing or wrong, or the answers are alike.
    """
    values = {name: row.get(name) for name in ("prompt", "chosen", "rejected")}
    missing = [name for name in ("chosen", "rejected") if values[name] is None]
    if missing:
        present = ", ".join(sorted(name for name, value in row.items() if value is not None)) or "none"
        raise Refused(f"a row of preferences must have prompt, chosen and rejected; '{missing[0]}' is missing; it has {present}; rename its fields")
    chosen, rejected = (side(values[name], name, "assistant")[0] for name in ("chosen", "rejected"))
    begins = {name: turns[0]["role"] == "assistant" for name, turns in (("chosen", chosen), ("rejected", rejected))}
    if begins["chosen"] != begins["rejected"]:
        whole = "rejected" if begins["chosen"] else "chosen"
        raise Refused(f"'chosen' and 'rejected' must both be answers or both whole conversations; only '{whole}' is a whole one; give both the same form")
    if begins["chosen"]:
        if values["prompt"] is None:
            raise Refused("a row of preferences must have 'prompt', as 'chosen' and 'rejected' begin with the answer; it has none; add it")
        before = side(values["prompt"], "prompt", "user")[0]
    else:
        before = _common(chosen, rejected, values["prompt"])
        chosen, rejected = chosen[len(before) :], rejected[len(before) :]
    if chosen == rejected:
        raise Refused("'chosen' and 'rejected' must differ; they are alike; remove the row")
    texts = all(isinstance(value, str) for value in values.values())
    return _answered(before, chosen, "chosen", texts, row.get("tools")), _answered(before, rejected, "rejected", texts, row.get("tools"))


def _common(chosen: list[Turn], rejected: list[Turn], prompt: Any) -> list[Turn]:
    """The turns before the first one that differs."""
    count = next((place for place, (a, b) in enumerate(zip(chosen, rejected, strict=False)) if a != b), min(len(chosen), len(rejected)))
    before = chosen[:count]
    if not before:
        raise Refused("'chosen' and 'rejected' must begin with the same turns, which are the prompt; their first turns differ; mend the row")
    if isinstance(prompt, str):
        said = [turn.get("content", "").strip() for turn in before if turn["role"] == "user"]
        if not said or said[-1] != prompt.strip():
            raise Refused("'prompt' must be the user's last turn before the answers; 'chosen' and 'rejected' ask something else there; mend or remove 'prompt'")
    elif prompt is not None and checked_turns(prompt, "prompt")[0] != before:
        raise Refused("'prompt' must be the turns that 'chosen' and 'rejected' begin with; it is not; mend or remove 'prompt'")
    return before


def _answered(before: list[Turn], answer: list[Turn], name: str, texts: bool, tools: Any) -> Conversation:
    learnt = tuple(len(before) + place for place, turn in enumerate(answer) if turn["role"] == "assistant")
    if not answer or answer[0]["role"] != "assistant":
        got = answer[0]["role"] if answer else "none"
        raise Refused(f"'{name}' must have an assistant's turn after what it shares with the other; got {got}; mend the row")
    return Conversation((*before, *answer), learnt, texts, tools)
