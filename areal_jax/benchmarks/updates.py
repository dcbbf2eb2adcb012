"""What a weight update costs the sampler, and what interrupting brings against waiting.

Invariants:
* Updates are real pushes: new arrays, copied on the device, with a version of their own.
* All ways of taking updates see the same requests, the same updates at the same times after the start, and the same seconds.
"""

from __future__ import annotations

import dataclasses
import statistics
import time
from typing import Any

from areal_jax.benchmarks.generation import Subject, random_prompts, run_requests
from areal_jax.benchmarks.loads import Load
from areal_jax.models.sharding import param_specs
from areal_jax.sampler.driver import RolloutDriver
from areal_jax.sampler.engine import SamplerEngine
from areal_jax.types import GenerationRequest
from areal_jax.weights.push import WeightPusher

WAYS = {"interruptible": {}, "waiting": {"interruptible": False}, "without_refill": {"kv_on_update": "keep"}}
"""Of taking an update: in mid-generation, once the running requests have ended, and in mid-generation with the old keys and values kept, which bounds
what a cheaper refill could bring."""


def pusher(subject: Subject, engine: SamplerEngine) -> WeightPusher:
    """From the engine's device to itself, as where trainer and sampler share one."""
    return WeightPusher(engine.mesh, engine.mesh, param_specs(subject.model), dtype=subject.dtype)


class Refill:
    """Keeps a driver's queue filled with the requests of a load, over and over, each time as new ones."""

    def __init__(self, driver: RolloutDriver, load: Load):
        self._driver, self._requests, self._rounds = driver, load.requests(), 0

    def __call__(self) -> None:
        """Queues another round once less than one is unfinished."""
        if self._driver.unfinished < len(self._requests):
            shift = self._rounds * len(self._requests)
            self._driver.submit([dataclasses.replace(r, group_id=r.group_id + shift) for r in self._requests])
            self._rounds += 1


def update_cost(subject: Subject, load: Load, updates: int) -> dict[str, Any]:
    """Seconds of weight updates while every slot is in use: medians, and each."""
    engine = subject.engine
    driver = subject.driver(engine)
    push = pusher(subject, engine)
    source = engine.load_params(subject.params)
    refill = Refill(driver, load)
    push.push(source, 0)
    transfers, pauses, rebuilds, rebuilt, interrupted = [], [], [], [], []
    for version in range(1, updates + 2):
        until = driver.statistics.dispatches + 6
        while driver.statistics.dispatches < until:
            refill()
            driver.run_once()
        update = push.push(source, version)
        before = dataclasses.replace(driver.statistics)
        prefilled = driver.statistics.prefill_tokens
        driver.publish(update)
        driver.run_once()
        now = driver.statistics
        transfers.append(update.transfer_s)
        pauses.append(now.pause_s - before.pause_s)
        rebuilds.append(now.rebuild_s - before.rebuild_s)
        interrupted.append(now.interrupts - before.interrupts)
        rebuilt.append(now.prefill_tokens - prefilled)
    return {
        "transfer_ms": statistics.median(transfers[1:]) * 1e3,
        "pause_ms": statistics.median(pauses[1:]) * 1e3,
        "rebuild_ms": statistics.median(rebuilds[1:]) * 1e3,
        "sequences_rebuilt": statistics.median(interrupted[1:]),
        "tokens_prefilled_in_the_round": statistics.median(rebuilt[1:]),
        "bytes": update.bytes,
        "pauses_ms": [p * 1e3 for p in pauses[1:]],
    }


def interruption(subject: Subject, load: Load, every_s: float, seconds: float, repeats: int) -> dict[str, Any]:
    """Sampled tokens a second with an update every ``every_s`` seconds, by the way in which it is taken (``WAYS``).

    Args:
      subject: its sampler.
      load: repeated without end.
      every_s: between two updates.
      seconds: of one run.
      repeats: alternations; medians are reported.
    """
    engine = subject.engine
    push = pusher(subject, engine)
    source = engine.load_params(subject.params)
    push.push(source, 0)
    rates: dict[str, list[float]] = {name: [] for name in WAYS}
    taken: dict[str, list[int]] = {name: [] for name in WAYS}
    for _ in range(repeats):
        for name, options in WAYS.items():
            driver = subject.driver(engine, **options)
            rates[name].append(_rate(driver, push, source, Refill(driver, load), every_s, seconds))
            taken[name].append(driver.statistics.updates)
    medians = {name: statistics.median(values) for name, values in rates.items()}
    return {
        "update_every_s": every_s,
        "seconds_a_run": seconds,
        **{f"{name}_tokens_per_s": value for name, value in medians.items()},
        "interruptible_over_waiting": medians["interruptible"] / medians["waiting"],
        "without_refill_over_waiting": medians["without_refill"] / medians["waiting"],
        "updates_taken": {name: statistics.median(values) for name, values in taken.items()},
        "runs_tokens_per_s": rates,
    }


def _rate(driver: RolloutDriver, push: WeightPusher, source: Any, refill: Refill, every_s: float, seconds: float) -> float:
    refill()
    driver.run_once()
    began, made, version = time.perf_counter(), driver.statistics.generated_tokens, 0
    while (now := time.perf_counter() - began) < seconds:
        if now >= (version + 1) * every_s:
            version += 1
            driver.publish(push.push(source, version))
        refill()
        driver.run_once()
    return (driver.statistics.generated_tokens - made) / (time.perf_counter() - began)


def group_prefill(subject: Subject, prompt: int, samples: int, repeats: int) -> dict[str, Any]:
    """Prefill work of one group with and without sharing its prompt: tokens computed and seconds until each sample has its first token."""
    engine = subject.other_engine(max_length=prompt + 2, slots=samples)
    results: dict[str, Any] = {"samples": samples, "prompt_tokens": prompt}
    tokens: dict[str, int] = {}
    seconds: dict[str, list[float]] = {"shared": [], "not_shared": []}
    drivers = {name: subject.driver(engine, share_prompts=name == "shared") for name in seconds}
    for repeat in range(repeats + 1):
        [one] = random_prompts(subject.model, [prompt], repeat)
        for name, driver in drivers.items():
            before = driver.statistics.prefill_tokens
            seconds[name].append(run_requests(driver, [GenerationRequest(repeat, i, one, 1) for i in range(samples)]))
            tokens[name] = driver.statistics.prefill_tokens - before
    for name, values in seconds.items():
        results[name] = {"tokens_prefilled": tokens[name], "seconds": statistics.median(values[1:])}
    results["tokens_ratio"] = tokens["not_shared"] / tokens["shared"]
    results["seconds_ratio"] = results["not_shared"]["seconds"] / results["shared"]["seconds"]
    return results
