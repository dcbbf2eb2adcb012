"""``launch/benchmark.py sampler``: the sampler of one policy, part by part.

Invariant: the same flags run on every platform; only the default type of computation differs (bfloat16 on an accelerator).
"""

from __future__ import annotations

import sys
import time
from typing import Any

from areal_jax.benchmarks import flags
from areal_jax.benchmarks.loads import make_load
from areal_jax.config import ConfigError

PARTS = ("load", "prefill", "steps", "updates", "interruption", "groups", "memory")
DEFAULTS = {
    "model": "",
    "random": "",
    "slots": "64",
    "requests": "256",
    "lengths": "longtail:32:256",
    "prompt": "16",
    "group": "1",
    "positions": "64,128,256",
    "group-prompt": "512",
    "group-samples": "16",
    "update-every": "2",
    "seconds": "24",
    "repeats": "3",
    "steps": "8",
    "page-size": "32",
    "prefill-chunk": "512",
    "dtype": "auto",
    "attention": "auto",
    "parts": "all",
    "limits": "full",
    "seed": "0",
    "out": "",
}


def device_dtype(text: str, platform: str) -> str:
    """The compute type of ``--dtype``: 'auto' is bfloat16 on an accelerator and float32 on a CPU."""
    if text not in ("auto", "float32", "bfloat16"):
        raise ConfigError(f"'--dtype' must be auto, float32 or bfloat16; got '{text}'")
    return text if text != "auto" else "float32" if platform == "cpu" else "bfloat16"


def main(argv: list[str]) -> int:
    """Measures, prints one table and writes JSON to ``--out``."""
    values = flags.parse(argv, DEFAULTS)
    counts = {name: flags.whole(values, name) for name in ("slots", "requests", "group", "group-prompt", "group-samples", "repeats", "steps", "page-size")}
    chunk, seed = flags.whole(values, "prefill-chunk"), flags.whole(values, "seed", 0)
    positions, prompt = flags.several(values, "positions"), flags.span(values, "prompt")
    every_s, seconds = flags.seconds(values, "update-every"), flags.seconds(values, "seconds")
    parts, file = flags.chosen(values, "parts", PARTS), flags.output(values)
    [limits], [attention] = flags.chosen(values, "limits", ("full", "tiny")), flags.chosen(values, "attention", ("auto", "plain", "kernel"))

    import jax

    from areal_jax.benchmarks.generation import Subject, load_speed, prefill_speed
    from areal_jax.benchmarks.machine import measure_machine, prefill_floor_s
    from areal_jax.benchmarks.memory import concurrency
    from areal_jax.benchmarks.policies import make_policy, parameter_count
    from areal_jax.benchmarks.report import deliver, save
    from areal_jax.benchmarks.steps import measured_tokens, step_times
    from areal_jax.benchmarks.updates import group_prefill, interruption, update_cost

    dtype = device_dtype(values["dtype"], jax.default_backend())
    name, model, params = make_policy(values["model"], values["random"] or ("" if values["model"] else "qwen2-small"), dtype, seed)
    load = make_load(model.vocab_size, counts["requests"], values["lengths"], prompt, counts["group"], seed)
    longest = max(load.longest, max(positions) + measured_tokens(counts["steps"]), counts["group-prompt"]) + 2
    subject = Subject(name, model, params, dtype, counts["slots"], longest, counts["page-size"], chunk, counts["steps"], attention, seed)
    machine = measure_machine(dtype, tiny=limits == "tiny")
    repeats = counts["repeats"]
    results: dict[str, Any] = {
        "machine": machine.described(),
        "policy": {
            "name": name,
            "parameters": parameter_count(model),
            "layers": model.layers,
            "hidden_size": model.hidden_size,
            "vocabulary": model.vocab_size,
        },
        "settings": {key: values[key] for key in DEFAULTS if key not in ("out", "model", "random")} | {"dtype": dtype},
    }

    def prefill() -> dict[str, Any]:
        length = max(1, min(counts["group-prompt"], max(positions)))
        found = prefill_speed(subject, length, repeats)
        floor = prefill_floor_s(machine, model, [length] * subject.slots, -(-length * subject.slots // chunk))
        return found | {"floor_s": floor, "roofline_share": floor * found["tokens_per_s"] / (length * subject.slots)}

    measures = {
        "load": lambda: load_speed(subject, load, repeats),
        "prefill": prefill,
        "steps": lambda: step_times(subject, machine, load, positions, repeats),
        "updates": lambda: update_cost(subject, load, 2 * repeats),
        "interruption": lambda: interruption(subject, load, every_s, seconds, repeats),
        "groups": lambda: group_prefill(subject, counts["group-prompt"], counts["group-samples"], repeats),
        "memory": lambda: concurrency(subject, load),
    }
    for part in parts:
        began = time.monotonic()
        results[part] = measures[part]()
        save(results, file)
        print(f"{part}: {time.monotonic() - began:.1f} s", file=sys.stderr, flush=True)
    deliver(f"sampler: {name}, {dtype}, {machine.kind}", results, file)
    return 0
