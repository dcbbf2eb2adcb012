"""Problems from a JSONL file of yours.

Invariants:
* A line is what stands between two line feeds; other separators of Unicode stay inside the text.
* Every line becomes one problem or one ``BadRow`` that names the file, the line and the reason; blank lines are neither.
* A problem's id is made of the file's name and the line, so two prompts never share one.
* Train and held-out rows are disjoint by the normalised question (with what was said before it, system turns apart), in every run and on
  every machine.

Layouts: a question under question | problem | prompt | input (a text, or chat messages that end with the user's question) and an answer
under answer | solution | target | output | reward_model.ground_truth (a text or a number); or ``messages`` that end with the assistant's
answer. Turns before the question are kept as they are.
An answer with ``####`` is GSM8K's layout (the answer follows it), an answer with ``\\boxed{}`` is MATH's; in both the worked
solution is kept in the metadata. A text that looks like encoded messages is used as it is: nothing is decoded twice.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
import pathlib
import unicodedata
from collections.abc import Mapping, Sequence
from typing import Any

from areal_jax.config import ConfigError
from areal_jax.data.problems import Problem, hash_fraction

QUESTION_KEYS = ("question", "problem", "prompt", "input")
ANSWER_KEYS = ("answer", "solution", "target", "output", "reward_model.ground_truth")
ROLES = ("system", "user", "assistant")
MAX_ANSWER_CHARACTERS = 1_000


class RowsError(ConfigError):
    """The rows cannot be used as they are; the text names file and line, or what to change."""


@dataclasses.dataclass(frozen=True)
class BadRow:
    """A line that is no problem. ``line`` counts from 1."""

    file: str
    line: int
    reason: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line}: {self.reason}"


class _Refused(ValueError):
    """Why one row is refused."""


def read_rows(path: str | os.PathLike[str], question_key: str = "", answer_key: str = "", on_bad_row: str = "skip") -> tuple[list[Problem], list[BadRow]]:
    """Reads a JSONL file.

    Args:
      path: the file.
      question_key: key of the question, dotted for a nested one; empty: the first of ``QUESTION_KEYS`` that the row has.
      answer_key: likewise for the answer, of ``ANSWER_KEYS``.
      on_bad_row: 'skip' returns the bad rows next to the problems; 'error' raises at the first.

    Returns:
      The problems and the rows that were skipped, both in the file's order.

    Raises:
      RowsError: a bad row with ``on_bad_row='error'``; no good row at all; or the file is something else (compressed, a Git LFS
        pointer, one JSON list).
    """
    if on_bad_row not in ("skip", "error"):
        raise ValueError(f"'on_bad_row' must be 'skip' or 'error'; got '{on_bad_row}'")
    file = pathlib.Path(path)
    try:
        content = file.read_bytes()
    except OSError as error:
        raise RowsError(f"the rows must be in a readable file; '{file}': {error.strerror}") from error
    refuse_other_formats(file, content)
    problems: list[Problem] = []
    bad: list[BadRow] = []
    for number, raw in enumerate(content.removeprefix(b"\xef\xbb\xbf").split(b"\n"), 1):
        if not raw.strip():
            continue
        try:
            problems.append(_problem(file.name, number, raw, question_key, answer_key))
        except _Refused as error:
            bad.append(BadRow(str(file), number, str(error)))
            if on_bad_row == "error":
                raise RowsError(f"{bad[-1]}; mend the row, or 'task.on_bad_row=skip' to go on without it") from error
    if not problems:
        raise RowsError(
            f"'{file}' must hold at least one row with a question and an answer; " + (f"the first of {len(bad)} bad ones: {bad[0]}" if bad else "it is empty")
        )
    return problems, bad


def split_rows(problems: Sequence[Problem], fraction: float) -> tuple[list[Problem], list[Problem]]:
    """Splits by a stable hash of the normalised question, so that a row's side does not depend on the other rows.

    (Where one side would be empty, as in a file of a few rows, the question with the lowest hash is held out.)

    Args:
      problems: rows, as from ``read_rows``.
      fraction: share to hold out, in (0, 1).

    Returns:
      (training rows, held-out rows); a question that occurs several times is on one side only.

    Raises:
      RowsError: there are fewer than two different questions.
    """
    hashes = {problem.canonical: hash_fraction(problem.canonical) for problem in problems}
    if len(hashes) < 2:
        raise RowsError(f"rows must hold at least 2 different questions to hold one out; got {len(hashes)}; add rows or give 'task.eval_path'")
    held_out = {canonical for canonical, value in hashes.items() if value < fraction}
    if not held_out:
        held_out = {min(hashes, key=lambda canonical: hashes[canonical])}
    elif len(held_out) == len(hashes):
        held_out.remove(max(hashes, key=lambda canonical: hashes[canonical]))
    return [p for p in problems if p.canonical not in held_out], [p for p in problems if p.canonical in held_out]


def without(problems: Sequence[Problem], held_out: Sequence[Problem]) -> tuple[list[Problem], int]:
    """(the problems whose question is not held out, how many were taken away): for a held-out file of its own."""
    canonical = {problem.canonical for problem in held_out}
    kept = [problem for problem in problems if problem.canonical not in canonical]
    return kept, len(problems) - len(kept)


def normalise(question: str) -> str:
    """What makes two questions the same: the text without differences of case, blanks and Unicode form."""
    return " ".join(unicodedata.normalize("NFKC", question).casefold().split())


def refuse_other_formats(file: pathlib.Path, content: bytes) -> None:
    """Raises ``RowsError`` for a file whose beginning shows that it is no JSONL text."""
    if content.startswith(b"\x1f\x8b"):
        raise RowsError(f"'{file}' must be JSONL text, but it is gzip data; gunzip it first")
    if content.startswith(b"version https://git-lfs.github.com/"):
        raise RowsError(f"'{file}' must be JSONL text, but it is a Git LFS pointer, not the data; get the data with: git lfs pull")
    if content.removeprefix(b"\xef\xbb\xbf").lstrip().startswith(b"["):
        raise RowsError(f"'{file}' must hold one JSON object a line, but it is a JSON list; convert it with: jq -c '.[]' {file.name} > rows.jsonl")


def _problem(file: str, number: int, raw: bytes, question_key: str, answer_key: str) -> Problem:
    try:
        row = json.loads(raw.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise _Refused(f"not UTF-8: byte {raw[error.start]:#04x} at position {error.start}") from error
    except (ValueError, RecursionError) as error:
        raise _Refused(f"not JSON: {error}") from error
    if not isinstance(row, dict):
        raise _Refused(f"a row must be a JSON object; got {type(row).__name__}")
    messages = row.get("messages")
    turns: tuple[dict[str, Any], ...] = ()
    if isinstance(messages, list) and not question_key and not any(key in row for key in QUESTION_KEYS):
        turns, question = _conversation(messages, answered=True)
    else:
        key, value = _pick(row, question_key, QUESTION_KEYS, "question")
        turns, question = _conversation(value) if isinstance(value, list) else ((), value)
        if not isinstance(question, str):
            raise _Refused(f"the question under '{key}' must be a text or chat messages; got {type(value).__name__}")
    if not question.strip():
        raise _Refused("the question is empty")
    texts = [*(turn["content"] for turn in turns), question]
    if any("\ud800" <= character <= "\udfff" for text in texts for character in text):
        raise _Refused("the question holds half of a surrogate pair, which is no text")
    if isinstance(messages, list) and not answer_key and not any(_look_up(row, key) is not None for key in ANSWER_KEYS):
        text = _last_answer(messages)
    else:
        text = _answer_text(*_pick(row, answer_key, ANSWER_KEYS, "answer"))
    answer, solution = _split_answer(text)
    metadata = {"task": "rows", "file": file, "line": number}
    if solution or isinstance(row.get("solution"), str):
        metadata["solution"] = solution or row["solution"]
    asked = "\n\n".join([*(turn["content"] for turn in turns if turn["role"] != "system"), question])
    return Problem(f"{file}:{number}", question, answer, metadata, normalise(asked), turns)


def _look_up(row: Mapping[str, Any], key: str) -> Any:
    """The value under a key, or under a dotted path of keys; None if there is none."""
    if key in row:
        return row[key]
    value: Any = row
    for part in key.split("."):
        value = value.get(part) if isinstance(value, dict) else None
    return value


def _pick(row: Mapping[str, Any], wanted: str, recognised: Sequence[str], what: str) -> tuple[str, Any]:
    for key in [wanted] if wanted else recognised:
        value = _look_up(row, key)
        if value is not None:
            return key, value
    expected = f"'{wanted}'" if wanted else " | ".join(recognised)
    raise _Refused(f"no {what} under {expected}; the row has {', '.join(sorted(row)) or 'no keys'}; name it by 'task.{what}_key'")


def _answer_text(key: str, value: Any) -> str:
    if isinstance(value, str):
        return value
    if isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value):
        return str(value)
    raise _Refused(f"the answer under '{key}' must be a text or a finite number; got {type(value).__name__}")


def _split_answer(text: str) -> tuple[str, str]:
    """(the final answer, the worked solution or '') of a row's answer text."""
    solution = ""
    answer = text.strip()
    if "####" in text:
        lines = text.rpartition("####")[2].strip().splitlines()
        answer, solution = (lines[0].strip() if lines else ""), text
    elif "\\boxed{" in text:
        answer, solution = _last_box(text), text
    if not answer:
        raise _Refused("the answer is empty")
    if len(answer) > MAX_ANSWER_CHARACTERS:
        raise _Refused(f"the answer must have at most {MAX_ANSWER_CHARACTERS} characters; got {len(answer)}; end a worked solution with #### and the answer")
    return answer, solution


