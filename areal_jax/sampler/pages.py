"""Which pages of the KV cache are free, and how many hold each of the others. On the host alone.

Invariants:
* A page is free or held by at least one; page 0 (``state.SCRAP``) is neither and is never given out.
* free + held = pages − 1, always.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from areal_jax.sampler.state import SCRAP


class PagePool:
    """The pages of one engine.

    Args:
      pages: all of them, the scrap page included.
    """

    def __init__(self, pages: int):
        self._holders = np.zeros(pages, np.int64)
        self._free = list(range(pages - 1, SCRAP, -1))

    @property
    def free(self) -> int:
        return len(self._free)

    @property
    def held(self) -> int:
        return len(self._holders) - 1 - len(self._free)

    def take(self, count: int) -> list[int]:
        """So many free pages, each held once.

        Raises:
          ValueError: there are fewer; ask ``free`` before.
        """
        if count > len(self._free):
            raise ValueError(f"{count} pages are asked for and {len(self._free)} are free; preempt a sequence first")
        pages = [self._free.pop() for _ in range(count)]
        self._holders[pages] = 1
        return pages

    def share(self, pages: Iterable[int]) -> None:
        """One more holder for each of these pages."""
        for page in pages:
            if not self._holders[page]:
                raise ValueError(f"page {page} is free and cannot be shared")
            self._holders[page] += 1

    def release(self, pages: Iterable[int]) -> None:
        """One holder less for each of these pages; those without one are free again."""
        for page in pages:
            if not self._holders[page]:
                raise ValueError(f"page {page} is free already")
            self._holders[page] -= 1
            if not self._holders[page]:
                self._free.append(page)
