"""The part of the controller that a checkpoint saves: versions, counts, ledger and the outstanding groups.

Invariants:
* ``from_dict(to_dict())`` is exact, through JSON too, but for tokens whose partials were not given: those are booked as lost on resume.
* N_r is not stored: it is trained plus outstanding, so a resumed run can neither burst nor starve.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Mapping
from typing import Any

from areal_jax.controller.answers import ControllerError
from areal_jax.controller.groups import Group, Partial
from areal_jax.controller.ledger import LOST_ON_RESUME, Ledger, LedgerBalance
from areal_jax.controller.schedule import Candidate

SNAPSHOT_FORMAT = 2


def check_arguments(groups_per_step: int, group_size: int, max_new_tokens: int, max_staleness: int | None, on_overdue: str, refills_per_step: int) -> None:
    """Raises ValueError for arguments of a controller that cannot be."""
    if on_overdue not in ("wait", "drop", "keep"):
        raise ValueError(f"on_overdue must be 'wait', 'drop' or 'keep'; got {on_overdue!r}")
    if refills_per_step and group_size < 2:
        raise ValueError(f"dynamic sampling compares the samples of a group, so group_size must be at least 2; got {group_size}; set refills_per_step=0")
    if min(groups_per_step, group_size, max_new_tokens) < 1 or (max_staleness is not None and max_staleness < 0):
        raise ValueError(
            "groups_per_step, group_size and max_new_tokens must be at least 1 and max_staleness at least 0; "
            f"got {groups_per_step}, {group_size}, {max_new_tokens}, {max_staleness}"
        )


@dataclasses.dataclass
class ControllerState:
    """What a resumed run continues from.

    Attributes:
      version: i, the trainer's version: steps done.
      active_version: version of the weights that the sampler runs.
      last_admitted: index of the last admitted prompt, -1 before the first.
      admitted: groups admitted since the start of the run, dropped ones included.
      drop_counts: dropped groups by reason; samples for 'lost_on_resume'.
      refilled: groups dropped by dynamic sampling since the last step was trained.
      ledger: the running totals.
      groups: admitted and neither trained nor dropped, by id.
    """

    version: int = 0
    active_version: int = 0
    last_admitted: int = -1
    admitted: int = 0
    drop_counts: Counter[str] = dataclasses.field(default_factory=Counter)
    refilled: int = 0
    ledger: Ledger = dataclasses.field(default_factory=Ledger)
    groups: dict[int, Group] = dataclasses.field(default_factory=dict)

    def candidates(self) -> list[Candidate]:
        """The outstanding groups as the schedule sees them."""
        return [Candidate(g.group_id, g.version, g.ready) for g in self.groups.values()]

    def check_version(self, group: Group, version: int) -> None:
        """Raises ControllerError unless a token of the group can have this version."""
        if not group.version <= version <= self.version:
            raise ControllerError(
                f"tokens of group {group.group_id} have versions from {group.version}, its oldest, to {self.version}, the trainer's; got {version}; "
                "report weights_active when the weights go in, before anything they generate is admitted"
            )

    def balance(self) -> LedgerBalance:
        """The account, in tokens: buffered are those of finished samples, in flight those of unfinished ones."""
        samples = [s for g in self.groups.values() for s in g.samples]
        buffered = sum(s.trajectory.length for s in samples if s.trajectory is not None)
        return self.ledger.balance(buffered, sum(s.generated for s in samples if not s.finished))

    def check(self) -> None:
        """Raises LedgerError, naming the numbers and the samples at fault, unless the ledger closes."""
        wrong = [
            f"sample {(g.group_id, i)}: {s.generated} tokens reported, {s.tokens} delivered"
            for g in self.groups.values()
            for i, s in enumerate(g.samples)
            if s.tokens != s.generated
        ]
        self.balance().check("; ".join(wrong[:4]))

    def to_dict(self, partials: Mapping[tuple[int, int], Partial]) -> dict[str, Any]:
        """JSON-able."""
        return {
            "format": SNAPSHOT_FORMAT,
            "version": self.version,
            "active_version": self.active_version,
            "last_admitted": self.last_admitted,
            "admitted": self.admitted,
            "drop_counts": dict(self.drop_counts),
            "refilled": self.refilled,
            "ledger": self.ledger.to_dict(),
            "groups": [group.to_dict(partials) for group in self.groups.values()],
        }

    @classmethod
    def from_dict(cls, snapshot: Mapping[str, Any]) -> tuple[ControllerState, int]:
        """The inverse of ``to_dict``.

        Returns:
          The state, and how many tokens of unfinished samples the snapshot does not hold; they are booked as dropped.

        Raises:
          ValueError: the snapshot has another format.
        """
        if snapshot.get("format") != SNAPSHOT_FORMAT:
            found = snapshot.get("format")
            raise ValueError(f"the controller's snapshot must have format {SNAPSHOT_FORMAT}; got {found}; resume with the release that wrote it")
        state = cls(
            version=snapshot["version"],
            active_version=snapshot["active_version"],
            last_admitted=snapshot["last_admitted"],
            admitted=snapshot["admitted"],
            drop_counts=Counter(snapshot["drop_counts"]),
            refilled=snapshot["refilled"],
            ledger=Ledger.from_dict(snapshot["ledger"]),
        )
        lost = Counter[str]()
        for saved in snapshot["groups"]:
            group, lost_of_samples = Group.from_dict(saved)
            state.groups[group.group_id] = group
            lost["tokens"] += sum(lost_of_samples)
            lost["samples"] += sum(n > 0 for n in lost_of_samples)
        if lost["tokens"]:
            state.ledger.drop(LOST_ON_RESUME, lost["tokens"])
            state.drop_counts[LOST_ON_RESUME] += lost["samples"]
        return state, lost["tokens"]
