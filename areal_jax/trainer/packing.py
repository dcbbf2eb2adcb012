"""Sequences of different lengths, laid into rows of one static length.

Invariants:
* Every sequence lies in one row, whole; no row holds more than its capacity C.
* Index t of every array of a ``MicroBatch`` speaks of the same predicted token: ``targets[t]`` follows ``tokens[t]``.
* Rows come in few static counts (``row_counts``), so that a steady run compiles nothing new.
* Of a micro-batch every data-parallel shard takes as many rows, of nearly equal work (``allocation.deal_rows``).
* Groups stay whole: all samples of a group lie in one minibatch.

A sequence of n tokens (prompt and response) takes n - 1 positions: its last token is only ever a target.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from flax import struct

from areal_jax.trainer.allocation import Work, allocate, balanced, deal_rows
from areal_jax.types import TrainingBatch

TOKENS = Work()
"""Tokens alone."""
POLICIES = ("algorithm1", "balanced")
"""How sequences are given to rows: Algorithm 1 of arXiv 2505.24298, or ``allocation.balanced``."""


@struct.dataclass
class MicroBatch:
    """Packed rows that are computed together.

    Attributes:
      tokens: int32 [R, C], inputs; 0 on padding.
      positions: int32 [R, C], place in the own sequence, from 0.
      segment_ids: int32 [R, C], number of the sequence in its row, from 1; 0 on padding.
      targets: int32 [R, C], the token that follows.
      loss_mask: float32 [R, C], 1 where the target was generated (and is trained on).
      behaviour_logprobs: float32 [R, C], of the target under the policy that sampled it; 0 outside the mask.
      versions: int32 [R, C], version of the policy that sampled the target; -1 outside the mask.
      advantages: float32 [R, C]; 0 outside the mask.
      loss_weights: float32 [R, C], what a token's loss weighs (``algorithms.aggregation``); 0 outside the mask.
    """

    tokens: Any
    positions: Any
    segment_ids: Any
    targets: Any
    loss_mask: Any
    behaviour_logprobs: Any
    versions: Any
    advantages: Any
    loss_weights: Any


@dataclasses.dataclass(frozen=True)
class PackedSequence:
    """One sequence with what is known of its generated tokens.

    ``tokens`` is int32 [n]; the last k of them were generated, and ``behaviour_logprobs``, ``versions`` and ``advantages`` are [k];
    ``weight`` is that of each of their losses.
    """

    tokens: np.ndarray
    behaviour_logprobs: np.ndarray
    versions: np.ndarray
    advantages: np.ndarray
    weight: float = 1.0

    @property
    def positions(self) -> int:
        return self.tokens.shape[0] - 1


@dataclasses.dataclass(frozen=True)
class Packing:
    """By what rows are filled and dealt out.

    Attributes:
      policy: of ``POLICIES``.
      shards: data-parallel shards, which take equal parts of a micro-batch's rows.
      work: of a sequence.
    """

    policy: str = "algorithm1"
    shards: int = 1
    work: Work = TOKENS

    def bins(self, lengths: Sequence[int], capacity: int, k_min: int, rows: Callable[[int], int]) -> list[list[int]]:
        """``rows(needed)`` rows, by their sequences' indices; some may be empty."""
        if self.policy == "balanced":
            return balanced(lengths, capacity, self.work, lambda needed: rows(max(needed, min(k_min, len(lengths)))))
        found = allocate(lengths, capacity, k_min)
        return found + [[] for _ in range(rows(len(found)) - len(found))]

    def row_work(self, segment_ids: np.ndarray) -> np.ndarray:
        """Float64 [rows], of computing packed rows [rows, C]: all positions, and attention within segments."""
        attention = [self.work.attention(np.bincount(row)[1:]).sum() for row in segment_ids]
        return segment_ids.shape[1] + np.asarray(attention, np.float64)

    def shard_work(self, micro: MicroBatch) -> np.ndarray:
        """Float64 [shards], of each shard in a micro-batch."""
        return self.row_work(micro.segment_ids).reshape(self.shards, -1).sum(1)


DEFAULT = Packing()


@dataclasses.dataclass(frozen=True)
class PackedBatch:
    """A training step's micro-batches, on the host.

    Attributes:
      step: the trainer's version that this batch is for.
      minibatches: for each sequential update its micro-batches.
      tokens: for each minibatch the number of trained (generated) tokens.
      metrics: what the host knows of the batch, by metric name.
      denominators: for each minibatch what the sum of its tokens' weighted losses is divided by.
    """

    step: int
    minibatches: tuple[tuple[MicroBatch, ...], ...]
    tokens: tuple[int, ...]
    metrics: Mapping[str, float | None]
    denominators: tuple[float, ...]


