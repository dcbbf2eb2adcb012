"""How the process holds memory on a CPU.

Invariant: nothing is computed differently; only what is freed stays the process's own.
"""

from __future__ import annotations

import ctypes
import sys

TRIM_THRESHOLD, TOP_PAD, MMAP_MAX = -1, -2, -4
"""glibc's numbers of its parameters (malloc.h)."""
PAD_BYTES = 1 << 26


def keep_freed_memory() -> bool:
    """Keeps large freed blocks in the process, for the next step to use again.

    A compiled program's temporaries are one block, allocated anew for every run of it. glibc takes large blocks from the system and gives them back at
    once, so that every step pays for fresh pages, which on virtual machines can cost more than what is computed in them. The process stays as large as
    it ever was. To be called before the memory is used; other allocators are left as they are.

    Returns:
      Whether the allocator took the settings (glibc on Linux).
    """
    if not sys.platform.startswith("linux"):
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    return all(mallopt(parameter, value) == 1 for parameter, value in ((MMAP_MAX, 0), (TRIM_THRESHOLD, -1), (TOP_PAD, PAD_BYTES)))
