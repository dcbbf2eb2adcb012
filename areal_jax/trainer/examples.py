"""Examples of supervised learning, packed once into rows, and the order in which rows are trained.

Invariants:
* An example lies in one row, whole: the two sequences of a preference pair too, one after the other, so that no division of rows parts them.
* The corpus is packed once, by Algorithm 1, in pieces of ``CHUNK`` examples; each row is trained once an epoch, in an order that is a pure function of
  (seed, epoch). A resumed run so goes on with the same rows, from the number of its step alone.
* Rows are made when they are asked for; the corpus is held as token ids.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import grain
import numpy as np
from flax import struct

from areal_jax.trainer.allocation import allocate
from areal_jax.types import Example, TrainingSequence

CHUNK = 1024
"""Examples that are packed together."""


@struct.dataclass
class ExampleRows:
    """Packed rows. Leading axes may be [rows] or [micro-batches, rows].

    Attributes:
      tokens: int32 [..., C], inputs; 0 on padding.
      positions: int32 [..., C], place in the own sequence, from 0.
      segment_ids: int32 [..., C], number of the sequence in its row, from 1; 0 on padding. Of pair p (from 0) the chosen one is 2p + 1, the rejected 2p + 2.
      targets: int32 [..., C], the token that follows.
      loss_mask: float32 [..., C], 1 where the target is learnt.
      pairs: float32 [..., P], 1 where the row has such a pair; None without pairs.
      reference: float32 [..., P, 2], log-probs of the pair's learnt tokens under the reference policy, summed over each sequence; None without pairs.
    """

    tokens: Any
    positions: Any
    segment_ids: Any
    targets: Any
    loss_mask: Any
    pairs: Any = None
    reference: Any = None


class Corpus:
    """Examples in packed rows.

    Attributes:
      examples: all of one kind, single sequences or pairs.
      capacity: C, positions of a row.
      bins: for each row the indices of its examples.
      paired: the examples are pairs.
      reference: float32 [examples, 2] of pairs, their log-probs under the reference policy; None until they are set.
    """

    def __init__(self, examples: Sequence[Example], capacity: int):
        """Packs the examples.

        Raises:
          ValueError: there is none, or one does not fit a row.
        """
        if not examples:
            raise ValueError("supervised learning needs at least one example; got none")
        lengths = [example.positions for example in examples]
        if max(lengths) > capacity or min(lengths) < 1:
            wrong = max(lengths) if max(lengths) > capacity else min(lengths)
            raise ValueError(
                f"a packed row holds examples of 1 to {capacity} positions; got one of {wrong}: raise 'sft.row_tokens', or lower 'task.max_prompt_tokens' "
                "or 'rollout.max_new_tokens'"
            )
        self.examples, self.capacity = examples, capacity
        self.bins = [
            [start + index for index in indices] for start in range(0, len(examples), CHUNK) for indices in allocate(lengths[start : start + CHUNK], capacity)
        ]
        self.paired = len(examples[0].sequences) == 2
        self.reference: np.ndarray | None = None

    @property
    def efficiency(self) -> float:
        """Real ÷ computed positions."""
        return sum(example.positions for example in self.examples) / (len(self.bins) * self.capacity)

    @property
    def trained_tokens(self) -> int:
        """Tokens that are learnt in an epoch."""
        return sum(int(sequence.trained.sum()) for example in self.examples for sequence in example.sequences)

    @property
    def most(self) -> int:
        """Examples of the row that has most."""
        return max(map(len, self.bins))

    def rows(self, indices: Sequence[int] | np.ndarray, count: int, slots: int = 0) -> ExampleRows:
        """The named rows on the host, filled up with empty ones.

        Args:
          indices: of rows.
          count: rows of the result.
          slots: P, places for pairs in a row; 0 for single sequences. ``reference`` is 0 until it is set.
        """
        shape = (count, self.capacity)
        tokens, positions, segment_ids, targets = (np.zeros(shape, np.int32) for _ in range(4))
        made = ExampleRows(tokens, positions, segment_ids, targets, np.zeros(shape, np.float32))
        if self.paired:
            made = dataclasses.replace(made, pairs=np.zeros((count, slots), np.float32), reference=np.zeros((count, slots, 2), np.float32))
        for row, place in enumerate(indices):
            start = segment = 0
            for slot, index in enumerate(self.bins[place]):
                for sequence in self.examples[index].sequences:
                    segment += 1
                    start = _lay(made, row, start, segment, sequence)
                if self.paired:
                    made.pairs[row, slot] = 1.0
                    made.reference[row, slot] = 0.0 if self.reference is None else self.reference[index]
        return made


def _lay(rows: ExampleRows, row: int, start: int, segment: int, sequence: TrainingSequence) -> int:
    """Puts a sequence into a row; returns where the next one begins."""
    end = start + sequence.positions
    rows.tokens[row, start:end] = sequence.tokens[:-1]
    rows.targets[row, start:end] = sequence.tokens[1:]
    rows.positions[row, start:end] = np.arange(sequence.positions)
    rows.segment_ids[row, start:end] = segment
    rows.loss_mask[row, start:end] = sequence.trained[1:]
    return end


def row_order(rows: int, count: int, seed: int, epochs: int | None = None) -> grain.MapDataset:
    """The rows of each step: element s is int [count], the stream of all epochs' permutations cut into pieces (the last may be shorter).

    Args:
      rows: rows of the corpus.
      count: rows of a step.
      seed: of the run.
      epochs: passes over the rows; None: without end.
    """
    return grain.MapDataset.range(rows).seed(seed % 2**32).shuffle().repeat(epochs).batch(count)
