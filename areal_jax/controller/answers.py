"""What the controller answers when there is no batch, and the errors it raises."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping


class ControllerError(RuntimeError):
    """An event that cannot be: a caller broke the protocol. The text names the rule, the value and the remedy."""


class StalenessError(ControllerError):
    """A batch would train a token that is older than η."""


@dataclasses.dataclass(frozen=True)
class Waiting:
    """No batch yet.

    Attributes:
      kind: 'batch': fewer than B groups are ready; 'due': B are ready, but training them would push an unready group past η.
      missing: how many of ``group_ids`` have to become ready (or, for 'batch', groups that are still to be admitted).
      group_ids: the unready groups waited for, oldest first.
      lacks: for each of them, the sample indices that lack 'tokens' and those that lack a 'reward'.
    """

    kind: str
    missing: int
    group_ids: tuple[int, ...]
    lacks: Mapping[int, Mapping[str, tuple[int, ...]]]

    def describe(self) -> str:
        """One sentence for a time-out's message."""
        parts = [
            f"group {g} lacks " + " and ".join(f"{what} of samples {list(samples)}" for what, samples in self.lacks[g].items() if samples)
            for g in self.group_ids[:8]
        ]
        rest = len(self.group_ids) - 8
        return (
            f"waiting for {self.missing} {'due ' if self.kind == 'due' else ''}groups: "
            + ("; ".join(parts) or "none is admitted")
            + (f"; and {rest} more" if rest > 0 else "")
        )
