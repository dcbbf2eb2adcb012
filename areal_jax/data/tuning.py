"""The examples of a fine-tuning run: what is trained on and what is held out.

Invariants:
* Every row of the files is an example, or is left out by name and counted; a row is never cut or left out unless the configuration says so.
* Held-out and training examples are disjoint by the text before what is learnt, in every run and on every machine.
* All is read, encoded and checked before a device is touched.
"""

from __future__ import annotations

import dataclasses
import hashlib
import math
from collections.abc import Iterator
from typing import Any

import numpy as np

from areal_jax.config import ConfigError
from areal_jax.config_devices import parse_mesh
from areal_jax.data.conversations import conversation
from areal_jax.data.encoding import Encoder
from areal_jax.data.preferences import preference
from areal_jax.data.problems import hash_fraction
from areal_jax.data.records import Record, read_records
from areal_jax.data.rows import BadRow, RowsError
from areal_jax.types import Example, TextTokenizer, TrainingSequence


@dataclasses.dataclass
class LongRows:
    """Rows longer than a packed row, or than the policy was made for: how many were dropped and how many cut, and the longest."""

    dropped: int = 0
    cut: int = 0
    longest: int = 0


@dataclasses.dataclass(frozen=True)
class TuningData:
    """Attributes:
    train, heldout: the examples, in the files' order.
    capacity: positions of a packed row.
    bad, long: what was left out or cut.
    shared: training rows that were left out because their context is held out.
    """

    train: list[Example]
    heldout: list[Example]
    capacity: int
    bad: list[BadRow]
    long: LongRows
    shared: int

    def report(self) -> list[str]:
        """What was left out or cut, in words; empty if nothing."""
        lines = [f"skipped {len(self.bad)} broken rows, the first: {self.bad[0]}"] if self.bad else []
        for count, what in ((self.long.dropped, "dropped"), (self.long.cut, "cut")):
            if count:
                lines.append(f"{what} {count} rows that are too long; the longest takes {self.long.longest} positions")
        if self.shared:
            lines.append(f"left {self.shared} training rows out whose prompt is held out")
        return lines

    @property
    def fingerprint(self) -> str:
        """Of all tokens and of what is learnt of them, training and held-out ones apart."""
        digest = hashlib.blake2b(digest_size=16)
        for examples in (self.train, self.heldout):
            digest.update(f"{len(examples)}:".encode())
            for sequence in (sequence for example in examples for sequence in example.sequences):
                digest.update(f"{sequence.tokens.size},".encode())
                digest.update(np.ascontiguousarray(sequence.tokens, np.int32).tobytes() + np.packbits(sequence.trained).tobytes())
        return digest.hexdigest()


