"""Checkpoints of a run: the device state and the JSON facts that belong to it, together or not at all.

Invariants:
* A checkpoint is visible only when it is whole: it is written under a temporary name and renamed last, and an older one is
  deleted only after that. A process killed at any moment leaves the newest whole checkpoint as ``latest()``.
* ``save`` returns when the state may be donated; the writing goes on in the background, and its failure is raised by the next call.
* What is restored has the names, shapes and types that were asked for, on any mesh; anything else is refused by name.

One thread uses a ``Checkpointer``.
"""

from __future__ import annotations

import json
import pathlib
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import jax
import orbax.checkpoint as ocp

STATE, META = "state", "meta"
WRITE_DEADLINE_S = 600.0
"""Longest that the writing of one checkpoint may take."""


class CheckpointError(RuntimeError):
    """A checkpoint could not be written or read; the text names the directory, the cause and the remedy."""


class Checkpointer:
    """Saves and restores checkpoints under one directory.

    Args:
      directory: made if absent; one folder a step. What a killed process left half-written there is removed.
      keep: how many of the newest checkpoints stay.

    Raises:
      CheckpointError: the directory cannot be made or written.
    """

    def __init__(self, directory: str | pathlib.Path, keep: int = 2):
        self.directory = pathlib.Path(directory).absolute()
        with self._named("open the checkpoints"):
            self.directory.mkdir(parents=True, exist_ok=True)
            probe = self.directory / ".writable"
            probe.touch()
            probe.unlink()
            self._manager = ocp.CheckpointManager(
                self.directory,
                options=ocp.CheckpointManagerOptions(
                    preservation_policy=ocp.checkpoint_managers.LatestN(keep),
                    cleanup_tmp_directories=True,
                    enable_async_checkpointing=True,
                ),
                item_handlers={STATE: ocp.StandardCheckpointHandler(), META: ocp.JsonCheckpointHandler()},
            )

    def save(self, step: int, state: Any, meta: Mapping[str, Any]) -> bool:
        """Starts to write a checkpoint; waits first for the one that is being written.

        Args:
          step: names it; larger than those before.
          state: tree of arrays. They are copied to the host before this returns.
          meta: JSON-able facts (counters, iterator state, journal offset, ...), restored exactly as JSON keeps them.

        Returns:
          False when a checkpoint of this step exists already; that one stays as it is.

        Raises:
          CheckpointError: this or the previous checkpoint could not be written.
          TypeError: ``meta`` is not JSON-able.
        """
        meta = json.loads(json.dumps(dict(meta)))
        self.wait(WRITE_DEADLINE_S)
        if step in self.steps():
            return False
        with self._named(f"save the checkpoint of step {step}"):
            return self._manager.save(step, args=ocp.args.Composite(**{STATE: ocp.args.StandardSave(state), META: ocp.args.JsonSave(meta)}), force=True)

    def latest(self) -> int | None:
        """Step of the newest whole checkpoint; None when there is none."""
        return max(self.steps(), default=None)

    def steps(self) -> list[int]:
        """Steps of all whole checkpoints on the disk, rising; one that is being written is not among them."""
        return sorted(ocp.utils.checkpoint_steps(self.directory))

    def restore(self, step: int, abstract: Any) -> tuple[Any, dict[str, Any]]:
        """Reads a checkpoint.

        Args:
          step: one of ``steps()``.
          abstract: tree of ``jax.ShapeDtypeStruct`` with shardings (``abstract_like``), on any mesh of any process of the host.

        Returns:
          (state, meta): arrays placed as ``abstract`` says, and the JSON facts.

        Raises:
          CheckpointError: there is no such checkpoint, it cannot be read, or it holds other names, shapes or types.
        """
        if step not in self.steps():
            raise CheckpointError(f"'{self.directory}' must hold a checkpoint of step {step}; it holds {self.steps() or 'none'}; resume from one of these")
        self._check_like(step, abstract)
        with self._named(f"restore the checkpoint of step {step}"):
            restored = self._manager.restore(step, args=ocp.args.Composite(**{STATE: ocp.args.StandardRestore(abstract), META: ocp.args.JsonRestore()}))
        return restored[STATE], restored[META]

    def meta(self, step: int) -> dict[str, Any]:
        """The JSON facts of a checkpoint alone."""
        with self._named(f"read the checkpoint of step {step}"):
            return self._manager.restore(step, args=ocp.args.Composite(**{META: ocp.args.JsonRestore()}))[META]

    def wait(self, timeout_s: float | None = None) -> None:
        """Waits until nothing is being written.

        Raises:
          CheckpointError: the writing failed, or did not end in time.
        """
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        while deadline is not None and self._manager.is_saving_in_progress():
            if time.monotonic() > deadline:
                raise CheckpointError(
                    f"a checkpoint under '{self.directory}' was to be written within {timeout_s} s and is not; "
                    "the previous one is whole; look at the disk, or allow more time"
                )
            time.sleep(0.005)
        try:
            with self._named("write a checkpoint"):
                self._manager.wait_until_finished()
                self._manager.check_for_errors()
        except CheckpointError:
            self._manager.reload()  # it has counted the failed one already, and the one that would have made way for it as gone
            raise

    def close(self) -> None:
        """Ends the writing and frees the threads.

        Raises:
          CheckpointError: the last checkpoint could not be written.
        """
        try:
            self.wait(WRITE_DEADLINE_S)
        finally:
            with self._named("close the checkpoints"):
                self._manager.close()

    def _check_like(self, step: int, abstract: Any) -> None:
        with self._named(f"read the checkpoint of step {step}"):
            stored = _signature(self._manager.item_metadata(step)[STATE])
        wanted = _signature(abstract)
        for name in sorted(stored.keys() | wanted.keys()):
            if stored.get(name) != wanted.get(name):
                raise CheckpointError(
                    f"the checkpoint of step {step} under '{self.directory}' must hold '{name}' as {wanted.get(name, 'absent')}; "
                    f"it holds {stored.get(name, 'none')}; resume with the configuration it was written with, or take another --workdir"
                )

    @contextmanager
    def _named(self, what: str) -> Iterator[None]:
        try:
            yield
        except CheckpointError:
            raise
        except Exception as error:
            raise CheckpointError(f"could not {what} under '{self.directory}': {error}; free or unlock the disk, or choose another --workdir") from error


def abstract_like(state: Any) -> Any:
    """Shapes, types and shardings of a tree of arrays, to restore into."""
    return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding), state)


def _signature(tree: Any) -> dict[str, str]:
    """'type[shape]' by name; names are alike for dataclasses, tuples and the dicts and lists that they are stored as."""
    return {
        jax.tree_util.keystr(path, simple=True, separator="/"): f"{leaf.dtype}{list(leaf.shape)}" for path, leaf in jax.tree_util.tree_leaves_with_path(tree)
    }
