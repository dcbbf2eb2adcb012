"""The parameters of earlier versions, and the log-probs that their tokens have in the trainer's own program (``rollout.exact_logprobs``).

Invariants:
* Between two steps exactly the versions are here that an older token of the next batch may carry: the last η before the trainer's, as far as there were.
* They are copies that no step overwrites, of the trainer's types and on its mesh; with adapters, of these alone.
* A token's log-prob is that of its whole packed micro-batch under the one version that sampled it; a version without tokens in it is not computed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np

from areal_jax.trainer.packing import MicroBatch
from areal_jax.trainer.step import Placement


def earlier_versions(config: Any) -> int:
    """How many versions before the trainer's are kept: η with ``rollout.exact_logprobs``, else none."""
    return config.rollout.max_staleness if config.rollout.exact_logprobs else 0


def versions_in(micro: MicroBatch) -> set[int]:
    """The versions that sampled a micro-batch's generated tokens; on the host."""
    return {int(version) for version in np.unique(micro.versions[micro.loss_mask > 0])}


class EarlierVersions:
    """Copies of the last versions' parameters, and scores under them.

    Args:
      most: η, so many versions are kept.
      here: of the trainer.
      programs: compiled, from ``programs.train_programs``: 'copy', ('proximal', rows) and ('choose', rows); none is used where ``most`` is 0.
    """

    def __init__(self, most: int, here: Placement, programs: Mapping[Any, Callable[..., Any]]):
        self.most, self._here, self._programs = most, here, programs
        self.params: dict[int, Any] = {}

    def names(self, version: int) -> dict[str, int]:
        """The versions that must be here before the step of ``version``, by their names in a checkpoint."""
        return {f"version_{v}": v for v in range(max(0, version - self.most), version)}

    def check(self, versions: set[int], version: int) -> None:
        """Refuses tokens of versions that are neither the trainer's ``version`` nor here.

        Raises:
          ValueError: names such a version.
        """
        for missing in sorted(versions - self.params.keys() - {version}):
            raise ValueError(
                f"'rollout.exact_logprobs' scores a token under the version that sampled it, so at version {version} that must be one of "
                f"{sorted({*self.params, version})}; got a token of version {missing}: raise 'rollout.max_staleness' = {self.most}, "
                "or set rollout.exact_logprobs=False"
            )

    def keep(self, version: int, params: Any) -> None:
        """Copies a version's parameters, which the step that follows overwrites; first drops what no later batch can need."""
        oldest = version + 1 - self.most
        self.params = {v: tree for v, tree in self.params.items() if v >= oldest}
        if self.most:
            self.params[version] = self._programs["copy"](params)

    def logprobs(self, micro: MicroBatch, versions: set[int], frozen: Any) -> Any:
        """Behaviour log-probs with those of tokens of earlier versions computed anew.

        Args:
          micro: on the device.
          versions: earlier ones that occur in it.
          frozen: the parameters that are not trained.

        Returns:
          float32 [rows, C]; other tokens have what ``micro`` has.
        """
        rows, logprobs = micro.tokens.shape[0], micro.behaviour_logprobs
        for version in sorted(versions):
            scored = self._programs["proximal", rows](self.params[version], frozen, micro)
            number = jax.device_put(np.int32(version), self._here.scalar)
            logprobs = self._programs["choose", rows](logprobs, micro.versions, number, scored)
        return logprobs
