"""The one sampler behind all protocols: a thread that runs its driver, and requests that wait for tokens in an event loop.

Invariants:
* The driver's rounds run in one thread; what a dispatch brought goes to the event loop in one call, and from there to the requests.
* A request that ends in any way (finished, stopped, cancelled, out of time, failed) leaves neither a record here nor a slot or a place in the
  driver's queue: ``Generation.close`` cancels what is not finished, and every protocol calls it.
* At most ``slots + max_waiting`` samples are unfinished; more are refused, not queued.
* An error of the driver is final: running and later requests get ``Failed``, and ``failure`` tells whoever keeps the process.

    serving ──drain()──► draining (new requests are refused) ──all finished, or abort()──► stopped
       └──driver raises──► failed
"""

from __future__ import annotations

import asyncio
import dataclasses
import hashlib
import itertools
import secrets
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

import numpy as np

from areal_jax.sampler.driver import Key, Progress
from areal_jax.types import GenerationRequest, NewTokens, Sampling


class ServiceError(Exception):
    """A request that is not served; the protocols say why in their own way."""


class Overloaded(ServiceError):
    """As many requests are waiting as may."""


class Draining(ServiceError):
    """The server is shutting down."""


class Failed(ServiceError):
    """The sampler has failed."""


class Refused(ServiceError):
    """The sampler cannot run the request."""


class TimedOut(ServiceError):
    """The request took longer than a request may."""


@dataclasses.dataclass(frozen=True)
class Event:
    """What one dispatch brought to a sample: tokens, an end, or both.

    Attributes:
      index: the sample's place in its request.
      new: tokens with their log-probs; None where only the end is told.
      ended: the sample is finished.
    """

    index: int
    new: NewTokens | None
    ended: bool


@dataclasses.dataclass
class Totals:
    """Since the start."""

    requests: int = 0
    samples: int = 0
    cancelled: int = 0
    refused: int = 0
    prompt_tokens: int = 0
    generated_tokens: int = 0


class Generation:
    """The samples of one request, in the event loop. Use it as an asynchronous context manager: leaving it frees everything."""

    def __init__(self, service: Service, keys: Sequence[Key], deadline: float):
        self._service, self._deadline = service, deadline
        self._open = {key: index for index, key in enumerate(keys)}
        self._queue: asyncio.Queue[Event | ServiceError] = asyncio.Queue()

    async def __aenter__(self) -> Generation:
        return self

    async def __aexit__(self, *_: object) -> None:
        self.close()

    async def events(self) -> AsyncIterator[Event]:
        """Events of all samples, until every one is finished or stopped.

        Raises:
          ServiceError: the server failed, was told to give up, or the request is out of time.
        """
        while self._open or not self._queue.empty():
            try:
                async with asyncio.timeout_at(self._deadline):
                    event = await self._queue.get()
            except TimeoutError as error:
                raise TimedOut(f"the request took longer than 'serve.request_timeout_s' = {self._service.request_timeout_s:g} s; ask for less") from error
            if isinstance(event, ServiceError):
                raise event
            yield event

    def stop(self, index: int) -> None:
        """Ends one sample, whose further tokens are not wanted."""
        self._service._forget([key for key, i in self._open.items() if i == index])

    def close(self) -> None:
        """Ends what is not finished."""
        self._service._forget(list(self._open))

    # In the event loop, called by the service.

    def _deliver(self, key: Key, new: NewTokens | None, ended: bool) -> None:
        index = self._open.pop(key) if ended else self._open[key]
        self._queue.put_nowait(Event(index, new, ended))

    def _fail(self, error: ServiceError) -> None:
        self._queue.put_nowait(error)


