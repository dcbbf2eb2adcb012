"""The directory of a run: proved writable before work starts, and bound to one configuration once it holds checkpoints."""

from __future__ import annotations

import json
import os
import pathlib
from collections.abc import Iterator
from typing import Any

from areal_jax.config import Config, ConfigError


def open_workdir(workdir: pathlib.Path, config: Config) -> None:
    """Makes the run's directory, proves that it can be written and saves the resolved configuration.

    Raises:
      ConfigError: the directory cannot be made or written, or holds checkpoints of another configuration.
    """
    text = json.dumps(config.to_dict(), indent=2, sort_keys=True, default=list) + "\n"
    saved = workdir / "config.json"
    try:
        workdir.mkdir(parents=True, exist_ok=True)
        before = json.loads(saved.read_text()) if saved.exists() else None
        if before and any(any((workdir / part).glob("[0-9]*")) for part in ("warmup", "checkpoints")):
            _same_run(before, json.loads(text), workdir)
        temporary = workdir / "config.json.tmp"
        with open(temporary, "w") as stream:
            stream.write(text)
            stream.flush()
            os.fsync(stream.fileno())
        os.replace(temporary, saved)
    except (OSError, json.JSONDecodeError) as error:
        raise ConfigError(f"the work directory must be writable; '{workdir}': {error}; choose another by --workdir=DIR") from error


MAY_CHANGE = ("telemetry.", "checkpoint.", "trainer.steps", "rollout.wait_timeout_s", "eval.", "cluster.", "reward.")
"""Keys that a resumed run may set anew."""


def _same_run(old: dict[str, Any], new: dict[str, Any], workdir: pathlib.Path) -> None:
    def flat(tree: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
        for name, value in tree.items():
            yield from flat(value, f"{prefix}{name}.") if isinstance(value, dict) else [(prefix + name, value)]

    before, after = dict(flat(old)), dict(flat(new))
    changed = [k for k in sorted(before.keys() | after.keys()) if before.get(k) != after.get(k) and not k.startswith(MAY_CHANGE)]
    if changed:
        k = changed[0]
        raise ConfigError(
            f"'{workdir}' holds a run with '{k}' = {before.get(k)!r}, not {after.get(k)!r}; a resumed run keeps its configuration: "
            "take the same values or another --workdir"
        )
