"""The most memory that a piece of a program held.

Invariant: what is read is the system's own count: the process's resident memory on a CPU, the allocator's on an accelerator.
"""

from __future__ import annotations

import pathlib
from typing import Any

PROCESS = pathlib.Path("/proc/self")


class PeakMemory:
    """Peak bytes since it was made, on a CPU of Linux; since the process began elsewhere, as ``since`` says.

    Attributes:
      since: 'here' or 'the start of the process'.
    """

    def __init__(self, device: Any):
        self._device = device
        self.since = "here" if device.platform == "cpu" and self._forget() else "the start of the process"

    @staticmethod
    def _forget() -> bool:
        """Makes the kernel count the peak anew; False where it does not let."""
        try:
            (PROCESS / "clear_refs").write_text("5")
        except OSError:
            return False
        return True

    def bytes(self) -> int | None:
        """So far; None where it cannot be known."""
        if self._device.platform != "cpu":
            return (self._device.memory_stats() or {}).get("peak_bytes_in_use")
        status = PROCESS / "status"
        lines = status.read_text().splitlines() if status.is_file() else []
        return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM:")), None)
