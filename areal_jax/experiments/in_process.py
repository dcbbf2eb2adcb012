"""Rewards by a call: for verifiers that are pure functions of short texts, and a run in virtual time, which waits for nobody.

Invariant: what a verifier raises reaches the caller; there is no time limit and no failed check.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Mapping
from typing import Any

from areal_jax.rewards.service import RewardResult


class DirectRewards:
    """A reward service (``controller.protocols.Rewards``) that answers inside ``submit``.

    Args:
      verify: (response, answer, metadata) → components; ``correct`` is the reward.
    """

    consecutive_failures = 0
    last_cause = ""

    def __init__(self, verify: Callable[[str, str, Mapping[str, Any]], Mapping[str, float]]):
        self._verify = verify
        self.on_result: Callable[[RewardResult], None] = lambda result: None

    def submit(self, key: Hashable, response: str, answer: str, metadata: Mapping[str, Any]) -> None:
        """Checks the response and calls ``on_result``."""
        begun = time.monotonic()
        components = dict(self._verify(response, answer, metadata))
        seconds = time.monotonic() - begun
        self.on_result(RewardResult(key, components["correct"], components, None, "", seconds, seconds))

    def counts(self) -> Mapping[str, float]:
        """Nothing is counted here."""
        return {}
