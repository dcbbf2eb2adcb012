"""The conversation of a peer's program with the benchmark: a line of JSON in, a line of JSON out.

Invariant: standard output carries the answers alone; whatever else the peer's libraries print goes to standard error.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from typing import Any

import numpy as np


def serve(answer: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
    """Answers requests until there are no more."""
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    for line in sys.stdin:
        out.write(json.dumps(answer(json.loads(line))) + "\n")
        out.flush()


def samples(file: str) -> dict[str, np.ndarray]:
    """The arrays of a step's samples.

    prompts int64 [n, P], padded on the left with 0; completions int64 [n, C], padded on the right; prompt_lengths, lengths int64 [n]; old_logprobs
    float32 [n, C], of the policy that sampled; advantages float32 [n].
    """
    with np.load(file) as arrays:
        return dict(arrays)


def masks(arrays: dict[str, np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """(prompt mask, completion mask), bool, 1 on tokens."""
    width, length = arrays["prompts"].shape[1], arrays["completions"].shape[1]
    return np.arange(width) >= width - arrays["prompt_lengths"][:, None], np.arange(length) < arrays["lengths"][:, None]
