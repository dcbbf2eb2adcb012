"""Rules of the ``sft`` section that join several keys.

Invariant: nothing here imports JAX.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any


def sft_rules(c: Any) -> Iterator[tuple[bool, str]]:
    """(broken, message) of every rule about fine-tuning on rows of one's own."""
    s = c.sft
    for key, wanted in (
        ("objective", s.objective != "sft"),
        ("epochs", s.epochs is not None),
        ("learn_turns", s.learn_turns != "all"),
        ("eval_data", bool(s.eval_data)),
        ("eval_fraction", s.eval_fraction > 0),
        ("eval_every", s.eval_every > 0),
    ):
        yield (
            wanted and not s.data,
            f"'sft.{key}' is about rows of your own, and 'sft.data' is empty; got {s[key]!r}; name the rows by sft.data, or leave the key",
        )
    yield bool(s.data) and bool(s.path), f"'sft.data' is to be learnt and 'sft.path' was learnt before; got '{s.data}' and '{s.path}'; set one of them"
    yield (
        bool(s.data) and s.epochs is not None and s.steps > 0,
        f"'sft.epochs' and 'sft.steps' both say how long to learn 'sft.data'; got {s.epochs} and {s.steps}; set one of them",
    )
    yield (
        bool(s.data) and s.epochs is None and s.steps == 0,
        "'sft.steps' must be at least 1 to learn 'sft.data'; got 0; raise it, or set sft.epochs instead",
    )
    yield (
        s.eval_every > 0 and not (s.eval_data or s.eval_fraction),
        f"'sft.eval_every' = {s.eval_every} needs held-out rows; give them by sft.eval_data, or a share by sft.eval_fraction",
    )
    yield (
        s.micro_batch_rows > s.rows,
        f"'sft.micro_batch_rows' must be at most 'sft.rows' = {s.rows}, of which it is a part; got {s.micro_batch_rows}; lower it, or set 0 for all",
    )
    yield (
        s.objective == "dpo" and s.learn_turns != "all",
        f"'sft.learn_turns' is about conversations, and 'sft.objective=dpo' learns answers; got '{s.learn_turns}'; leave it at all",
    )
    yield (
        s.objective == "sft" and s.label_smoothing > 0,
        f"'sft.label_smoothing' is DPO's, and 'sft.objective' is sft; got {s.label_smoothing}; set it to 0, or sft.objective=dpo",
    )
