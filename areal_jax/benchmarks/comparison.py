"""``launch/benchmark.py transformers``: the same load through ``transformers`` generate and through the paged sampler, in turn.

Invariants:
* Both sides run the same checkpoint in float32 on the same cores, on the CPU, sample the same number of tokens for the same prompts, and are warm.
* The sampler has one replica a core by default, each of one thread; ``transformers`` has threads.
* ``transformers`` has the batch size and the number of threads that served it best on the same load with lengths divided by 4.
* Tokens a second count the tokens asked for, on both sides.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import statistics
import sys
import tempfile
from typing import Any

from areal_jax.benchmarks import flags
from areal_jax.benchmarks.loads import make_load
from areal_jax.benchmarks.transformers_side import TransformersSide
from areal_jax.config import ConfigError

SHORTER = 4
"""Lengths are divided by this where batch size and threads are chosen."""
DEFAULTS = {
    "model": "",
    "random": "",
    "slots": "256",
    "replicas": "0",
    "requests": "256",
    "lengths": "longtail:32:256",
    "prompt": "8:24",
    "batches": "16,32,64,128,256",
    "threads": "1,2",
    "repeats": "3",
    "steps": "8",
    "page-size": "32",
    "prefill-chunk": "512",
    "seed": "0",
    "out": "",
}


def main(argv: list[str]) -> int:
    """Measures, prints one table and writes JSON to ``--out``."""
    values = flags.parse(argv, DEFAULTS)
    slots, requests, repeats, steps, page_size, chunk = (
        flags.whole(values, name) for name in ("slots", "requests", "repeats", "steps", "page-size", "prefill-chunk")
    )
    replicas = flags.whole(values, "replicas", 0)
    seed, prompt, file = flags.whole(values, "seed", 0), flags.span(values, "prompt"), flags.output(values)
    batches, threads = flags.several(values, "batches"), flags.several(values, "threads")
    with contextlib.ExitStack() as stack:
        directory = values["model"] or stack.enter_context(tempfile.TemporaryDirectory())
        theirs = stack.enter_context(TransformersSide(directory))

        replicas = replicas or len(os.sched_getaffinity(0))
        if slots % replicas:
            raise ConfigError(f"'--slots' must be a multiple of '--replicas' = {replicas}; got {slots}")
        if replicas > 1:  # else each replica's operations would be divided among the threads that the others need
            os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + " --xla_cpu_multi_thread_eigen=false"

        import jax

        jax.config.update("jax_num_cpu_devices", replicas)
        from areal_jax.benchmarks.generation import Subject, replicated, run_requests
        from areal_jax.benchmarks.machine import cores
        from areal_jax.benchmarks.policies import make_policy, parameter_count, random_model
        from areal_jax.benchmarks.report import deliver

        if jax.default_backend() != "cpu":
            raise ConfigError(f"the comparison with transformers is of the CPU; JAX runs on a {jax.default_backend()} here; set JAX_PLATFORMS=cpu")
        threads = tuple(n for n in threads if n <= cores()) or (1,)
        named = values["random"] or ("" if values["model"] else "qwen2-small")
        if named:
            theirs.save_random(random_model(named), seed)
        name, model, params = make_policy(directory, "", "float32")
        load = make_load(model.vocab_size, requests, values["lengths"], prompt, seed=seed)
        subject = Subject(named or name, model, params, "float32", slots, load.longest, page_size, chunk, steps, seed=seed)
        driver = replicated(subject, replicas)
        run_requests(driver, load.shortened(SHORTER).requests())

        short = load.shortened(SHORTER)
        theirs.seconds(short.first(min(batches)), min(batches), threads[0])
        tried = {}
        for batch, n in itertools.product(batches, threads):
            tried[batch, n] = theirs.seconds(short, batch, n)
            _say(f"transformers, shorter load, batch {batch}, threads {n}: {tried[batch, n]:.1f} s")
        batch, n = min(tried, key=lambda pair: tried[pair])
        seconds: dict[str, list[float]] = {"transformers": [], "sampler": []}
        for _ in range(repeats):
            seconds["transformers"].append(theirs.seconds(load, batch, n))
            seconds["sampler"].append(run_requests(driver, load.requests()))
            _say(f"whole load: transformers {seconds['transformers'][-1]:.1f} s, sampler {seconds['sampler'][-1]:.1f} s")
    medians = {side: statistics.median(values) for side, values in seconds.items()}
    results: dict[str, Any] = {
        "machine": {"threads": cores(), "jax": jax.__version__},
        "policy": {"name": subject.name, "parameters": parameter_count(model), "dtype": "float32"},
        "load": {
            "requests": requests,
            "lengths": values["lengths"],
            "sampled_tokens": load.tokens,
            "median_length": statistics.median(load.lengths),
            "longest_length": max(load.lengths),
            "prompt": values["prompt"],
        },
        "transformers": {
            "batch": batch,
            "threads": n,
            "chosen_by_tokens_per_s": {f"batch {b}, threads {t}": short.tokens / s for (b, t), s in tried.items()},
            "seconds": seconds["transformers"],
            "tokens_per_s": load.tokens / medians["transformers"],
        },
        "sampler": {"slots": slots, "replicas": replicas, "seconds": seconds["sampler"], "tokens_per_s": load.tokens / medians["sampler"]},
        "sampler_over_transformers": medians["transformers"] / medians["sampler"],
    }
    deliver(f"sampler against transformers: {subject.name}, float32", results, file)
    return 0


def _say(text: str) -> None:
    """Progress, beside the table that comes at the end."""
    print(text, file=sys.stderr, flush=True)
