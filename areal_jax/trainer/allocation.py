"""Which sequences share a row, and which rows a data-parallel shard computes.

Invariants:
* Every sequence is placed once; a bin holds at most its capacity, but for a longer sequence, which sits alone.
* A balanced allocation has at most the bins of Algorithm 1, and its greatest work is at most that of Algorithm 1 in as many bins.
* Attention counts: work is that of matrix products, linear in tokens, and of causal attention, quadratic in a sequence's length.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence

import numpy as np

NEVER = np.iinfo(np.int64).max
Lengths = Sequence[int] | np.ndarray
Bins = list[list[int]]
"""For each bin the indices of its sequences."""


@dataclasses.dataclass(frozen=True)
class Work:
    """Of sequences, in units of one token's matrix products.

    Attributes:
      span: positions that a token attends to for as many FLOPs as all its matrix products take (``models.work.attention_span``); infinite where
        attention does not count.
    """

    span: float = math.inf

    def attention(self, lengths: Lengths) -> np.ndarray:
        """Float64 [n], of causal attention within each sequence: n (n + 1) / 2 positions, 1 / span each."""
        n = np.asarray(lengths, np.float64)
        return n * (n + 1.0) / 2.0 / self.span

    def of(self, lengths: Lengths) -> np.ndarray:
        """Float64 [n], of each whole sequence."""
        return np.asarray(lengths, np.float64) + self.attention(lengths)


def allocate(lengths: Lengths, capacity: int, k_min: int = 1) -> Bins:
    """Dynamic batching, Algorithm 1 of arXiv 2505.24298.

    Longest first; a sequence opens a new micro-batch while fewer than ``k_min`` exist or none can hold it, else it joins, among
    those that can hold it, the one with the fewest sequences (of several, the one with the smallest total).

    Args:
      lengths: [n] token counts.
      capacity: most tokens of a micro-batch. A longer sequence sits alone.
      k_min: least number of micro-batches (reached only if there are so many sequences).
    """
    lengths = np.asarray(lengths, np.int64)
    bins: Bins = []
    totals, counts = np.zeros(len(lengths), np.int64), np.zeros(len(lengths), np.int64)
    for index in np.argsort(-lengths, kind="stable"):
        opened, length = len(bins), lengths[index]
        place = opened
        if opened >= max(1, k_min):
            rank = np.where(totals[:opened] + length <= capacity, counts[:opened] * (capacity + 1) + totals[:opened], NEVER)
            best = int(np.argmin(rank))
            place = best if rank[best] != NEVER else opened
        if place == opened:
            bins.append([])
        bins[place].append(int(index))
        totals[place] += length
        counts[place] += 1
    return bins


def best_fit(lengths: Lengths, capacity: int) -> Bins:
    """Longest first, each into the bin that it fills best: few bins (at most 11/9 of the fewest possible, and 4)."""
    lengths = np.asarray(lengths, np.int64)
    bins: Bins = []
    room = np.zeros(len(lengths), np.int64)
    for index in np.argsort(-lengths, kind="stable"):
        opened, length = len(bins), lengths[index]
        left = np.where(room[:opened] >= length, room[:opened], NEVER)
        place = int(np.argmin(left)) if opened and left.min() != NEVER else opened
        if place == opened:
            bins.append([])
            room[place] = capacity
        bins[place].append(int(index))
        room[place] -= length
    return bins


def balanced(lengths: Lengths, capacity: int, work: Work, bins: Callable[[int], int] = lambda needed: needed) -> Bins:
    """Few bins of nearly equal work.

    The number of bins is that of best fit or of Algorithm 1, whichever has fewer. Over so many, most work first, each sequence goes to the bin with the
    least work that can hold it (Graham's longest processing time; within 4/3 of the best where capacity does not bind). Where that finds no place, or
    is worse, the bins of the other two are taken.

    Args:
      lengths: [n] token counts, none above ``capacity``.
      capacity: most tokens of a bin.
      work: of sequences.
      bins: from the number of bins needed to the number of bins that will be computed.

    Returns:
      ``bins(needed)`` bins; some may be empty.
    """
    candidates = [best_fit(lengths, capacity), allocate(lengths, capacity)]
    count = bins(min(map(len, candidates)))
    spread = _spread(np.asarray(lengths, np.int64), capacity, work.of(lengths), count)
    fitting = ([spread] if spread else []) + [found + [[] for _ in range(count - len(found))] for found in candidates if len(found) <= count]
    each = work.of(lengths)
    return min(fitting, key=lambda found: max((float(each[indices].sum()) for indices in found), default=0.0))


def _spread(lengths: np.ndarray, capacity: int, work: np.ndarray, count: int) -> Bins | None:
    """Most work first, each to the bin with the least that can hold it; None where none can."""
    bins: Bins = [[] for _ in range(count)]
    loads, room = np.zeros(count), np.full(count, capacity, np.int64)
    for index in np.argsort(-work, kind="stable"):
        rank = np.where(room >= lengths[index], loads, np.inf)
        place = int(np.argmin(rank)) if count else 0
        if not count or rank[place] == np.inf:
            return None
        bins[place].append(int(index))
        loads[place] += work[index]
        room[place] -= lengths[index]
    return bins


def deal_rows(work: Lengths, sizes: Sequence[int], shards: int) -> list[list[int]]:
    """Rows of nearly equal work for the data-parallel shards of every micro-batch.

    Rows of like work make a micro-batch; within it, most work first, each goes to the shard with the least that has a place left. A micro-batch takes as
    long as its slowest shard.

    Args:
      work: [rows] of each row.
      sizes: rows of each micro-batch, multiples of ``shards`` that sum to the number of rows.
      shards: that take equal, consecutive parts of a micro-batch's rows.

    Returns:
      For each micro-batch its rows, in the order in which the shards take them.
    """
    work = np.asarray(work, np.float64)
    order = np.argsort(-work, kind="stable")
    dealt, start = [], 0
    for size in sizes:
        parts: list[list[int]] = [[] for _ in range(shards)]
        loads = np.zeros(shards)
        for row in order[start : start + size]:
            places = np.asarray([len(part) < size // shards for part in parts])
            shard = int(np.argmin(np.where(places, loads, np.inf)))
            parts[shard].append(int(row))
            loads[shard] += work[row]
        dealt.append([row for part in parts for row in part])
        start += size
    return dealt
