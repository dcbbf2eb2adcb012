"""Several drivers as one sampler: data-parallel engines on disjoint devices, each with pages, slots and a thread of its own.

Invariants:
* It has ``RolloutDriver``'s interface; tokens do not depend on which replica makes them.
* The samples of a group go to one replica, so that they share their prompt's pages: to the one with the most pages that are neither held nor asked for.
* Requests wait here, in their order, while every replica has enough queued; so none is bound to a busy replica early.
* Weights go in replica by replica, each between two dispatches of its own. The version in use is that of the last one to take them.
* The threads exist from the first ``run_once`` to ``close``; a failure of one ends the others and is raised in the caller's thread.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import itertools
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding

from areal_jax.sampler.driver import DriverStatistics, Key, Progress, RolloutDriver, check_keys
from areal_jax.sampler.engine import SamplerEngine
from areal_jax.types import GenerationRequest, WeightUpdate

QUEUED_SHARE = 4
"""A replica has enough queued with one request for so many slots."""


class Replicas:
    """Runs requests through several engines of one shape.

    Args:
      engines: on disjoint devices.
      update: the weights to begin with, on a mesh that holds a copy of them for each engine (``replica_meshes``).
      on_progress, on_weights, lock: as for ``RolloutDriver``; ``on_weights`` once all replicas use a version.
      traces: of the drivers, one each; empty: none.
      options: of the drivers, likewise.
    """

    def __init__(
        self,
        engines: Sequence[SamplerEngine],
        update: WeightUpdate,
        *,
        on_progress: Callable[[Progress], None] = lambda progress: None,
        on_weights: Callable[[int], None] = lambda version: None,
        lock: Any = None,
        traces: Sequence[Callable[..., None]] = (),
        **options: Any,
    ):
        self._lock = lock or threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._on_progress, self._on_weights = on_progress, on_weights
        self._queue: collections.deque[list[GenerationRequest]] = collections.deque()
        self._progress = 0
        self._failure: BaseException | None = None
        self._stop = threading.Event()
        self._threads: list[threading.Thread] = []
        self._told = update.version
        traces = traces or [lambda *args, **kwargs: None] * len(engines)
        self.drivers = [
            RolloutDriver(engine, part_of(update, engine), on_progress=self._on_part, on_weights=self._on_version, lock=self._lock, trace=trace, **options)
            for engine, trace in zip(engines, traces, strict=True)
        ]

    # From any thread.

    @property
    def engine(self) -> SamplerEngine:
        """The first replica's engine."""
        return self.drivers[0].engine

    @property
    def version(self) -> int:
        """The newest version that all replicas use."""
        return min(driver.version for driver in self.drivers)

    @property
    def statistics(self) -> DriverStatistics:
        """The sums over all replicas."""
        parts = [dataclasses.astuple(driver.statistics) for driver in self.drivers]
        return DriverStatistics(*(sum(values) for values in zip(*parts, strict=True)))

    def submit(self, requests: Iterable[GenerationRequest]) -> None:
        """As ``RolloutDriver.submit``."""
        requests = list(requests)
        for request in requests:
            self.drivers[0].check_request(request)
        with self._lock:
            waiting = {r.key for group in self._queue for r in group}
            check_keys(requests, lambda key: key in waiting or any(key in driver.schedule for driver in self.drivers))
            self._queue.extend(list(group) for _, group in itertools.groupby(requests, key=lambda r: r.group_id))
            self._hand_out()

    def publish(self, update: WeightUpdate) -> None:
        """As ``RolloutDriver.publish``; each engine gets its own copy's arrays."""
        parts = [part_of(update, driver.engine) for driver in self.drivers]
        with self._lock:
            for driver, part in zip(self.drivers, parts, strict=True):
                driver.publish(part)

    def cancel(self, keys: Iterable[Key]) -> None:
        """As ``RolloutDriver.cancel``."""
        gone = set(keys)
        with self._lock:
            kept = ([r for r in group if r.key not in gone] for group in self._queue)
            self._queue = collections.deque(group for group in kept if group)
            for driver in self.drivers:
                driver.cancel(gone)
            self._hand_out()

    def partials(self) -> dict[Key, tuple[np.ndarray, np.ndarray, np.ndarray]]:
        """As ``RolloutDriver.partials``."""
        with self._lock:
            waiting = {r.key: (r.tokens, r.behaviour_logprobs, r.versions) for group in self._queue for r in group}
            return functools.reduce(lambda one, other: one | other, (driver.partials() for driver in self.drivers), waiting)

    @property
    def unfinished(self) -> int:
        """Requests waiting here, queued or in slots."""
        with self._lock:
            return sum(map(len, self._queue)) + sum(driver.unfinished for driver in self.drivers)

    # In the caller's thread.

    def warm_up(self) -> None:
        """Compiles every program of every replica."""
        for driver in self.drivers:
            driver.warm_up()

    def run_once(self, wait_s: float = 0.05) -> bool:
        """Waits up to ``wait_s`` for progress of any replica; False when there was none. Raises what a replica's thread raised."""
        with self._changed:
            before = self._progress
            if not self._threads:
                self._start()
            self._changed.wait_for(lambda: self._progress != before or self._failure is not None, wait_s)
            if self._failure is not None:
                raise self._failure
            return self._progress != before

    def run_until_done(self, deadline_s: float, stop_requested: Callable[[], bool] = lambda: False) -> None:
        """As ``RolloutDriver.run_until_done``; the threads end with it."""
        end = time.monotonic() + deadline_s
        try:
            while self.unfinished and not stop_requested():
                if time.monotonic() > end:
                    raise TimeoutError(f"generation: {self.unfinished} requests unfinished after {deadline_s:.0f} s; raise the limit or lower max_new_tokens")
                self.run_once()
        finally:
            self.close(timeout_s=60.0)

    def close(self, timeout_s: float) -> None:
        """Ends the threads at their next dispatch boundary; ``run_once`` would start them anew.

        Raises:
          TimeoutError: a dispatch did not end in time.
        """
        self._stop.set()
        for thread in self._threads:
            thread.join(timeout_s)
            if thread.is_alive():
                raise TimeoutError(f"the thread '{thread.name}' did not end within {timeout_s:g} s: a dispatch of the sampler is still running")
        self._threads = []

    # Inside.

    def _start(self) -> None:
        self._stop.clear()
        self._threads = [
            threading.Thread(target=self._drive, args=(driver,), name=f"sampler replica {i}", daemon=True) for i, driver in enumerate(self.drivers)
        ]
        for thread in self._threads:
            thread.start()

    def _drive(self, driver: RolloutDriver) -> None:
        try:
            while not self._stop.is_set():
                driver.run_once()
        except BaseException as error:  # raised by ``run_once``, in the caller's thread
            self._stop.set()
            with self._changed:
                self._failure = self._failure or error
                self._changed.notify_all()

    def _on_part(self, progress: Progress) -> None:
        self._progress += 1
        self._on_progress(progress)
        self._hand_out()
        self._changed.notify_all()

    def _on_version(self, version: int) -> None:
        self._progress += 1
        common = self.version
        if common > self._told:
            self._told = common
            self._on_weights(common)
        self._changed.notify_all()

    def _hand_out(self) -> None:
        """Waiting groups to the replicas that have few queued."""
        while self._queue:
            enough = max(1, self.engine.max_concurrent_decodes // QUEUED_SHARE)
            ready = [driver for driver in self.drivers if len(driver.schedule.queue) < enough]
            if not ready:
                return
            max(ready, key=lambda driver: driver.schedule.unclaimed_pages).submit(self._queue.popleft())


def replica_meshes(mesh: Mesh) -> list[Mesh]:
    """The sub-meshes of a sampler's mesh, one for each place of the data axis, which has size 1 in them."""
    axis = mesh.axis_names.index("data")
    return [Mesh(mesh.devices.take([i], axis), mesh.axis_names, axis_types=mesh.axis_types) for i in range(mesh.shape["data"])]


def part_of(update: WeightUpdate, engine: SamplerEngine) -> WeightUpdate:
    """The update's own arrays on the engine's devices; nothing is copied."""

    def part(leaf: jax.Array, sharding: NamedSharding) -> jax.Array:
        if leaf.sharding.is_equivalent_to(sharding, leaf.ndim):
            return leaf
        here = set(sharding.device_set)
        return jax.make_array_from_single_device_arrays(leaf.shape, sharding, [s.data for s in leaf.addressable_shards if s.device in here])

    return dataclasses.replace(update, params=jax.tree.map(part, update.params, engine.param_shardings))
