"""What must be on this machine before a run starts; a plan for other machines does without it.

Invariant: nothing here imports JAX.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterator
from typing import Any


def presence_rules(c: Any) -> Iterator[tuple[bool, str]]:
    """(broken, message) of every rule about what must be here to run, which a plan does without."""
    m = c.model
    yield c.task.name == "jsonl" and not c.task.path, "'task.name=jsonl' needs 'task.path', a JSONL file of question and answer rows; got an empty path"
    yield (
        not c.reward.verifier,
        "'reward.verifier' must name the function that checks an answer, as in package.module:function; this task has none of its own; got ''; "
        "write one that returns {'correct': …} for (response, answer, metadata)",
    )
    module, colon, function = c.reward.verifier.partition(":")
    yield (
        not (module and colon and function) or importlib.util.find_spec(module.partition(".")[0]) is None,
        f"'reward.verifier' must be package.module:function of something importable; got '{c.reward.verifier}'; install it or put its folder on PYTHONPATH",
    )
    for key in ("path", "eval_path"):
        path = c.task[key]
        yield bool(path) and not os.path.isfile(path), f"'task.{key}' must be a readable file; '{path}' is not there"
    yield bool(c.sft.path) and not os.path.isdir(c.sft.path), f"'sft.path' must be the warmup directory of another run; '{c.sft.path}' is not there"
    for key in ("data", "eval_data"):
        path = c.sft[key]
        yield bool(path) and not os.path.exists(path), f"'sft.{key}' must be a .jsonl or .parquet file, or a directory of them; '{path}' is not there"
    found = "is a file; name its directory" if os.path.isfile(m.path) else "is not there"
    remedy = (
        f"; download {m.repository} into it (hf download {m.repository} --local-dir {m.path}), or name a copy of it"
        if m.repository and not os.path.isfile(m.path)
        else ""
    )
    yield (
        bool(m.path) and not os.path.isdir(m.path),
        f"'model.path' must be a directory with config.json, *.safetensors and tokenizer.json; '{m.path}' {found}{remedy}",
    )
