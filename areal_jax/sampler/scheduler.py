"""Which request is in which slot, with which pages, and what is computed next. On the host alone: no device, no thread, no clock.

Invariants:
* Requests are admitted in their order, the first one whenever a slot and its pages are free.
* A page that is written belongs to one sequence or one prompt; shared pages are whole pages of a prompt and are written only when it is (re)filled.
* Where pages run out the youngest sequence is preempted: it goes back to the head of the queue with its tokens, and is recomputed. The oldest
  always gets its pages, so something always ends.
* Pages may be given out again at once: programs run in the order in which they are enqueued, and whoever gets a page writes it in a later one.

Life of a request: queued → in a slot, its pages being filled → decoding → finished | cancelled; from a slot back to the queue by preemption.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Iterable

import numpy as np

from areal_jax.sampler.pages import PagePool
from areal_jax.sampler.sequences import WAITS, Sequence, SharedPrompt
from areal_jax.types import GenerationRequest

Key = tuple[int, int]
RESERVE = 4
"""One page stays free at an admission for so many running sequences, which soon need one."""


@dataclasses.dataclass(frozen=True)
class Piece:
    """Consecutive tokens of one sequence or prompt to be computed, the position of the first, and the table of its pages."""

    tokens: np.ndarray
    start: int
    pages: tuple[int, ...]


class Scheduler:
    """The queue, the slots and the pages of one engine.

    Args:
      slots: sequences at once.
      pages: of the cache, the scrap page included.
      page_size: tokens of a page.
      share: the samples of a group share their prompt's pages.

    Attributes:
      preempted: the keys of the queue's head that were in a slot before.
    """

    def __init__(self, slots: int, pages: int, page_size: int, share: bool = True):
        self.pool, self.page_size, self._share = PagePool(pages), page_size, share
        self.queue: collections.deque[GenerationRequest] = collections.deque()
        self.running: dict[Key, Sequence] = {}
        self.preemptions = 0
        self.preempted: set[Key] = set()
        self._free_slots = list(range(slots - 1, -1, -1))
        self._queued: collections.Counter[int] = collections.Counter()
        self._prompts: list[SharedPrompt] = []
        self._current: dict[int, SharedPrompt] = {}
        self._copies: list[tuple[SharedPrompt, Sequence]] = []
        self._admitted = 0

    def __contains__(self, key: object) -> bool:
        """Whether a request of this key is queued or in a slot."""
        return key in self.running or (isinstance(key, tuple) and key[0] in self._queued and any(r.key == key for r in self.queue))

    # Requests come and go.

    def submit(self, requests: Iterable[GenerationRequest]) -> None:
        """Puts requests at the end of the queue."""
        for request in requests:
            self.queue.append(request)
            self._queued[request.group_id] += 1

    def cancel(self, keys: set[Key]) -> None:
        """Forgets requests, wherever they are."""
        for request in self.queue:
            if request.key in keys:
                self._unqueue(request)
        self.queue = collections.deque(r for r in self.queue if r.key not in keys)
        for key in keys & self.running.keys():
            self.leave(self.running[key])

    def leave(self, sequence: Sequence) -> None:
        """Takes a sequence out of its slot; its pages are free."""
        del self.running[sequence.request.key]
        sequence.gone = True
        self._free_slots.append(sequence.slot)
        self._copies = [(prompt, user) for prompt, user in self._copies if user is not sequence]
        self.pool.release(sequence.pages)
        if sequence.prompt is not None:
            sequence.prompt.users -= 1
            self._forget_if_idle(sequence.prompt)

    def admit(self, begin: bool = True) -> None:
        """Gives slots and pages to queued requests, first come first served; without ``begin`` to preempted ones alone."""
        while self.queue and self._free_slots:
            request = self.queue[0]
            if not begin and request.key not in self.preempted:
                return
            length, given = len(request.prompt_tokens) + len(request.tokens), len(request.prompt_tokens)
            prompt = self._prompt_of(request)
            new = self._share and prompt is None and given > 1 and self._queued[request.group_id] > 1
            whole = (given - 1) // self.page_size if new or prompt is not None else 0
            prompt_pages = self._pages_for(given - 1) if new else 0
            own = self._pages_for(length) - whole
            reserve = -(-len(self.running) // RESERVE)
            if not self._make_room(prompt_pages + own + reserve, prompt) and (self.running or self.pool.free < prompt_pages + own):
                return
            self.queue.popleft()
            self._unqueue(request)
            sequence = Sequence(request, self._free_slots.pop(), self._admitted)
            self._admitted += 1
            self.running[request.key] = sequence
            if new:
                prompt = SharedPrompt(request.group_id, request.prompt_tokens, self.pool.take(prompt_pages), self.page_size)
                self._prompts.append(prompt)
                self._current[request.group_id] = prompt
            if prompt is not None:
                shared = prompt.pages[:whole]
                self.pool.share(shared)
                prompt.users += 1
                sequence.prompt, sequence.pages = prompt, [*shared]
            sequence.pages += self.pool.take(own)
            self._begin(sequence)

    @property
    def unclaimed_pages(self) -> int:
        """Free pages less those that the queue will ask for when it is admitted."""
        return self.pool.free - sum(self._pages_for(len(r.prompt_tokens) + len(r.tokens)) for r in self.queue)

    # What is computed.

    def pieces(self, most: int, width: int) -> list[Piece]:
        """The next ``most`` pieces of up to ``width`` tokens to be computed together, prompts first; they count as filled from here on."""
        found: list[Piece] = []

        def cut(record: SharedPrompt | Sequence, end: int) -> None:
            while record.filled < end and len(found) < most:
                start, stop = record.filled, min(end, record.filled + width)
                tokens = record.tokens[start:stop] if isinstance(record, SharedPrompt) else record.piece(start, stop)
                found.append(Piece(tokens, start, tuple(record.pages)))
                record.filled = stop

        for prompt in self._prompts:
            if prompt.filled < prompt.end:
                cut(prompt, prompt.end)
                if prompt.filled >= prompt.end:
                    self._filled(prompt)
        copying = {id(user) for _, user in self._copies}
        for sequence in self.running.values():
            if sequence.filled != WAITS and id(sequence) not in copying:
                cut(sequence, sequence.length - 1)
        return found

    def copies(self) -> list[tuple[int, int]]:
        """(source, destination) of the pages to be copied now; afterwards the partial pages that nobody will need are free."""
        pairs = [(prompt.partial, user.pages[prompt.whole]) for prompt, user in self._copies if prompt.partial is not None]
        self._copies = []
        for prompt in self._prompts:
            if prompt.partial is not None and prompt.filled >= prompt.end and not self._queued[prompt.group_id]:
                self.pool.release(prompt.pages[prompt.whole :])
                del prompt.pages[prompt.whole :]
        return pairs

    @property
    def rebuilding(self) -> bool:
        """Whether sequences that are decoded wait for their pages to be filled again."""
        return any(s.entered and s.filled < s.length - 1 for s in self.running.values())

    @property
    def filling(self) -> bool:
        """Whether sequences in slots wait for their pages to be filled."""
        return any(not s.entered for s in self.running.values())

    def entering(self) -> list[Sequence]:
        """The sequences whose pages are filled and which the engine does not know yet; they count as entered from here on."""
        new = [s for s in self.running.values() if not s.entered and s.filled == s.length - 1]
        for sequence in new:
            sequence.entered = True
        return new

    def decoding(self) -> list[Sequence]:
        """The sequences that are decoded, the longest first."""
        return sorted((s for s in self.running.values() if s.entered), key=lambda s: -s.length)

    def grow(self, tokens: int, preempt: bool) -> bool:
        """Pages for so many more tokens of each decoding sequence, oldest first.

        Args:
          tokens: to come.
          preempt: take pages from the youngest where they run out; False: say so.

        Returns:
          False where pages ran out and nobody was to be preempted.
        """
        for sequence in sorted((s for s in self.running.values() if s.entered), key=lambda s: s.order):
            if sequence.gone:
                continue
            missing = self._pages_for(min(sequence.length + tokens - 1, sequence.longest)) - len(sequence.pages)
            while missing > 0 and not self._make_room(missing):
                if not preempt:
                    return False
                youngest = max(self.running.values(), key=lambda s: s.order)
                self._preempt(youngest)
                if youngest is sequence:
                    break
            if missing > 0 and not sequence.gone:
                sequence.pages += self.pool.take(missing)
        return True

    def advanced(self, sequence: Sequence) -> None:
        """A decoding sequence has new tokens, all but the last of which stand in its pages."""
        sequence.filled = sequence.length - 1

    def outdate(self) -> None:
        """The weights changed: nothing that is filled counts any more."""
        self._copies = []
        for prompt in list(self._prompts):
            prompt.filled = 0
            self._forget_if_idle(prompt, whoever_waits=True)
        for sequence in self.running.values():
            self._begin(sequence)

    def part(self) -> None:
        """The weights changed, and what is filled is kept: but for those that share a prompt's pages now, nobody shares them later."""
        self._current = {}
        for prompt in list(self._prompts):
            self._forget_if_idle(prompt, whoever_waits=True)

    # Inside.

    def _pages_for(self, tokens: int) -> int:
        return -(-tokens // self.page_size)

    def _unqueue(self, request: GenerationRequest) -> None:
        self.preempted.discard(request.key)
        self._queued[request.group_id] -= 1
        if not self._queued[request.group_id]:
            del self._queued[request.group_id]

    def _prompt_of(self, request: GenerationRequest) -> SharedPrompt | None:
        prompt = self._current.get(request.group_id)
        return prompt if prompt is not None and np.array_equal(prompt.tokens, request.prompt_tokens) else None

    def _begin(self, sequence: Sequence) -> None:
        """Where the filling of a sequence's pages starts."""
        prompt = sequence.prompt
        if prompt is None:
            sequence.filled = 0
        elif prompt.filled >= prompt.end:
            self._follow(prompt, sequence)
        else:
            sequence.filled = WAITS

    def _follow(self, prompt: SharedPrompt, sequence: Sequence) -> None:
        if prompt.partial is not None:
            self._copies.append((prompt, sequence))
            sequence.filled = len(prompt.tokens) - 1
        else:
            sequence.filled = prompt.whole * self.page_size

    def _filled(self, prompt: SharedPrompt) -> None:
        for sequence in self.running.values():
            if sequence.prompt is prompt and sequence.filled == WAITS:
                self._follow(prompt, sequence)

    def _forget_if_idle(self, prompt: SharedPrompt, whoever_waits: bool = False) -> None:
        waited_for = self._current.get(prompt.group_id) is prompt and self._queued[prompt.group_id] and not whoever_waits
        if not prompt.users and not waited_for:
            self._prompts.remove(prompt)
            self.pool.release(prompt.pages)
            if self._current.get(prompt.group_id) is prompt:
                del self._current[prompt.group_id]

    def _make_room(self, pages: int, keep: SharedPrompt | None = None) -> bool:
        """Whether so many pages are free, if need be without the prompts that nobody uses at the moment (but ``keep``)."""
        if self.pool.free < pages:
            for prompt in [p for p in self._prompts if not p.users and p is not keep]:
                self._forget_if_idle(prompt, whoever_waits=True)
        return self.pool.free >= pages

    def _preempt(self, sequence: Sequence) -> None:
        self.preemptions += 1
        request = sequence.resumable()
        self.queue.appendleft(request)
        self.preempted.add(request.key)
        self._queued[request.group_id] += 1
        self.leave(sequence)
