"""The trajectory stream: training batches as a Grain dataset.

Invariants:
* One element is one training step's batch, made at the moment it is asked for. Nothing is fetched ahead: a batch that waits in a hidden buffer ages,
  and the staleness bound holds at the step it was made for. So a prefetching transform does not belong after this stream.
* The state is the number of batches delivered, which is the trainer's step; the batches themselves are the controller's to save.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import grain

from areal_jax.types import TrainingBatch

Fetch = Callable[[], TrainingBatch | None]
"""Blocks until a batch is there, with its own deadline; None ends the stream."""


class TrajectoryStream(grain.IterDataset[TrainingBatch]):
    """Training batches in the order in which they are trained; all of Grain's transforms apply (``stream.map(pack)``).

    Args:
      fetch: gives the next batch; None ends the stream. What it raises reaches the one who iterates.
    """

    def __init__(self, fetch: Fetch):
        super().__init__()
        self._fetch = fetch

    def __iter__(self) -> TrajectoryIterator:
        return TrajectoryIterator(self._fetch)

    def __str__(self) -> str:
        return "TrajectoryStream"


class TrajectoryIterator(grain.DatasetIterator[TrainingBatch]):
    """Iterator of a ``TrajectoryStream``."""

    def __init__(self, fetch: Fetch):
        super().__init__()
        self._fetch = fetch
        self._step = 0
        self._ended = False

    def __next__(self) -> TrainingBatch:
        """The next batch.

        Raises:
          StopIteration: ``fetch`` gave None, now or before.
          ValueError: the batch is not the one of this step: one was lost or came twice.
        """
        batch = None if self._ended else self._fetch()
        if batch is None:
            self._ended = True
            raise StopIteration
        if batch.step != self._step:
            raise ValueError(f"the stream is at step {self._step} but got the batch of step {batch.step}; set_state({{'step': n}}) to the trainer's step")
        self._step += 1
        return batch

    def get_state(self) -> dict[str, Any]:
        """{'step': batches delivered}, JSON-able."""
        return {"step": self._step}

    def set_state(self, state: dict[str, Any]) -> None:
        """Continues at a step, after a resume."""
        self._step = int(state["step"])
        self._ended = False
