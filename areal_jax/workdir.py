"""The directory of a run: proved writable before work starts, used by one process at a time, bound to one configuration once it holds checkpoints."""

from __future__ import annotations

import importlib.util
import json
import os
import pathlib
from collections.abc import Iterator
from typing import IO, Any

from areal_jax.config import Config, ConfigError

_LOCKS: dict[pathlib.Path, IO[str]] = {}
"""Lock files of the directories that this process has opened; closed with the process, however it ends."""


def open_workdir(workdir: pathlib.Path, config: Config) -> None:
    """Makes the run's directory, proves that it can be written, takes it for this process and saves the configuration.

    Raises:
      ConfigError: the directory cannot be made or written, another process uses it, or it holds checkpoints of another configuration.
    """
    try:
        workdir.mkdir(parents=True, exist_ok=True)
        _take(workdir)
        saved = workdir / "config.json"
        before = json.loads(saved.read_text()) if saved.exists() else None
        if before and any(any((workdir / part).glob("[0-9]*")) for part in ("warmup", "checkpoints")):
            _same_run(before, json.loads(_text(config)), workdir)
        save_config(workdir, config)
    except (OSError, json.JSONDecodeError) as error:
        raise ConfigError(f"the work directory must be writable; '{workdir}': {error}; choose another by --workdir=DIR") from error


def save_config(workdir: pathlib.Path, config: Config) -> None:
    """Writes ``config.json``, whole or not at all."""
    temporary = workdir / "config.json.tmp"
    with open(temporary, "w") as stream:
        stream.write(_text(config))
        stream.flush()
        os.fsync(stream.fileno())
    os.replace(temporary, workdir / "config.json")


def _text(config: Config) -> str:
    return json.dumps(config.to_dict(), indent=2, sort_keys=True, default=list) + "\n"


def _take(workdir: pathlib.Path) -> None:
    """Locks the directory; where there are no such locks (Windows) two processes are not told apart."""
    if importlib.util.find_spec("fcntl") is None or workdir.resolve() in _LOCKS:
        return
    import fcntl

    lock = open(workdir / ".lock", "w")  # noqa: SIM115  kept open for the life of the process
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        lock.close()
        raise ConfigError(f"one process at a time may use a work directory; another one is using '{workdir}'; wait for it or choose another") from error
    _LOCKS[workdir.resolve()] = lock


MAY_CHANGE = (
    *("telemetry.", "checkpoint.", "eval.", "serve.", "cluster.", "reward.", "trainer.steps", "rollout.wait_timeout_s", "model.repository"),
    *("sft.eval_every", "sft.checkpoint_every"),
    *("model.attention", "model.scan_layers", "trainer.remat", "trainer.logprob_chunk", "sft.micro_batch_rows"),  # how it is computed, not what
)
"""Keys that a resumed run may set anew."""
AUTOMATIC = ("trainer.micro_batch_tokens", "sft.row_tokens", "sft.steps")
"""Keys that the program settles when they are 0 or None."""


def _same_run(old: dict[str, Any], new: dict[str, Any], workdir: pathlib.Path) -> None:
    def flat(tree: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
        for name, value in tree.items():
            yield from flat(value, f"{prefix}{name}.") if isinstance(value, dict) else [(prefix + name, value)]

    before, after = dict(flat(old)), dict(flat(new))
    changed = [k for k in sorted(before.keys() | after.keys()) if before.get(k) != after.get(k) and not k.startswith(MAY_CHANGE)]
    changed = [k for k in changed if not (k in AUTOMATIC and not (before.get(k) and after.get(k)))]
    if changed:
        k = changed[0]
        raise ConfigError(
            f"'{workdir}' holds a run with '{k}' = {before.get(k)!r}, not {after.get(k)!r}; a resumed run keeps its configuration: "
            "take the same values or another --workdir"
        )
