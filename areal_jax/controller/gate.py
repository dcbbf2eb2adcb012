"""Admission: how many groups may be submitted now (paper equation 3).

Invariants:
* A submission is admitted only while ⌊(N_r − 1)/B⌋ ≤ i + η, where N_r counts the new group, and not the lost or dropped ones.
* No group is admitted that no step will train: N_r ≤ total_steps·B.
* The gate has no state of its own: a resumed run that knows i and its live groups has the right capacity at once.
"""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class StalenessGate:
    """The limits of admission. The unit of every number is the group (a prompt with its samples).

    Attributes:
      groups_per_step: B.
      max_staleness: η in trainer steps; None: unbounded.
      max_concurrent_groups: most groups being generated at once; None: as many as η admits, and B where η is None.
      total_steps: steps of the whole run; None: endless.
    """

    groups_per_step: int
    max_staleness: int | None
    max_concurrent_groups: int | None = None
    total_steps: int | None = None

    def capacity(self, *, version: int, submitted: int, running: int) -> int:
        """Groups that may be admitted now, one after another, at the same version.

        Args:
          version: i, the version of the weights that will generate them, in trainer steps.
          submitted: N_r before the next submission: groups trained and groups outstanding.
          running: of those, the groups with unfinished generations.

        Returns:
          A count from 0: the smallest of what equation 3, the end of the run and the concurrency limit leave.
        """
        limits = []
        if self.max_staleness is not None:
            limits.append((version + self.max_staleness + 1) * self.groups_per_step - submitted)
        if self.total_steps is not None:
            limits.append(self.total_steps * self.groups_per_step - submitted)
        concurrent = self.max_concurrent_groups
        if concurrent is None and self.max_staleness is None:
            concurrent = self.groups_per_step
        if concurrent is not None:
            limits.append(max(1, concurrent) - running)
        return max(0, min(limits))
