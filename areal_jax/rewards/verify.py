"""Is the answer right? The built-in verifier, called inside a worker of ``rewards.service``.

Invariants:
* Only the response is read for the answer; the prompt is never seen, so its boxes and examples cannot be paid.
* The final answer is one piece of text: after the last ``####``, else in the last ``\\boxed{}``, else after the last "answer is".
* ``correct`` is 1 or 0. A procedural task pays only for full marks by its own scorer *and* agreement of math-verify.
* A reference answer that cannot be read raises: it never pays.
* No time limit here: the service kills the process that takes too long.

``verify_line`` takes the whole first line for the answer instead. A verifier of your own has the signature of ``verify`` and is named by
``reward.verifier`` as ``package.module:function``; the component ``correct`` is the reward, the others are metrics.
"""

from __future__ import annotations

import functools
import logging
import re
import unicodedata
from collections.abc import Mapping
from typing import Any

import math_verify
from sympy import Basic, Expr, MatrixBase

from areal_jax.reasoning import get_score_answer_fn

MAX_RESPONSE_CHARACTERS = 200_000
"""Only the end of a longer response is searched for its answer."""
MAX_ANSWER_CHARACTERS = 1_000
"""A longer final answer is not parsed: it is wrong."""
MAX_DIGITS = 300
"""A final answer with a longer run of digits is not parsed: it is wrong."""
MARKER = "####"

_EXTRACTION = [math_verify.LatexExtractionConfig(boxed_match_priority=0), math_verify.ExprExtractionConfig()]
_PHRASE = re.compile(r"answer\s*(?:is\b|:)\s*:?([^\n]*)", re.IGNORECASE)
_LONG_DIGITS = re.compile(rf"\d{{{MAX_DIGITS + 1}}}")

# math-verify warns once that its own time limit is off; the service holds the limit.
logging.getLogger("math_verify").setLevel(logging.ERROR)


class UnreadableAnswerError(ValueError):
    """The reference answer cannot be read, so nothing can be compared with it."""


def last_box(text: str) -> str | None:
    """Content of the last closed ``\\boxed{...}``, braces matched; None if there is none or the last one is left open."""
    start = text.rfind("\\boxed{")
    if start < 0:
        return None
    begin = start + len("\\boxed{")
    depth, position = 1, begin
    while position < len(text):
        character = text[position]
        if character == "\\":
            position += 2
            continue
        depth += (character == "{") - (character == "}")
        if depth == 0:
            return text[begin:position]
        position += 1
    return None


def final_answer(response: str) -> str | None:
    """The text that the response gives as its answer.

    Args:
      response: what the policy generated, without the prompt.

    Returns:
      The first line after the last ``####``; else the content of the last ``\\boxed{}``; else the rest of the line after
      the last "answer is" or "answer:". None where there is none or it is empty. What stands in ``<think>`` is no answer.
    """
    _, closed, after = response.rpartition("</think>")
    if not closed and "<think>" in response:
        return None
    text = (after if closed else response)[-MAX_RESPONSE_CHARACTERS:]
    if MARKER in text:
        lines = text.rpartition(MARKER)[2].strip().splitlines()
        return (lines[0].strip() if lines else "") or None
    if "\\boxed{" in text:
        return (last_box(text) or "").strip() or None
    phrases = _PHRASE.findall(text)
    if not phrases:
        return None
    return re.sub(r"\.\s*$", "", phrases[-1].strip().strip("*").strip()).strip("*").strip() or None


def plain(text: str) -> str:
    """Text for an exact comparison: NFKC, dollar signs, ``\\text{}`` and repeated blanks removed."""
    text = unicodedata.normalize("NFKC", text).replace("−", "-").strip().strip("$").strip()
    text = re.sub(r"\\(?:text|textbf|mathrm)\s*\{([^{}]*)\}", r"\1", text)
    return " ".join(text.split())


