"""The interruptible driver: continuous batching over the engine's slots and pages, with weights that change in mid-generation.

Invariants:
* A dispatch takes (params, version) as one value read before it; every token it makes is stamped with that version.
* A pending weight update is taken between two dispatches, once what is on its way has arrived: the new weights go in, the pages of every
  unfinished sequence are refilled under them (``kv_on_update='recompute'``), its token budget stays, and decoding goes on from its newest token.
* A request's tokens depend on its random stream and the weights alone, not on its slot, its pages or its neighbours.
* While sequences decode, at most one prefill program runs between two dispatches.
* The next dispatch is enqueued before the last one's tokens are fetched.

One thread calls ``run_once``; the others call ``submit``, ``publish``, ``cancel`` and ``partials`` at any time.
"""

from __future__ import annotations

import collections
import dataclasses
import threading
import time
from collections.abc import Callable, Iterable
from typing import Any

import jax
import numpy as np

from areal_jax.sampler.engine import SamplerEngine
from areal_jax.sampler.scheduler import Key, Piece, Scheduler
from areal_jax.sampler.sequences import Sequence
from areal_jax.sampler.state import Blocks, Chunk, Insertion
from areal_jax.types import GenerationRequest, NewTokens, Sampling, Trajectory, WeightUpdate

AHEAD = 1
"""Dispatches that are enqueued while an earlier one's tokens are fetched."""
FILLING_STEPS = 2
"""Steps of a dispatch while sequences wait for their prompts to be prefilled."""
FINISHED_SHARE = 16
"""With requests waiting a dispatch ends once one slot in so many has finished."""


@dataclasses.dataclass(frozen=True)
class Progress:
    """What one dispatch brought: how many new tokens by request, the requests that ended in it, and the tokens themselves."""

    version: int
    new_tokens: tuple[tuple[Key, int], ...]
    finished: tuple[Trajectory, ...]
    tokens: tuple[NewTokens, ...] = ()


@dataclasses.dataclass
class DriverStatistics:
    """Totals since the start, times in seconds; ``kv_pages_used`` is the number of pages held at the moment."""

    generated_tokens: int = 0
    prefill_tokens: int = 0
    dispatches: int = 0
    busy_s: float = 0.0
    idle_s: float = 0.0
    live_slot_steps: int = 0
    slot_steps: int = 0
    updates: int = 0
    interrupts: int = 0
    preemptions: int = 0
    pause_s: float = 0.0
    rebuild_s: float = 0.0
    kv_pages_used: int = 0


@dataclasses.dataclass(frozen=True)
class _Dispatch:
    """A dispatch on its way: whose rows it has, and under which version it runs."""

    sequences: list[Sequence]
    version: int
    chunk: Chunk
    start: float


def check_keys(requests: list[GenerationRequest], unfinished: Callable[[Key], bool]) -> None:
    """Refuses requests of one key, or with the key of an unfinished one (ValueError)."""
    taken = [request.key for request in requests if unfinished(request.key)]
    if taken or len({request.key for request in requests}) < len(requests):
        raise ValueError(f"requests must have keys of their own; twice or unfinished: {taken or 'in this call'}; cancel the old ones first")