def row_counts(rows: int, shards: int, most: int = 2) -> tuple[int, ...]:
    """The static row counts of micro-batches, largest first: ``rows`` and its halves that the data-parallel ``shards`` divide, at most ``most``.

    Raises:
      ValueError: ``rows`` is not a multiple of ``shards``.
    """
    if rows % shards:
        raise ValueError(f"'trainer.micro_batch_rows' must be a multiple of the {shards} data-parallel shards; got {rows}")
    counts = [rows]
    while len(counts) < most and counts[-1] % 2 == 0 and (counts[-1] // 2) % shards == 0:
        counts.append(counts[-1] // 2)
    return tuple(counts)


def split_rows(rows: int, counts: Sequence[int]) -> list[int]:
    """Sizes of the micro-batches that take ``rows`` rows: largest first, the last one filled up with empty rows."""
    sizes: list[int] = []
    left = rows
    while left > 0:
        size = next((c for c in counts if c <= left), counts[-1])
        sizes.append(size)
        left -= size
    return sizes


def pack_rows(
    sequences: Sequence[PackedSequence],
    capacity: int,
    k_min: int = 1,
    rows: Callable[[int], int] = lambda needed: needed,
    fillers: Sequence[PackedSequence] = (),
    packing: Packing = DEFAULT,
) -> MicroBatch:
    """Lays sequences into rows of ``capacity`` positions.

    Args:
      sequences: at least two tokens each.
      capacity: C, positions of a row.
      k_min: least number of rows.
      rows: from the number of rows that ``sequences`` need to the number of rows of the result.
      fillers: sequences that may take the room that is left, longest first, and open no row.
      packing: how rows are filled.

    Returns:
      Arrays [rows, C] on the host.

    Raises:
      ValueError: a sequence does not fit a row, or the rows are too few.
    """
    lengths = [s.positions for s in sequences]
    if lengths and (max(lengths) > capacity or min(lengths) < 1):
        raise ValueError(
            f"a packed row holds sequences of 2 to {capacity + 1} tokens; got one of {max(lengths) + 1 if max(lengths) > capacity else min(lengths) + 1}: "
            "raise 'trainer.micro_batch_tokens' (or 'sft.row_tokens'), or lower 'task.max_prompt_tokens' or 'rollout.max_new_tokens'"
        )
    bins = packing.bins(lengths, capacity, k_min, rows)
    count = len(bins)
    _fill(bins, [capacity - sum(lengths[i] for i in indices) for indices in bins], [s.positions for s in fillers], len(sequences))
    sequences = [*sequences, *fillers]
    batch = _empty(count, capacity)
    for row, indices in enumerate(bins):
        start = 0
        for segment, index in enumerate(indices, 1):
            sequence = sequences[index]
            n = sequence.positions
            batch.tokens[row, start : start + n] = sequence.tokens[:-1]
            batch.targets[row, start : start + n] = sequence.tokens[1:]
            batch.positions[row, start : start + n] = np.arange(n)
            batch.segment_ids[row, start : start + n] = segment
            generated = slice(start + n - len(sequence.versions), start + n)
            batch.loss_mask[row, generated] = 1.0
            batch.behaviour_logprobs[row, generated] = sequence.behaviour_logprobs
            batch.versions[row, generated] = sequence.versions
            batch.advantages[row, generated] = sequence.advantages
            batch.loss_weights[row, generated] = sequence.weight
            start += n
    return batch


def _fill(bins: list[list[int]], room: list[int], lengths: Sequence[int], first: int) -> None:
    """Adds fillers, numbered from ``first``, to the bins: longest first, each where it leaves least room (best fit)."""
    for index in np.argsort(-np.asarray(lengths, np.int64), kind="stable"):
        fitting = [row for row, left in enumerate(room) if left >= lengths[index]]
        if fitting:
            best = min(fitting, key=lambda row: room[row])
            bins[best].append(first + int(index))
            room[best] -= lengths[index]


def _empty(rows: int, capacity: int) -> MicroBatch:
    def zeros(dtype: Any) -> np.ndarray:
        return np.zeros((rows, capacity), dtype)

    return MicroBatch(
        tokens=zeros(np.int32),
        positions=zeros(np.int32),
        segment_ids=zeros(np.int32),
        targets=zeros(np.int32),
        loss_mask=zeros(np.float32),
        behaviour_logprobs=zeros(np.float32),
        versions=np.full((rows, capacity), -1, np.int32),
        advantages=zeros(np.float32),
        loss_weights=zeros(np.float32),
    )


def take_rows(batch: MicroBatch, rows: np.ndarray, count: int | None = None) -> MicroBatch:
    """The named rows of a packed batch, filled up with empty rows to ``count``."""
    filler = _empty((count or len(rows)) - len(rows), batch.tokens.shape[1])
    return MicroBatch(**{f.name: np.concatenate([getattr(batch, f.name)[rows], getattr(filler, f.name)]) for f in dataclasses.fields(MicroBatch)})


def micro_batches(
    sequences: Sequence[PackedSequence], capacity: int, counts: Sequence[int], fillers: Sequence[PackedSequence] = (), packing: Packing = DEFAULT
) -> tuple[MicroBatch, ...]:
    """A minibatch as micro-batches of the static row counts ``counts`` (largest first); ``fillers`` take the room that is left."""
    packed = pack_rows(sequences, capacity, min(counts), lambda needed: sum(split_rows(max(needed, 1), counts)), fillers, packing)
    sizes = split_rows(packed.tokens.shape[0], counts)
    return tuple(take_rows(packed, np.asarray(rows)) for rows in deal_rows(packing.row_work(packed.segment_ids), sizes, packing.shards))


def split_groups(tokens: Sequence[int], minibatches: int) -> list[list[int]]:
    """Deals groups out to minibatches: as equal in number as can be, and balanced in tokens.

    Args:
      tokens: tokens of each group.
      minibatches: number of sequential updates.

    Returns:
      For each minibatch the indices of its groups, in rising order; with fewer groups than minibatches, as many as there are groups.
    """
    minibatches = min(minibatches, len(tokens))
    room = [len(tokens) // minibatches + (k < len(tokens) % minibatches) for k in range(minibatches)]
    parts: list[list[int]] = [[] for _ in range(minibatches)]
    totals = [0] * minibatches
    for index in np.argsort(-np.asarray(tokens), kind="stable"):
        place = min((k for k in range(minibatches) if len(parts[k]) < room[k]), key=lambda k: (totals[k], k))
        parts[place].append(int(index))
        totals[place] += int(tokens[index])
    return [sorted(p) for p in parts]


def pack(
    batch: TrainingBatch,
    advantages: Sequence[np.ndarray],
    capacity: int,
    counts: Sequence[int],
    minibatches: int,
    skip_zero: bool = False,
    weights: tuple[Sequence[float] | np.ndarray, Sequence[float] | np.ndarray] | None = None,
    packing: Packing = DEFAULT,
) -> PackedBatch:
    """Packs a training step.

    Args:
      batch: the step's groups.
      advantages: for each trajectory (groups in order, samples in order) float [length].
      capacity: C, positions of a row.
      counts: static row counts, largest first.
      minibatches: sequential updates of the step.
      skip_zero: samples whose advantages are all 0, and which so have no gradient, only take the room that the others leave; all count in the mean.
      weights: for each trajectory (weight of its tokens' losses, share of the denominator), as ``aggregation.loss_weights``; None: the token mean.
      packing: how rows are filled and dealt out to shards.

    Returns:
      The minibatches with the packing's metrics: ``packing/efficiency`` (real ÷ computed positions), ``packing/balance`` (work of the mean shard ÷
      work of the one with most, over micro-batches) and ``packing/micro_batches``.
    """
    sequences: list[list[PackedSequence]] = []
    lengths = [t.length for group in batch.groups for t in group.trajectories]
    weighing, shares = weights or ([1.0] * len(lengths), lengths)
    values, each, part_of = iter(advantages), iter(weighing), iter(shares)
    totals = [sum(float(next(part_of)) for _ in group.trajectories) for group in batch.groups]
    for group in batch.groups:
        whole = [np.concatenate([t.prompt_tokens, t.tokens]).astype(np.int32) for t in group.trajectories]
        sequences.append(
            [PackedSequence(w, t.behaviour_logprobs, t.versions, next(values), float(next(each))) for w, t in zip(whole, group.trajectories, strict=True)]
        )
    computed, fillers = ([[s for s in group if (not skip_zero or np.any(s.advantages)) == wanted] for group in sequences] for wanted in (True, False))
    parts = split_groups([sum(s.positions for s in group) for group in computed], minibatches)
    packed = tuple(
        micro_batches([s for index in part for s in computed[index]], capacity, counts, [s for index in part for s in fillers[index]], packing)
        for part in parts
    )
    tokens = tuple(sum(len(s.versions) for index in part for s in sequences[index]) for part in parts)
    denominators = tuple(sum(totals[index] for index in part) for part in parts)
    every = [m for part in packed for m in part]
    shards = np.asarray([packing.shard_work(m) for m in every])
    metrics: dict[str, float | None] = {
        "packing/efficiency": float(sum((m.segment_ids > 0).sum() for m in every) / sum(m.segment_ids.size for m in every)),
        "packing/balance": float(shards.mean(1).sum() / shards.max(1).sum()),
        "packing/micro_batches": float(len(every)),
    }
    return PackedBatch(batch.step, packed, tokens, metrics, denominators)