def load_tuning(config: Any, tokenizer: TextTokenizer, max_positions: int = 0) -> TuningData:
    """Reads ``sft.data`` and what is held out.

    Args:
      config: a validated configuration; its ``sft`` and ``task`` sections rule.
      tokenizer: the policy's.
      max_positions: longest sequence that the policy was made for; 0: not known.

    Raises:
      ConfigError: a row is refused and ``sft.on_bad_row`` is 'error', one is too long and ``sft.on_long_row`` is 'refuse', or no row is left.
    """
    section = config.sft
    try:
        encode = Encoder(tokenizer, config.task)
    except ValueError as error:
        raise ConfigError(str(error)) from error
    bad: list[BadRow] = []
    long = LongRows()

    def examples(path: str) -> list[Example]:
        kept = list(_fitting(_examples(path, section, encode, bad), section, max_positions, long))
        if not kept:
            raise RowsError(
                f"'{path}' must hold at least one row to learn; {len(bad)} are broken and {long.dropped} too long"
                + (f", the first: {bad[0]}" if bad else "")
                + "; mend the rows, or raise 'sft.row_tokens'"
            )
        return kept

    train, shared = examples(section.data), 0
    heldout: list[Example] = []
    if section.eval_data:
        heldout = examples(section.eval_data)
        contexts = {example.context for example in heldout}
        kept = [example for example in train if example.context not in contexts]
        train, shared = kept, len(train) - len(kept)
        if not train:
            raise RowsError(f"'{section.data}' must hold a row whose prompt is not among the held-out ones of '{section.eval_data}'; all {shared} are there")
    elif section.eval_fraction:
        train, heldout = split(train, section.eval_fraction)
    longest = max(example.positions for example in (*train, *heldout))
    step = math.lcm(64, parse_mesh("cluster.mesh.trainer", config.cluster.mesh.trainer).get("context", 1))
    return TuningData(train, heldout, section.row_tokens or -(-longest // step) * step, bad, long, shared)


def split(examples: list[Example], fraction: float) -> tuple[list[Example], list[Example]]:
    """(training, held-out) examples by a stable hash of the context, so that an example's side does not depend on the others.

    (Where one side would be empty, the context with the lowest hash is held out, or the one with the highest trained on.)

    Raises:
      RowsError: there are fewer than two contexts.
    """
    hashes = {example.context: hash_fraction(example.context) for example in examples}
    if len(hashes) < 2:
        raise RowsError(f"'sft.eval_fraction' needs rows with at least 2 different prompts; got {len(hashes)}; add rows, or give 'sft.eval_data'")
    held = {context for context, value in hashes.items() if value < fraction} or {min(hashes, key=lambda context: hashes[context])}
    if len(held) == len(hashes):
        held.remove(max(hashes, key=lambda context: hashes[context]))
    return [e for e in examples if e.context not in held], [e for e in examples if e.context in held]


def _examples(path: str, section: Any, encode: Encoder, bad: list[BadRow]) -> Iterator[Example]:
    """The examples of the rows that are good; the others go to ``bad``."""
    for record in read_records(path):
        if isinstance(record, Record):
            try:
                example = _example(record, section, encode)
            except ValueError as error:  # the row's, or the chat template's
                found = BadRow(record.file, record.line, str(error))
            else:
                yield example
                continue
        else:
            found = record
        bad.append(found)
        if section.on_bad_row == "error":
            raise RowsError(f"{found}; or 'sft.on_bad_row=skip' to go on without such rows")


def _example(record: Record, section: Any, encode: Encoder) -> Example:
    parts = preference(record.row) if section.objective == "dpo" else (conversation(record.row, section.learn_turns),)
    return Example(tuple(encode(part) for part in parts), record.where, parts[0].context)


def _fitting(examples: Iterator[Example], section: Any, most: int, long: LongRows) -> Iterator[Example]:
    """The examples that fit a packed row and the policy's positions, by ``sft.on_long_row``."""
    for example in examples:
        lengths = [sequence.positions for sequence in example.sequences]
        if not (section.row_tokens and sum(lengths) > section.row_tokens) and not (most and max(lengths) > most):
            yield example
            continue
        long.longest = max(long.longest, sum(lengths))
        if section.on_long_row == "refuse":
            limit = (
                f"'sft.row_tokens' = {section.row_tokens}" if section.row_tokens and sum(lengths) > section.row_tokens else f"{most}, which the policy holds,"
            )
            raise RowsError(
                f"{example.source}: a row must take at most {limit} positions; it takes {sum(lengths)}; raise 'sft.row_tokens', "
                "or leave such rows out (sft.on_long_row=drop) or cut them (sft.on_long_row=truncate)"
            )
        shorter = truncated(example, section.row_tokens, most) if section.on_long_row == "truncate" else None
        if shorter is None:
            long.dropped += 1
        else:
            long.cut += 1
            yield shorter


def truncated(example: Example, capacity: int, most: int = 0) -> Example | None:
    """The example cut at its sequences' ends to ``capacity`` positions in all (0: any) and ``most`` each (0: any).

    Of a pair the longer sequence is cut first, down to the half. The end of a cut answer is not learnt as one. None where a sequence loses all that is learnt.
    """
    lengths = [min(sequence.positions, most or sequence.positions) for sequence in example.sequences]
    if capacity and sum(lengths) > capacity:
        share = capacity // len(lengths)
        spare = sum(max(0, share - length) for length in lengths)
        lengths = [min(length, share + spare) if length > share else length for length in lengths]
    cut = tuple(TrainingSequence(s.tokens[: length + 1], s.trained[: length + 1]) for s, length in zip(example.sequences, lengths, strict=True))
    return dataclasses.replace(example, sequences=cut) if all(sequence.trained.any() for sequence in cut) else None
