"""An engine without a device: the pages' contents are kept on the host, so that every program can be held against what it should have found there.

Invariants:
* An entry is what keys and values are a function of: the tokens up to its position, as they stood in the pages when it was computed, and the weights.
* Programs run when they are enqueued, in that order; their tokens are told when they are fetched.
* Before each step of a sequence all its entries are compared with the sequence itself.
"""

import dataclasses
import types

import numpy as np

from areal_jax.sampler.state import SCRAP, Blocks, Decoded

END = 0
"""The end token."""


def token_of(key, count, version, end):
    """The ``count``-th generated token of a request under some weights."""
    return END if count + 1 == end else 1 + (key[0] * 7919 + key[1] * 104729 + count * 31 + version * 17) % 97


def logprob_of(key, count, version):
    return np.float32(-(key[0] + key[1] / 8 + count / 64 + version / 1024))


def chained(before, token):
    """The name of a text that ends with ``token``, by the name of what comes before it."""
    return (before * 1000003 + int(token) + 1) % (1 << 61)


@dataclasses.dataclass
class Slot:
    key: tuple
    position: int
    count: int
    limit: int
    live: bool = True


class HostEngine:
    """What ``RolloutDriver`` asks of an engine; weights are their version.

    Args:
      ends: key → after so many tokens the request's end token comes.
      texts: key → prompt and generated tokens, changed in place as tokens are generated.
      admitted: key → the oldest version that its entries may have.
    """

    per_request = False
    model = types.SimpleNamespace(eos_ids=(END,))

    def __init__(self, *, slots, max_length, page_size, pages, blocks, width, steps, ends, texts, admitted):
        self.max_concurrent_decodes, self.max_length, self.page_size, self.steps = slots, max_length, page_size, steps
        self.sequence_pages = -(-max_length // page_size)
        self.pages = max(pages, self.sequence_pages + 2)
        self.block_buckets, self.row_buckets, self.block = tuple(sorted({1, blocks})), tuple(sorted({max(1, slots // 2), slots})), width
        self.ends, self.texts, self.admitted = ends, texts, admitted
        self.slots: dict[int, Slot] = {}
        self.entries: dict[tuple[int, int], tuple[int, int, int]] = {}  # (page, offset) → (token, name of the text, oldest version)
        self.before = lambda: None
        self.writes = lambda key, pages: None
        self._broken = 0

    def check_params(self, params):
        assert isinstance(params, int)

    def new_state(self):
        return types.SimpleNamespace(keys=0)

    def no_blocks(self, count):
        zeros = np.zeros(count, np.int32)
        return Blocks(np.full((count, self.block), -1, np.int32), zeros, zeros.copy(), np.zeros((count, self.sequence_pages), np.int32))

    def _place(self, table, position):
        return int(table[position // self.page_size]), position % self.page_size

    def _write(self, table, start, tokens, version):
        name, oldest, broken = 0, version, False
        for position in range(start):
            token, stands, age = self.entries.get(self._place(table, position), (-1, -1, version))
            name, oldest = chained(name, token), min(oldest, age)
            broken |= stands != name
        for position, token in enumerate(tokens, start):
            name = chained(name, token)
            self._broken -= broken
            place = self._place(table, position)
            assert place[0] != SCRAP, "a token's entry goes to the scrap page"
            self.entries[place] = (int(token), self._broken if broken else name, oldest)

    def prefill_blocks(self, version, state, blocks):
        assert len(blocks.tokens) in self.block_buckets
        for row in np.argsort(blocks.starts, kind="stable"):  # within a program every entry is there before it is read
            count = int(blocks.counts[row])
            if count:
                self._write(blocks.tables[row], int(blocks.starts[row]), blocks.tokens[row, :count], version)
        self.before()
        return state

    def copy_pages(self, state, sources, destinations):
        assert len(sources) == len(destinations) == self.max_concurrent_decodes
        assert not set(sources) & (set(destinations) - {SCRAP}), "a page is read and written by one copy"
        for source, destination in zip(sources.tolist(), destinations.tolist(), strict=True):
            for offset in range(self.page_size):
                if destination != SCRAP and (source, offset) in self.entries:
                    self.entries[destination, offset] = self.entries[source, offset]
        return state

    def enter(self, state, insertion, seed):
        for i, slot in enumerate(insertion.slots.tolist()):
            if slot < self.max_concurrent_decodes:
                key = tuple(insertion.streams[i].tolist())
                new = Slot(key, int(insertion.positions[i]), int(insertion.counts[i]), int(insertion.limits[i]))
                del self.texts[key][new.position + 1 :]  # what was on its way when the request was taken elsewhere
                assert len(self.texts[key]) == new.position + 1 and self.texts[key][-1] == insertion.last_tokens[i]
                self.slots[slot] = new
        return state

    def _check(self, slot, table, version):
        name = 0
        for position, token in enumerate(self.texts[slot.key][:-1]):
            name = chained(name, token)
            stands = self.entries.get(self._place(table, position))
            assert stands is not None, f"{slot.key}: nothing at {position}"
            assert stands[:2] == (token, name), f"{slot.key}: another text's entry at {position}"
            assert self.admitted[slot.key] <= stands[2] <= version, f"{slot.key}: entry of version {stands[2]} at {position}, under {version}"

    def decode(self, version, state, rows, tables, *, steps, stop_below):
        assert len(rows) in self.row_buckets and tables.shape == (len(rows), self.sequence_pages)
        own = [self.slots[slot] if slot < self.max_concurrent_decodes else None for slot in rows.tolist()]
        tokens, logprobs = np.zeros((len(rows), self.steps), np.int32), np.zeros((len(rows), self.steps), np.float32)
        valid = np.zeros(len(rows), np.int32)
        self.before()
        for step in range(steps):
            live = [(row, slot) for row, slot in enumerate(own) if slot is not None and slot.live]
            if len(live) < max(1, stop_below):
                break
            for row, slot in live:
                self._check(slot, tables[row], version)
                self.writes(slot.key, {self._place(tables[row], slot.position)[0]})
                self._write(tables[row], slot.position, [self.texts[slot.key][-1]], version)
            for row, slot in live:
                token = token_of(slot.key, slot.count, version, self.ends[slot.key])
                tokens[row, step], logprobs[row, step] = token, logprob_of(slot.key, slot.count, version)
                valid[row] += 1
                self.texts[slot.key].append(token)
                slot.position, slot.count = slot.position + 1, slot.count + 1
                slot.live = token != END and slot.count < slot.limit
        decoded = Decoded(tokens, logprobs, valid, np.array([slot is not None and slot.live for slot in own]))
        return state, types.SimpleNamespace(unpack=lambda: decoded)
