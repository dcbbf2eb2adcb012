"""The interruptible driver: continuous batching over the engine's slots, with weights that change in mid-generation.

Invariants:
* A dispatch takes (params, version) as one value read before it; every token it makes is stamped with that version.
* A pending weight update is taken between two dispatches: the new weights go in, the cache of every unfinished sequence is
  rebuilt under them (``kv_on_update='recompute'``), its token budget stays, and decoding goes on from its newest token.
* A request's tokens depend on its key and the weights alone, not on its slot or its neighbours.
* The host's record of a sequence is complete: it is enough to rebuild the cache, to interrupt and to go on elsewhere.

Life of a request: queued → in a slot → (rebuilt at an update)* → finished (stop token or limit) | cancelled.

One thread calls ``run_once``; the others call ``submit``, ``publish``, ``cancel`` and ``partials`` at any time.
"""

from __future__ import annotations

import collections
import dataclasses
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import numpy as np

from areal_jax.sampler.engine import SamplerEngine
from areal_jax.sampler.state import Insertion
from areal_jax.types import GenerationRequest, NewTokens, Trajectory, WeightUpdate

Key = tuple[int, int]


@dataclasses.dataclass(frozen=True)
class Progress:
    """What one dispatch brought: how many new tokens by request, the requests that ended in it, and the tokens themselves."""

    version: int
    new_tokens: tuple[tuple[Key, int], ...]
    finished: tuple[Trajectory, ...]
    tokens: tuple[NewTokens, ...] = ()


@dataclasses.dataclass
class DriverStatistics:
    """Totals since the start; times in seconds."""

    generated_tokens: int = 0
    prefill_tokens: int = 0
    dispatches: int = 0
    busy_s: float = 0.0
    idle_s: float = 0.0
    live_slot_steps: int = 0
    slot_steps: int = 0
    updates: int = 0
    interrupts: int = 0
    pause_s: float = 0.0
    rebuild_s: float = 0.0


