"""A problem: what is asked, the reference answer, and what makes two problems the same.

Invariants:
* ``canonical`` is equal for two problems that differ only in the wording, the letter of an unknown or the order of
  operands; held-out sets are disjoint from training sets by it, never by the wording alone.
* ``metadata`` is JSON-able: it goes to the verifier's process and into checkpoints as it is.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Mapping
from typing import Any


@dataclasses.dataclass(frozen=True)
class Problem:
    """One problem of a data set.

    Attributes:
      problem_id: unique in its data set.
      question: the text that goes into the prompt template.
      answer: the reference answer, as text.
      metadata: JSON-able facts that the reward needs (task name, the generator's entry, ...).
      canonical: the problem's identity with the wording removed.
      turns: of a conversation, what stands before the question: chat turns with 'role' and 'content'.
    """

    problem_id: str
    question: str
    answer: str
    metadata: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    canonical: str = ""
    turns: tuple[Mapping[str, Any], ...] = ()


def hash_fraction(text: str) -> float:
    """A number in [0, 1) that depends on ``text`` alone: the same in every process, run and machine."""
    return int.from_bytes(hashlib.blake2b(text.encode("utf-8"), digest_size=8).digest(), "big") / 2.0**64


def apply_template(template: str, question: str) -> str:
    """``template`` with the question in the place of "{question}"; other braces stay as they are.

    Raises:
      ValueError: the template does not hold "{question}".
    """
    if "{question}" not in template:
        raise ValueError(f"task.prompt_template must hold '{{question}}'; {template!r} does not; write it where the question belongs")
    return template.replace("{question}", question)