def _last_box(text: str) -> str:
    """Content of the last ``\\boxed{}``, braces matched."""
    begin = text.rfind("\\boxed{") + len("\\boxed{")
    depth = 1
    for position in range(begin, len(text)):
        if text[position - 1] != "\\":
            depth += (text[position] == "{") - (text[position] == "}")
        if depth == 0:
            return text[begin:position].strip()
    raise _Refused("the answer's last \\boxed{ is never closed")


def _last_answer(messages: Sequence[Any]) -> str:
    last = messages[-1] if messages else None
    if not isinstance(last, dict) or last.get("role") != "assistant" or not isinstance(last.get("content"), str):
        raise _Refused("no answer: the last of the chat messages must be an assistant's turn with a text, or name the answer by 'task.answer_key'")
    return last["content"]


def _conversation(messages: Sequence[Any], answered: bool = False) -> tuple[tuple[dict[str, Any], ...], str]:
    """(the turns before the question, the question) of chat messages; ``answered``: a last turn of the assistant is the answer's."""
    if any(not isinstance(m, dict) or m.get("role") not in ROLES or not isinstance(m.get("content"), str) for m in messages):
        raise _Refused(f"chat messages must be objects with a text as content and a role of {', '.join(ROLES)}")
    turns = list(messages[:-1] if answered and messages and messages[-1]["role"] == "assistant" else messages)
    roles = [turn["role"] for turn in turns]
    talk = roles[1:] if roles[:1] == ["system"] else roles
    if len(talk) % 2 == 0 or any(role != ("user", "assistant")[i % 2] for i, role in enumerate(talk)):
        raise _Refused(
            f"chat messages must be a system turn or none, then user and assistant in turn up to the user's question; got {', '.join(roles) or 'none'}"
        )
    return tuple(turns[:-1]), turns[-1]["content"]
