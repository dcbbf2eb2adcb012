"""What the loop needs of a sampler, a trainer, a weight push and a reward service: all it knows of them.

Whatever has these methods plugs in: the real parts of one process, a remote worker, a stand-in of a test.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping
from typing import Any, Protocol

import numpy as np

from areal_jax.types import GenerationRequest, Prompt, TrainingBatch, WeightUpdate

Key = tuple[int, int]


class Sampler(Protocol):
    """Generates requests under weights that may change in mid-generation."""

    @property
    def version(self) -> int:
        """Version in use."""
        ...

    @property
    def statistics(self) -> Any:
        """Totals since the start."""
        ...

    def submit(self, requests: Iterable[GenerationRequest]) -> None: ...

    def publish(self, update: WeightUpdate) -> None: ...

    def cancel(self, keys: Iterable[Key]) -> None: ...

    def partials(self) -> Mapping[Key, tuple[np.ndarray, np.ndarray, np.ndarray]]: ...

    def close(self, timeout_s: float) -> None:
        """Ends what it runs by itself."""
        ...

    def run_once(self, wait_s: float = ...) -> bool:
        """One round of work, or an idle wait; reports by the callbacks it was made with."""
        ...


class Learner(Protocol):
    """Turns batches into new parameters."""

    @property
    def params(self) -> Any: ...

    @property
    def state(self) -> Any: ...

    def build(self, batch: TrainingBatch) -> Any: ...

    def step(self, packed: Any) -> Mapping[str, float | None]: ...


class Pusher(Protocol):
    """Moves parameters to the sampler."""

    def push(self, params: Any, version: int) -> WeightUpdate: ...


class Rewards(Protocol):
    """Checks responses; answers by a callback."""

    def submit(self, key: Hashable, response: str, answer: str, metadata: Mapping[str, Any]) -> None: ...

    def counts(self) -> Mapping[str, float]: ...

    @property
    def consecutive_failures(self) -> int: ...

    @property
    def last_cause(self) -> str: ...


class PromptStream(Protocol):
    """An endless stream of prompts whose place can be saved."""

    def __next__(self) -> Prompt: ...

    def get_state(self) -> dict[str, Any]: ...

    def set_state(self, state: dict[str, Any]) -> None: ...
