"""The token ledger: every generated token is trained, dropped by name, buffered or in flight.

Invariants:
* ``generated`` is counted from the sampler's reports, ``trained`` and ``dropped`` from what left the controller; buffered and in flight are
  counted anew from the live groups each time. The four sources are independent, so a lost or doubled token shows as a residual.
* Nothing is dropped without a reason.

Unit: generated tokens.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Mapping

LOST_ON_RESUME = "lost_on_resume"
STALE = "stale"
ZERO_STD = "zero_std"


class LedgerError(RuntimeError):
    """generated ≠ trained + dropped + buffered + in flight."""


@dataclasses.dataclass
class Ledger:
    """Running totals since the start of the run, resumes included."""

    generated: int = 0
    trained: int = 0
    dropped: Counter[str] = dataclasses.field(default_factory=Counter)
    """Tokens by reason."""

    def drop(self, reason: str, tokens: int) -> None:
        """Books tokens as dropped.

        Raises:
          ValueError: the reason is empty.
        """
        if not reason:
            raise ValueError(f"a drop needs a reason; {tokens} tokens have none; name one such as '{STALE}'")
        self.dropped[reason] += tokens

    def balance(self, buffered: int, in_flight: int) -> LedgerBalance:
        """The account, with what the caller counted in its live groups."""
        return LedgerBalance(self.generated, self.trained, self.dropped.total(), buffered, in_flight)

    def to_dict(self) -> dict:
        """JSON-able."""
        return {"generated": self.generated, "trained": self.trained, "dropped": dict(self.dropped)}

    @classmethod
    def from_dict(cls, state: Mapping) -> Ledger:
        """The inverse of ``to_dict``."""
        return cls(state["generated"], state["trained"], Counter(state["dropped"]))


@dataclasses.dataclass(frozen=True)
class LedgerBalance:
    """The account at one moment, in tokens."""

    generated: int
    trained: int
    dropped: int
    buffered: int
    in_flight: int

    @property
    def residual(self) -> int:
        """Tokens that the account cannot place; must be 0."""
        return self.generated - self.trained - self.dropped - self.buffered - self.in_flight

    def metrics(self) -> dict[str, int]:
        """By their names in metrics.jsonl."""
        values = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)} | {"residual": self.residual}
        return {f"ledger/{name}": value for name, value in values.items()}

    def check(self, detail: str = "") -> None:
        """Raises LedgerError, with the numbers, unless the residual is 0."""
        if self.residual:
            raise LedgerError(
                f"the token ledger must close: generated {self.generated} = trained {self.trained} + dropped {self.dropped} + buffered {self.buffered} "
                f"+ in flight {self.in_flight}, but {self.residual} tokens are {'missing' if self.residual > 0 else 'too many'}"
                f"{'; ' + detail if detail else ''}; the run's data cannot be trusted: resume from the last checkpoint and report this"
            )