class _Sequence:
    """Host record of one request in a slot."""

    def __init__(self, request: GenerationRequest, capacity: int):
        self.request = request
        done = len(request.tokens)
        self.count = done
        self.tokens = np.zeros(capacity, np.int32)
        self.logprobs = np.zeros(capacity, np.float32)
        self.versions = np.zeros(capacity, np.int32)
        self.tokens[:done], self.logprobs[:done], self.versions[:done] = request.tokens, request.behaviour_logprobs, request.versions

    @property
    def length(self) -> int:
        return len(self.request.prompt_tokens) + self.count

    def whole(self) -> np.ndarray:
        return np.concatenate([self.request.prompt_tokens, self.tokens[: self.count]])

    def partial(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        n = self.count
        return self.tokens[:n].copy(), self.logprobs[:n].copy(), self.versions[:n].copy()


class RolloutDriver:
    """Runs requests through an engine.

    Args:
      engine: compiled programs; may be shared.
      update: the weights to begin with.
      prefill_groups: distinct sequences prefilled in one program; long ones in more than one.
      group_size: samples that may share one of them.
      seed: the run's seed.
      interruptible: take updates in mid-generation; False lets the running requests finish first, and starts none meanwhile.
      kv_on_update: 'recompute' or 'keep' the cache of unfinished sequences.
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
        prefill_groups: int,
        group_size: int,
        seed: int,
        interruptible: bool = True,
        kv_on_update: str = "recompute",
        on_progress: Callable[[Progress], None] = lambda progress: None,
        on_weights: Callable[[int], None] = lambda version: None,
        lock: Any = None,
        trace: Callable[..., None] = lambda *args, **kwargs: None,
    ):
        engine.check_params(update.params)
        self.engine, self.seed, self.interruptible, self.kv_on_update = engine, seed, interruptible, kv_on_update
        self._groups = (prefill_groups, group_size)
        self._on_progress, self._on_weights, self._trace = on_progress, on_weights, trace
        self._lock = lock or threading.RLock()
        self._wake = threading.Condition(self._lock)
        self._current = update
        self._pending: WeightUpdate | None = None
        self._queue: collections.deque[GenerationRequest] = collections.deque()
        self._slots: list[_Sequence | None] = [None] * engine.max_concurrent_decodes
        self._cancelled: set[int] = set()
        self._state = engine.new_state()
        self.statistics = DriverStatistics()

    # From any thread.

    @property
    def version(self) -> int:
        """The version in use."""
        return self._current.version

    def submit(self, requests: Iterable[GenerationRequest]) -> None:
        """Queues requests, first come first served.

        Raises:
          ValueError: a request cannot fit the engine's longest sequence, or has no token left to generate.
        """
        requests = list(requests)
        for request in requests:
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
        with self._wake:
            self._queue.extend(requests)
            self._wake.notify_all()

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
        gone = set(keys)
        with self._wake:
            self._queue = collections.deque(r for r in self._queue if r.key not in gone)
            for slot, sequence in enumerate(self._slots):
                if sequence is not None and sequence.request.key in gone:
                    self._slots[slot] = None
                    self._cancelled.add(slot)

    def partials(self) -> dict[Key, tuple[np.ndarray, np.ndarray, np.ndarray]]:
        """(tokens, behaviour log-probs, versions) so far of all requests, queued ones included."""
        with self._lock:
            queued = {r.key: (r.tokens, r.behaviour_logprobs, r.versions) for r in self._queue}
            return queued | {s.request.key: s.partial() for s in self._slots if s is not None}

    @property
    def unfinished(self) -> int:
        """Requests queued or in slots."""
        with self._lock:
            return len(self._queue) + sum(s is not None for s in self._slots)

    # In the driver's thread.

    def run_once(self, wait_s: float = 0.05) -> bool:
        """One round: update, admission, dispatch. Returns False after an idle wait of at most ``wait_s``."""
        self._take_update()
        self._admit()
        if not any(self._slots):
            start = time.monotonic()
            with self._wake:
                if self._pending is None and not self._queue:
                    self._wake.wait(wait_s)
            self.statistics.idle_s += time.monotonic() - start
            return False
        self._dispatch()
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
            running = [(slot, s) for slot, s in enumerate(self._slots) if s is not None]
            if self._pending is None or (running and not self.interruptible):
                return
            start = time.monotonic()
            self._current, self._pending = self._pending, None
            self.statistics.updates += 1
            self.statistics.interrupts += len(running)
        begun = time.monotonic()
        if self.kv_on_update == "recompute":
            self._rebuild(running)
        rebuilt = time.monotonic() - begun if running else 0.0
        end = time.monotonic()
        self.statistics.rebuild_s += rebuilt
        self.statistics.pause_s += end - start
        self._trace("weight update", start, end, version=self._current.version, interrupted=len(running), rebuild_s=rebuilt)
        with self._lock:
            self._on_weights(self._current.version)

    def _rebuild(self, running: Sequence[tuple[int, _Sequence]]) -> None:
        """Recomputes the cache of the running sequences under the new weights: each shard of the slots its own, the longest first."""
        shards = self.engine.shards
        own = len(self._slots) // shards
        waiting = [sorted((item for item in running if item[0] // own == shard), key=lambda item: item[1].length) for shard in range(shards)]
        while any(waiting):
            width = self.engine.width(max(part[-1][1].length for part in waiting if part))
            rows = self.engine.rebuild_rows(width)
            sequences = np.full((rows, width), self.engine.model.pad_id, np.int32)
            slots = np.full(rows, own, np.int32)
            for row in range(rows):
                part = waiting[row * shards // rows]
                if part:
                    slot, sequence = part.pop()
                    sequences[row, : sequence.length] = sequence.whole()
                    slots[row] = slot % own
            self._state = self.engine.resize(self._state, max(self._state.length, self.engine.bucket(width)))
            self._state = self.engine.rebuild(self._current.params, self._state, sequences, slots)
        jax.block_until_ready(self._state.tokens)
        self.statistics.prefill_tokens += sum(s.length for _, s in running)

    def _admit(self) -> None:
        """Puts queued requests into free slots, as many programs as needed."""
        while True:
            with self._lock:
                if self._pending is not None and not self.interruptible:
                    return
                batch = self._next_entries()
                if self._cancelled:
                    marked = np.zeros(len(self._slots), bool)
                    marked[list(self._cancelled)] = True
                    self._cancelled.clear()
                    self._state = self.engine.free_resource(self._state, marked)
                current = self._current
            if not batch:
                return
            start = time.monotonic()
            sequences, insertion = self._entry_arrays(batch)
            self._state = self.engine.resize(self._state, max(self._state.length, self.engine.bucket(sequences.shape[1])))
            self._state = self.engine.enter(current.params, self._state, sequences, insertion, self.seed)
            self._trace("prefill", start, time.monotonic(), requests=len(batch))

    def _next_entries(self) -> list[tuple[int, _Sequence]]:
        """Requests for one prefill program: so many, over so many distinct sequences, as ``SamplerEngine.enter_shape`` has at the longest one's width."""
        free = [slot for slot, sequence in enumerate(self._slots) if sequence is None]
        batch: list[tuple[int, _Sequence]] = []
        rows: set[Any] = set()
        longest = 0
        while self._queue and len(batch) < len(free):
            request = self._queue[0]
            rows.add(request.group_id if not len(request.tokens) else request.key)
            longest = max(longest, len(request.prompt_tokens) + len(request.tokens))
            most_rows, most = self.engine.enter_shape(self.engine.width(longest), *self._groups)
            if len(rows) > most_rows or len(batch) >= most:
                break
            self._queue.popleft()
            sequence = _Sequence(request, request.max_new_tokens)
            slot = free[len(batch)]
            self._slots[slot] = sequence
            batch.append((slot, sequence))
        return batch

    def _entry_arrays(self, batch: Sequence[tuple[int, _Sequence]]) -> tuple[np.ndarray, Insertion]:
        width = self.engine.width(max(s.length for _, s in batch))
        most_rows, entries = self.engine.enter_shape(width, *self._groups)
        sequences = np.full((most_rows, width), self.engine.model.pad_id, np.int32)
        columns = np.zeros((8, entries), np.int32)
        columns[1] = len(self._slots)
        rows: dict[Any, int] = {}
        for i, (slot, s) in enumerate(batch):
            whole = s.whole()
            name = s.request.group_id if not len(s.request.tokens) else s.request.key
            if name not in rows:
                rows[name] = len(rows)
                sequences[rows[name], : len(whole)] = whole
                self.statistics.prefill_tokens += len(whole)
            columns[:, i] = (rows[name], slot, whole[-1], len(whole) - 1, s.count, s.request.max_new_tokens, *s.request.key)
        return sequences, Insertion(*columns)

    def _dispatch(self) -> None:
        with self._lock:
            current = self._current
            lengths = [s.length for s in self._slots if s is not None]
        if not lengths:  # all were cancelled since the look at the slots
            return
        room = min(self.engine.bucket(max(lengths) + self.engine.steps), self.engine.max_length)
        self._state = self.engine.resize(self._state, room)
        start = time.monotonic()
        self._state, chunk = self.engine.generate_chunk(current.params, self._state)
        tokens, logprobs, valid, live = chunk.unpack()
        end = time.monotonic()
        finished: list[Trajectory] = []
        made: list[NewTokens] = []
        with self._lock:
            for slot, sequence in enumerate(self._slots):
                n = int(valid[slot])
                if sequence is None or slot in self._cancelled:
                    continue
                at = slice(sequence.count, sequence.count + n)
                sequence.tokens[at], sequence.logprobs[at], sequence.versions[at] = tokens[slot, :n], logprobs[slot, :n], current.version
                sequence.count += n
                if n:
                    made.append(NewTokens(sequence.request.key, tokens[slot, :n], logprobs[slot, :n]))
                if not live[slot]:
                    finished.append(self._finish(sequence))
                    self._slots[slot] = None
            new_tokens = tuple((new.key, len(new.tokens)) for new in made)
            total = sum(n for _, n in new_tokens)
            self.statistics.generated_tokens += total
            self.statistics.dispatches += 1
            self.statistics.busy_s += end - start
            self.statistics.live_slot_steps += total
            self.statistics.slot_steps += len(self._slots) * int(valid.max(initial=0))
            self._trace("decode", start, end, version=current.version, tokens=total, slots=len(lengths))
            self._on_progress(Progress(current.version, new_tokens, tuple(finished), tuple(made)))

    def _finish(self, sequence: _Sequence) -> Trajectory:
        tokens, logprobs, versions = sequence.partial()
        request = sequence.request
        return Trajectory(
            group_id=request.group_id,
            sample_index=request.sample_index,
            prompt_tokens=request.prompt_tokens,
            tokens=tokens,
            behaviour_logprobs=logprobs,
            versions=versions,
            truncated=not len(tokens) or int(tokens[-1]) not in self.engine.model.eos_ids,
        )

    def warm_up(self) -> None:
        """Compiles every program of the declared shapes, so that none is compiled later."""
        params = self._current.params
        for length in self.engine.buckets:
            for width in (w for w in self.engine.widths if w <= length):
                rows, entries = self.engine.enter_shape(width, *self._groups)
                columns = np.zeros((8, entries), np.int32)
                columns[1] = len(self._slots)
                sequences = np.zeros((rows, width), np.int32)
                state = self.engine.enter(params, self.engine.new_state(length), sequences, Insertion(*columns), self.seed)
                if self.kv_on_update == "recompute":
                    rows = self.engine.rebuild_rows(width)
                    self.engine.rebuild(params, state, np.zeros((rows, width), np.int32), np.full(rows, len(self._slots), np.int32))
            for other in self.engine.buckets:
                self.engine.resize(self.engine.new_state(length), other)
            state, _ = self.engine.generate_chunk(params, self.engine.new_state(length))
            self.engine.free_resource(state, np.zeros(len(self._slots), bool))