class RolloutDriver:
    """Runs requests through an engine.

    Args:
      engine: compiled programs; may be shared.
      update: the weights to begin with.
      seed: the run's seed.
      interruptible: take updates in mid-generation; False lets the running requests finish first, and starts none meanwhile.
      kv_on_update: 'recompute' or 'keep' the pages of unfinished sequences.
      share_prompts: the samples of a group share their prompt's pages.
      on_progress: called after every dispatch, in the driver's thread, under ``lock``.
      on_weights: called with the version once new weights are in use, likewise.
      lock: guards the records; share it with whoever takes consistent snapshots.
      trace: called as trace(name, start, end, **arguments), times of ``time.monotonic``.
    """

    def __init__(
        self,
        engine: SamplerEngine,
        update: WeightUpdate,
        *,
        seed: int,
        interruptible: bool = True,
        kv_on_update: str = "recompute",
        share_prompts: bool = True,
        on_progress: Callable[[Progress], None] = lambda progress: None,
        on_weights: Callable[[int], None] = lambda version: None,
        lock: Any = None,
        trace: Callable[..., None] = lambda *args, **kwargs: None,
    ):
        engine.check_params(update.params)
        self.engine, self.seed, self.interruptible, self.kv_on_update = engine, seed, interruptible, kv_on_update
        self._on_progress, self._on_weights, self._trace = on_progress, on_weights, trace
        self._lock = lock or threading.RLock()
        self._wake = threading.Condition(self._lock)
        self._current = update
        self._pending: WeightUpdate | None = None
        self.schedule = Scheduler(engine.max_concurrent_decodes, engine.pages, engine.page_size, share_prompts)
        self._state = engine.new_state()
        self._on_the_way: collections.deque[_Dispatch] = collections.deque()
        self._last_end = 0.0
        self.statistics = DriverStatistics()

    # From any thread.

    @property
    def version(self) -> int:
        """The version in use."""
        return self._current.version

    def submit(self, requests: Iterable[GenerationRequest]) -> None:
        """Queues requests, first come first served.

        Raises:
          ValueError: a request cannot fit the engine's longest sequence, has no token left to generate, brings a distribution to an engine that
            has one of its own, or has the key of another one that is unfinished.
        """
        requests = list(requests)
        for request in requests:
            self.check_request(request)
        with self._wake:
            check_keys(requests, self.schedule.__contains__)
            self.schedule.submit(requests)
            self._wake.notify_all()

    def check_request(self, request: GenerationRequest) -> None:
        """Refuses a request that cannot run here; see ``submit``."""
        longest = len(request.prompt_tokens) + request.max_new_tokens
        if len(request.tokens) >= request.max_new_tokens:
            raise ValueError(
                f"request {request.key}: {len(request.tokens)} tokens are generated already and max_new_tokens is {request.max_new_tokens}; "
                "raise it, or hand on what there is"
            )
        if not len(request.prompt_tokens) or longest > self.engine.max_length:
            raise ValueError(
                f"request {request.key}: prompt of {len(request.prompt_tokens)} + max_new_tokens {request.max_new_tokens} must be "
                f"1 to the engine's {self.engine.max_length} tokens; shorten the prompt or raise the engine's max_length"
            )
        if request.sampling is not None and not self.engine.per_request:
            raise ValueError(f"request {request.key} brings {request.sampling}, and the engine samples all alike; make it with per_request=True")

    def publish(self, update: WeightUpdate) -> None:
        """Hands over new weights, ready on the engine's devices; of several pending ones the newest is taken.

        Raises:
          ValueError: the version is not newer than the last one handed over, or the engine refuses the parameters.
        """
        self.engine.check_params(update.params)
        with self._wake:
            newest = (self._pending or self._current).version
            if update.version <= newest:
                raise ValueError(f"weights must get newer: version {update.version} after {newest}; publish each version once, in order")
            self._pending = update
            self._wake.notify_all()

    def cancel(self, keys: Iterable[Key]) -> None:
        """Forgets requests; their records end here, and no callback follows."""
        with self._wake:
            self.schedule.cancel(set(keys))

    def partials(self) -> dict[Key, tuple[np.ndarray, np.ndarray, np.ndarray]]:
        """(tokens, behaviour log-probs, versions) so far of all requests, queued ones included."""
        with self._lock:
            queued = {r.key: (r.tokens, r.behaviour_logprobs, r.versions) for r in self.schedule.queue}
            return queued | {key: s.partial() for key, s in self.schedule.running.items()}

    @property
    def unfinished(self) -> int:
        """Requests queued or in slots."""
        with self._lock:
            return len(self.schedule.queue) + len(self.schedule.running)

    # In the driver's thread.

    def run_once(self, wait_s: float = 0.05) -> bool:
        """One round: update, admission, prefill, dispatch. Returns False after an idle wait of at most ``wait_s``."""
        self._take_update()
        with self._lock:
            self.schedule.admit(begin=self._pending is None or self.interruptible)
        self._prefill()
        if not self._dispatch() and not self._on_the_way:
            start = time.monotonic()
            with self._wake:
                if self._pending is None and not self.schedule.queue and not self.schedule.running:
                    self._wake.wait(wait_s)
            self.statistics.idle_s += time.monotonic() - start
            return False
        return True

    def run_until_done(self, deadline_s: float, stop_requested: Callable[[], bool] = lambda: False) -> None:
        """Runs rounds until nothing is unfinished, or somebody asks to stop.

        Raises:
          TimeoutError: after ``deadline_s`` seconds, naming what was unfinished.
        """
        end = time.monotonic() + deadline_s
        while self.unfinished and not stop_requested():
            if time.monotonic() > end:
                raise TimeoutError(f"generation: {self.unfinished} requests unfinished after {deadline_s:.0f} s; raise the limit or lower max_new_tokens")
            self.run_once()

    def _take_update(self) -> None:
        with self._lock:
            if self._pending is None or (not self.interruptible and (self.schedule.running or self.schedule.preempted)):
                return
        start = time.monotonic()
        self._collect()
        with self._lock:
            assert self._pending is not None
            self._current, self._pending = self._pending, None
            running = len(self.schedule.decoding())
            self.statistics.updates += 1
            self.statistics.interrupts += running
            self.schedule.outdate() if self.kv_on_update == "recompute" else self.schedule.part()
        begun = time.monotonic()
        while self._fill(rebuild=True):
            pass
        assert not self.schedule.rebuilding, "a sequence would be decoded from pages of the old weights"
        if running:
            jax.block_until_ready(self._state.keys)
        end = time.monotonic()
        self.statistics.rebuild_s += end - begun
        self.statistics.pause_s += end - start
        self._trace("weight update", start, end, version=self._current.version, interrupted=running, rebuild_s=end - begun)
        with self._lock:
            self._on_weights(self._current.version)

    def _prefill(self) -> None:
        """One program while sequences decode, else as many as it takes until some can."""
        start, requests = time.monotonic(), 0
        while True:
            more = self._fill()
            with self._lock:
                entering = self.schedule.entering()
                decoding = bool(self.schedule.decoding())
            if entering:
                requests += len(entering)
                self._state = self.engine.enter(self._state, self._insertion(entering), self.seed)
            if decoding or not more:
                break
        if requests:
            self._trace("enqueue prefill", start, time.monotonic(), requests=requests)

    def _fill(self, rebuild: bool = False) -> bool:
        """Enqueues the next prefill program, if there is something to fill; with ``rebuild`` only until the decoding sequences are filled."""
        with self._lock:
            if rebuild and not self.schedule.rebuilding:
                return False
            pieces = self.schedule.pieces(self.engine.block_buckets[-1], self.engine.block)
            copies = self.schedule.copies()
            blocks = self._blocks(pieces) if pieces else None
            self.statistics.prefill_tokens += sum(len(piece.tokens) for piece in pieces)
        if blocks is not None:
            self._state = self.engine.prefill_blocks(self._current.params, self._state, blocks)
        slots = self.engine.max_concurrent_decodes
        for first in range(0, len(copies), slots):
            pairs = np.zeros((2, slots), np.int32)
            part = copies[first : first + slots]
            pairs[:, : len(part)] = np.transpose(part)
            self._state = self.engine.copy_pages(self._state, *pairs)
        return bool(pieces or copies)

    def _blocks(self, pieces: list[Piece]) -> Blocks:
        blocks = self.engine.no_blocks(next(n for n in self.engine.block_buckets if n >= len(pieces)))
        for row, piece in enumerate(sorted(pieces, key=lambda p: -(p.start + len(p.tokens)))):
            blocks.tokens[row, : len(piece.tokens)] = piece.tokens
            blocks.starts[row], blocks.counts[row] = piece.start, len(piece.tokens)
            blocks.tables[row, : len(piece.pages)] = piece.pages
        return blocks

    def _insertion(self, entering: list[Sequence]) -> Insertion:
        slots = self.engine.max_concurrent_decodes
        whole, real = np.zeros((6, slots), np.int32), np.ones((2, slots), np.float32)
        whole[0], streams = slots, np.zeros((slots, 2), np.uint32)
        for i, s in enumerate(entering):
            own = s.request.sampling or Sampling()
            last = s.piece(s.length - 1, s.length)[0]
            whole[:, i] = s.slot, last, s.length - 1, s.count, s.request.max_new_tokens, own.top_k
            real[:, i] = own.temperature, own.top_p
            streams[i] = s.request.stream if s.request.stream is not None else s.request.key
        slot, last_tokens, positions, counts, limits, top_k = whole
        return Insertion(slot, last_tokens, positions, counts, limits, streams, real[0], top_k, real[1])

    def _dispatch(self) -> bool:
        """Enqueues the next decoding of all rows that can be decoded, then fetches the one before; False when there are none."""
        with self._lock:
            tokens = self.engine.steps * (len(self._on_the_way) + 1)
            enough = self.schedule.grow(tokens, preempt=False)
        if not enough:
            self._collect()
            with self._lock:
                before = self.schedule.preemptions
                self.schedule.grow(self.engine.steps, preempt=True)
                self.statistics.preemptions += self.schedule.preemptions - before
        with self._lock:
            rows = self.schedule.decoding()
            current, slots = self._current, self.engine.max_concurrent_decodes
            waiting, filling = bool(self.schedule.queue), self.schedule.filling
            self.statistics.kv_pages_used = self.schedule.pool.held
            if rows:
                size = next(n for n in self.engine.row_buckets if n >= len(rows))
                numbers, tables = np.full(size, slots, np.int32), np.zeros((size, self.engine.sequence_pages), np.int32)
                for row, s in enumerate(rows):
                    numbers[row] = s.slot
                    tables[row, : len(s.pages)] = s.pages
        if rows:
            # It ends once its slots are of use to those who wait, or once fewer rows do as well.
            smaller = max((n for n in self.engine.row_buckets if n < size), default=0)
            stop_below = len(rows) - max(1, slots // FINISHED_SHARE) + 1 if waiting else smaller + 1
            steps = FILLING_STEPS if filling else self.engine.steps
            start = time.monotonic()
            self._state, chunk = self.engine.decode(current.params, self._state, numbers, tables, steps=min(steps, self.engine.steps), stop_below=stop_below)
            self._on_the_way.append(_Dispatch(rows, current.version, chunk, start))
        self._collect(AHEAD if rows else 0)
        return bool(rows)

    def _collect(self, left: int = 0) -> None:
        """Fetches dispatches until ``left`` are on their way."""
        while len(self._on_the_way) > left:
            self._take_in(self._on_the_way.popleft())

    def _take_in(self, dispatch: _Dispatch) -> None:
        decoded = dispatch.chunk.unpack()
        end = time.monotonic()
        start = max(dispatch.start, self._last_end)
        self._last_end = end
        finished: list[Trajectory] = []
        made: list[NewTokens] = []
        with self._lock:
            for row, sequence in enumerate(dispatch.sequences):
                n = int(decoded.valid[row])
                if sequence.gone:
                    continue
                if n:
                    sequence.add(decoded.tokens[row, :n], decoded.logprobs[row, :n], dispatch.version)
                    self.schedule.advanced(sequence)
                    more = (decoded.raw_logprobs, decoded.top_ids, decoded.top_logprobs)
                    made.append(
                        NewTokens(sequence.request.key, decoded.tokens[row, :n], decoded.logprobs[row, :n], *(None if x is None else x[row, :n] for x in more))
                    )
                if not decoded.live[row]:
                    finished.append(sequence.trajectory(self.engine.model.eos_ids))
                    self.schedule.leave(sequence)
            new_tokens = tuple((new.key, len(new.tokens)) for new in made)
            total = sum(n for _, n in new_tokens)
            self.statistics.generated_tokens += total
            self.statistics.dispatches += 1
            self.statistics.busy_s += end - start
            self.statistics.live_slot_steps += total
            self.statistics.slot_steps += self.engine.max_concurrent_decodes * int(decoded.valid.max(initial=0))
            self._trace("decode", start, end, version=dispatch.version, tokens=total, slots=len(dispatch.sequences))
            self._on_progress(Progress(dispatch.version, new_tokens, tuple(finished), tuple(made)))

    def close(self, timeout_s: float) -> None:
        """Nothing runs outside of ``run_once``: there is nothing to end."""

    def warm_up(self) -> None:
        """Compiles every program of the declared shapes, so that none is compiled later."""
        params, slots = self._current.params, self.engine.max_concurrent_decodes
        for count in self.engine.block_buckets:
            self._state = self.engine.prefill_blocks(params, self._state, self.engine.no_blocks(count))
        self._state = self.engine.copy_pages(self._state, *np.zeros((2, slots), np.int32))
        self._state = self.engine.enter(self._state, self._insertion([]), self.seed)
        for rows in self.engine.row_buckets:
            tables = np.zeros((rows, self.engine.sequence_pages), np.int32)
            self._state, chunk = self.engine.decode(params, self._state, np.full(rows, slots, np.int32), tables)
            chunk.unpack()
