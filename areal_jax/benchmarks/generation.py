"""One load through the paged sampler: engines and drivers of the measured policy, and the clock around them.

Invariants:
* Every program is compiled before a clock starts.
* A run that did not sample exactly the tokens asked for is an error, not a number.
"""

from __future__ import annotations

import dataclasses
import functools
import time
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from areal_jax.benchmarks.loads import Load
from areal_jax.cluster.meshes import build_mesh
from areal_jax.models.architecture import ModelConfig
from areal_jax.models.policy import param_shapes
from areal_jax.models.sharding import named_shardings, param_specs
from areal_jax.sampler.driver import RolloutDriver
from areal_jax.sampler.engine import SamplerEngine
from areal_jax.sampler.replicas import Replicas, replica_meshes
from areal_jax.types import GenerationRequest, WeightUpdate

DEADLINE_S = 36000.0


@dataclasses.dataclass(frozen=True)
class Subject:
    """The policy that is measured, on the first device, and how its sampler is set.

    Attributes:
      name: for the report.
      model: architecture, without end tokens.
      params: as the engine takes them.
      dtype: of the parameters.
      slots, max_length, page_size, prefill_chunk, steps, attention: as of ``SamplerEngine``.
      seed: of everything random.
    """

    name: str
    model: ModelConfig
    params: Any
    dtype: str
    slots: int
    max_length: int
    page_size: int
    prefill_chunk: int
    steps: int
    attention: str = "auto"
    seed: int = 0

    @functools.cached_property
    def engine(self) -> SamplerEngine:
        """With pages for all slots; one and the same, so that its programs are compiled once."""
        return self.other_engine()

    def other_engine(self, *, max_length: int = 0, slots: int = 0, pages: int = 0, mesh: Mesh | None = None) -> SamplerEngine:
        """A new engine with some settings of its own; 0: the subject's, and pages for all slots; on the first device if no mesh is given."""
        return SamplerEngine(
            self.model,
            mesh or build_mesh(jax.devices()[:1]),
            slots=slots or self.slots,
            max_length=max_length or self.max_length,
            page_size=self.page_size,
            pages=pages,
            prefill_chunk=self.prefill_chunk,
            steps=self.steps,
            seed=self.seed,
            dtype=self.dtype,
            attention=self.attention,
        )

    def driver(self, engine: SamplerEngine, **options: Any) -> RolloutDriver:
        """A driver with all its programs compiled."""
        driver = RolloutDriver(engine, WeightUpdate(0, engine.load_params(self.params)), seed=self.seed, **options)
        driver.warm_up()
        return driver


def replicated(subject: Subject, count: int) -> RolloutDriver | Replicas:
    """A sampler of so many replicas, each on a device of its own with its part of the slots, with all its programs compiled."""
    if count == 1:
        return subject.driver(subject.engine)
    mesh = build_mesh(jax.devices()[:count], data=count)
    engines = [subject.other_engine(slots=subject.slots // count, mesh=part) for part in replica_meshes(mesh)]
    shardings = named_shardings(mesh, param_specs(subject.model), param_shapes(subject.model))
    sampler = Replicas(engines, WeightUpdate(0, jax.device_put(subject.params, shardings)), seed=subject.seed)
    sampler.warm_up()
    return sampler


def run_requests(driver: RolloutDriver | Replicas, requests: Sequence[GenerationRequest]) -> float:
    """Seconds from the first request to the last token.

    Raises:
      RuntimeError: the tokens sampled are not those asked for.
    """
    before, wanted = driver.statistics.generated_tokens, sum(r.max_new_tokens - len(r.tokens) for r in requests)
    began = time.perf_counter()
    driver.submit(requests)
    driver.run_until_done(DEADLINE_S)
    spent = time.perf_counter() - began
    made = driver.statistics.generated_tokens - before
    if made != wanted:
        raise RuntimeError(f"the sampler made {made} tokens of {wanted}")
    return spent


def load_speed(subject: Subject, load: Load, repeats: int) -> dict[str, Any]:
    """Sampled tokens a second over a whole load: median of the repeats, and each."""
    driver = subject.driver(subject.engine)
    run_requests(driver, load.requests())
    driver.statistics = type(driver.statistics)()
    seconds = [run_requests(driver, load.requests()) for _ in range(repeats)]
    s = driver.statistics
    return {
        "sampled_tokens": load.tokens,
        "sampled_tokens_per_s": load.tokens / float(np.median(seconds)),
        "seconds": seconds,
        "slots_in_use": s.live_slot_steps / max(1, s.slot_steps),
        "dispatches": s.dispatches,
    }


def random_prompts(model: ModelConfig, lengths: Sequence[int], seed: int) -> list[np.ndarray]:
    """Random tokens, int32 [length] each."""
    random = np.random.default_rng(seed)
    return [random.integers(2, model.vocab_size, length).astype(np.int32) for length in lengths]


def prefill_speed(subject: Subject, length: int, repeats: int) -> dict[str, Any]:
    """Prompt tokens a second: a prompt a slot, all different, each answered by one token, which is part of the time."""
    driver = subject.driver(subject.engine)
    seconds = []
    for repeat in range(repeats + 1):
        prompts = random_prompts(subject.model, [length] * subject.slots, repeat)
        seconds.append(run_requests(driver, [GenerationRequest(i, repeat, prompt, 1) for i, prompt in enumerate(prompts)]))
    return {"prompt_tokens": length, "prompts": subject.slots, "tokens_per_s": length * subject.slots / float(np.median(seconds[1:])), "seconds": seconds[1:]}