class Service:
    """Runs a driver for requests of any protocol. Made and closed by any thread; ``submit`` and what it returns belong to one event loop.

    Args:
      make_driver: called with the driver's ``on_progress``; gives a ``RolloutDriver`` or ``Replicas``, of which it uses
        ``submit``, ``cancel``, ``run_once`` and ``close``.
      slots: samples that the driver decodes together.
      max_waiting: further samples that may wait.
      request_timeout_s: longest life of a request.
      sampling: of requests that name no distribution.
      pages: of the KV cache, given the driver: (used, all); None where it has none.
    """

    def __init__(
        self,
        make_driver: Callable[[Callable[[Progress], None]], Any],
        *,
        slots: int,
        max_waiting: int,
        request_timeout_s: float,
        sampling: Sampling | None = None,
        pages: Callable[[Any], tuple[int, int]] | None = None,
    ):
        self.driver: Any = make_driver(self._on_progress)
        self._sampling, self._pages = sampling or Sampling(), pages
        self.slots, self.max_waiting, self.request_timeout_s = slots, max_waiting, request_timeout_s
        self.totals = Totals()
        self.failure: BaseException | None = None
        self.draining = False
        self._loop: asyncio.AbstractEventLoop | None = None
        self._generations: dict[Key, Generation] = {}
        self._groups = itertools.count()
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="sampler", daemon=True)

    def start(self, loop: asyncio.AbstractEventLoop) -> None:
        """Starts the driver's thread; tokens go to ``loop``."""
        self._loop = loop
        self._thread.start()

    def close(self, timeout_s: float = 30.0) -> bool:
        """Ends the driver's thread after its round; whether it has ended in time."""
        self._stopped.set()
        if self._thread.ident is not None:
            self._thread.join(timeout_s)
        if self._thread.is_alive():
            return False
        try:
            self.driver.close(timeout_s)
        except TimeoutError:
            return False
        return True

    # In the event loop.

    @property
    def unfinished(self) -> int:
        """Samples that are waiting or running."""
        return len(self._generations)

    @property
    def pages(self) -> tuple[int, int] | None:
        """(used, all) pages of the KV cache."""
        return None if self._pages is None else self._pages(self.driver)

    def submit(
        self, prompts: Sequence[np.ndarray], *, samples: int, max_new_tokens: int | Sequence[int], sampling: Sampling | None, seed: int | None = None
    ) -> Generation:
        """Queues a request.

        Args:
          prompts: int32 [length] each.
          samples: of each prompt; sample i of prompt p has index p · samples + i.
          max_new_tokens: of each sample, or one number a prompt.
          sampling: None: the service's own.
          seed: equal seeds give equal samples, whatever else is running; None: a new one.

        Raises:
          ServiceError: draining, failed, overloaded, or refused by the driver.
        """
        self._check(len(prompts) * samples)
        limits = [max_new_tokens] * len(prompts) if isinstance(max_new_tokens, int) else max_new_tokens
        requests = []
        for prompt, limit in zip(prompts, limits, strict=True):
            name = secrets.randbits(64) if seed is None else seed
            group = next(self._groups) % 2**31
            requests += [GenerationRequest(group, i, prompt, limit, sampling=sampling or self._sampling, stream=stream_of(name, i)) for i in range(samples)]
        assert self._loop is not None
        generation = Generation(self, [request.key for request in requests], self._loop.time() + self.request_timeout_s)
        self._generations.update((request.key, generation) for request in requests)
        try:
            self.driver.submit(requests)
        except ValueError as error:
            for request in requests:
                del self._generations[request.key]
            raise Refused(str(error)) from error
        self.totals.requests += 1
        self.totals.samples += len(requests)
        self.totals.prompt_tokens += sum(len(prompt) for prompt in prompts)
        return generation

    def drain(self) -> None:
        """From now on new requests are refused."""
        self.draining = True

    def abort(self, error: ServiceError) -> None:
        """Running requests get ``error``."""
        for generation in set(self._generations.values()):
            generation._fail(error)
            generation.close()

    def _check(self, samples: int) -> None:
        if self.failure is not None:
            raise Failed(f"the sampler has failed: {self.failure}")
        if self.draining:
            raise Draining("the server is shutting down; send the request to another, or later")
        if self.unfinished + samples > self.slots + self.max_waiting:
            self.totals.refused += 1
            raise Overloaded(f"{self.unfinished} of at most {self.slots + self.max_waiting} samples are running or waiting; try again later")

    def _forget(self, keys: Sequence[Key]) -> None:
        known = [key for key in keys if key in self._generations]
        for key in known:
            self._generations.pop(key)._open.pop(key, None)
        if known:
            self.totals.cancelled += len(known)
            self.driver.cancel(known)

    def _deliver(self, progress: Progress) -> None:
        ended = {(trajectory.group_id, trajectory.sample_index) for trajectory in progress.finished}
        told = set()
        for new in progress.tokens:
            generation = self._generations.get(new.key)
            if generation is not None:
                self.totals.generated_tokens += len(new.tokens)
                generation._deliver(new.key, new, new.key in ended)
                told.add(new.key)
        for key in ended:
            generation = self._generations.pop(key, None)
            if generation is not None and key not in told:
                generation._deliver(key, None, True)

    def _fail(self, error: BaseException) -> None:
        self.failure = error
        self.abort(Failed(f"the sampler has failed: {error}"))

    # In the driver's thread.

    def _on_progress(self, progress: Progress) -> None:
        self._call(self._deliver, progress)

    def _call(self, function: Callable[..., None], argument: Any) -> None:
        assert self._loop is not None
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(function, argument)

    def _run(self) -> None:
        try:
            while not self._stopped.is_set():
                self.driver.run_once()
        except Exception as error:  # whatever it is, nobody else would see it in this thread
            self.failure = error
            self._call(self._fail, error)


def stream_of(seed: int, index: int) -> tuple[int, int]:
    """The random stream of a sample: two uint32 that (seed, index) name."""
    digest = hashlib.blake2b(f"{seed}/{index}".encode(), digest_size=8).digest()
    return int.from_bytes(digest[:4], "big"), int.from_bytes(digest[4:], "big")
