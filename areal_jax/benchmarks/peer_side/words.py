"""The task of whole runs: prompts of words, and a response is right if the answer's word stands in it. Plain Python: every side imports it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

PAD, END = 0, 1


def verify(response: str, answer: str, metadata: Mapping[str, Any]) -> dict[str, float]:
    """{'correct': 1 or 0}; ``metadata`` is not read."""
    return {"correct": float(answer in response.split())}


class Words:
    """A tokenizer whose token i > 1 is the word "w<i>", as ``tunix`` takes one."""

    def encode(self, text: str, **_: Any) -> list[int]:
        return [int(word[1:]) for word in text.split()]

    def decode(self, ids: Sequence[int], **_: Any) -> str:
        return " ".join(f"w{int(i)}" for i in ids if int(i) > END)

    def bos_id(self) -> int:
        return END

    def eos_id(self) -> int:
        return END

    def pad_id(self) -> int:
        return PAD
