"""Counts XLA compilations, so that a steady run can be shown to have none.

Invariant: a program that is made counts once, whether XLA compiled it or the persistent cache held it; a call that reuses a program counts nothing.
"""

from __future__ import annotations

import threading

from jax import monitoring

COMPILE_EVENT = "/jax/core/compile/backend_compile_duration"


class CompileCounter:
    """Listens from its creation until ``close``; counts the compilations of all threads.

    Attributes:
      count: programs made so far.
      seconds: time spent on them.
      recent: names of the functions compiled since ``mark_steady`` (at most 20), to find a culprit.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.count = 0
        self.seconds = 0.0
        self.recent: list[str] = []
        self._steady_from: int | None = None
        monitoring.register_event_duration_secs_listener(self._heard)

    def _heard(self, event: str, duration_secs: float, **details: str | int) -> None:
        if event != COMPILE_EVENT:
            return
        with self._lock:
            self.count += 1
            self.seconds += duration_secs
            if self._steady_from is not None and len(self.recent) < 20:
                self.recent.append(str(details.get("fun_name", "unnamed")))

    def mark_steady(self) -> None:
        """From here on a compilation is one too many."""
        with self._lock:
            self._steady_from = self.count
            self.recent = []

    @property
    def steady_state(self) -> int:
        """Compilations since ``mark_steady``; 0 before it."""
        return 0 if self._steady_from is None else self.count - self._steady_from

    def metrics(self) -> dict[str, int]:
        """The two metrics rows hold."""
        return {"compile/count": self.count, "compile/steady_state": self.steady_state}

    def close(self) -> None:
        """Stops listening; call once."""
        monitoring.unregister_event_duration_listener(self._heard)