@functools.lru_cache(maxsize=8192)
def _parse(text: str) -> tuple[Any, ...]:
    text = text.strip().strip("$").strip()
    return tuple(math_verify.parse(f"\\boxed{{{text}}}", _EXTRACTION, parsing_timeout=0))


def _readable(text: str) -> bool:
    return len(text) <= MAX_ANSWER_CHARACTERS and not _LONG_DIGITS.search(text) and all(c.isprintable() or c in "\n\t" for c in text)


def _differ_though_tiny(gold: tuple[Any, ...], found: tuple[Any, ...]) -> bool:
    """Whether both are numbers so near to 0 that math-verify's rounding to six decimals made them equal, though they differ."""
    pair = [part.doit() for parts in (gold, found) for part in parts[:1] if isinstance(part, Expr) and part.is_number]
    values = [complex(value) for part in pair if (value := part.evalf(15)).is_finite]
    if len(values) != 2:
        return False
    first, second = values
    largest = max(abs(first), abs(second))
    return 0 < largest < 1e-5 and abs(first - second) > 1e-6 * largest


@functools.lru_cache(maxsize=65536)
def equal(candidate: str, answer: str) -> bool:
    """Whether math-verify takes both texts for the same value, or both are the same words.

    Args:
      candidate: the final answer of a response.
      answer: the reference answer.

    Raises:
      UnreadableAnswerError: ``answer`` is empty or holds nothing that math-verify can read.
    """
    gold = _parse(answer) if _readable(answer) else ()
    if not any(isinstance(part, (Basic, MatrixBase)) for part in gold):
        raise UnreadableAnswerError(f"the reference answer must be a number, an expression or words; got {answer[:80]!r}; remove or mend the row")
    if not _readable(candidate):
        return False
    if plain(candidate) == plain(answer):
        return True
    found = _parse(candidate)
    return bool(math_verify.verify(list(gold), list(found), timeout_seconds=None)) and not _differ_though_tiny(gold, found)


@functools.cache
def _scorer(dataset: str) -> Any:
    return get_score_answer_fn(dataset)


def verify(response: str, answer: str, metadata: Mapping[str, Any]) -> dict[str, float]:
    """Checks one response.

    Args:
      response: what the policy generated, without the prompt.
      answer: the reference answer.
      metadata: facts of the problem. With ``in_thinking`` the prompt ended in "<think>", so what comes before "</think>" is no answer.
        With ``task == "arithmetic"``: ``dataset``, the generator's name in reasoning-gym, and ``entry``, what its scorer needs.

    Returns:
      ``correct`` (the reward), ``format`` (there is a final answer), ``math_verify`` and, for procedural tasks, ``scorer``
      (the generator's own marks, partial ones included; only full marks count). All in [0, 1].

    Raises:
      UnreadableAnswerError: the reference answer cannot be read.
    """
    return _check(final_answer("<think>" + response if metadata.get("in_thinking") else response), answer, metadata)


def verify_line(response: str, answer: str, metadata: Mapping[str, Any]) -> dict[str, float]:
    """Checks a response whose first line is the answer and nothing else, as after a few-shot prompt that ends in "=".

    Arguments, result and errors are those of ``verify``.
    """
    return _check(response.strip().partition("\n")[0].strip() or None, answer, metadata)


def _check(found: str | None, answer: str, metadata: Mapping[str, Any]) -> dict[str, float]:
    procedural = metadata.get("task") == "arithmetic"
    # The reference is checked even when there is nothing to compare, so that a broken row is an error and not a zero.
    agrees = equal(found if found is not None else "", answer)
    components = {"correct": float(agrees), "format": float(found is not None), "math_verify": float(agrees)}
    if procedural:
        marks = float(_scorer(metadata["dataset"])(found, dict(metadata["entry"]))) if found is not None and _readable(found) else 0.0
        components["scorer"] = marks
        components["correct"] = float(agrees and marks >= 1.0)
    return components
