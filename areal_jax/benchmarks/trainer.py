"""``launch/benchmark.py trainer``: a training step of a policy on sequences of a length distribution, by how they are laid into micro-batches.

Invariants:
* The step is the run's own ``Trainer.step``: gradients over all micro-batches and one AdamW update; the batch is built before it is timed.
* Tokens a second count the sequences' own tokens; padding does not count, in tokens as in FLOPs (``samples.training_flops``).
* The matmul peak is measured in the same process on the same devices.
"""

from __future__ import annotations

import dataclasses
import os
import statistics
import time
from typing import Any

from areal_jax.benchmarks import flags
from areal_jax.benchmarks.loads import make_load
from areal_jax.benchmarks.sampler import device_dtype
from areal_jax.config import ConfigError
from areal_jax.config_devices import parse_mesh
from areal_jax.host_memory import keep_freed_memory

DEFAULTS = {
    "random": "qwen2-small",
    "model": "",
    "sequences": "256",
    "lengths": "longtail:32:256",
    "prompt": "8:24",
    "group": "8",
    "layouts": "all",
    "row": "0",
    "rows": "8",
    "micro-batches": "8,16,32",
    "mesh": "data=1",
    "remat": "none",
    "attention": "auto",
    "scan": "auto",
    "chunk": "1024",
    "repeats": "5",
    "dtype": "auto",
    "limits": "full",
    "seed": "0",
    "out": "",
}
LAYOUTS = ("algorithm1", "balanced", "fixed")
"""Packed by Algorithm 1, packed in balance, and a fixed number of micro-batches whose rows hold one sequence each, padded to the longest."""


def main(argv: list[str]) -> int:
    """Measures, prints one table and writes JSON to ``--out``."""
    values = flags.parse(argv, DEFAULTS)
    count, group, rows, chunk, repeats = (flags.whole(values, name) for name in ("sequences", "group", "rows", "chunk", "repeats"))
    row, seed, prompt, file = flags.whole(values, "row", 0), flags.whole(values, "seed", 0), flags.span(values, "prompt"), flags.output(values)
    layouts, fixed = flags.chosen(values, "layouts", LAYOUTS), flags.several(values, "micro-batches")
    [limits], [remat] = flags.chosen(values, "limits", ("full", "tiny")), flags.chosen(values, "remat", ("none", "dots", "full"))
    [attention] = flags.chosen(values, "attention", ("auto", "plain", "blockwise", "kernel"))
    [scan] = flags.chosen(values, "scan", ("auto", "yes", "no"))
    axes = parse_mesh("--mesh", values["mesh"])

    import jax

    devices = take_devices(axes)
    from areal_jax.benchmarks.machine import measure_machine
    from areal_jax.benchmarks.policies import make_policy, parameter_count
    from areal_jax.benchmarks.report import deliver
    from areal_jax.benchmarks.samples import real_tokens, trainer_config, training_flops

    dtype = device_dtype(values["dtype"], jax.default_backend())
    name, model, params = make_policy(values["model"], values["random"] if not values["model"] else "", "float32", seed)
    model = dataclasses.replace(model, dtype=dtype)
    load = make_load(model.vocab_size, count, values["lengths"], prompt, min(group, count), seed)
    longest = load.longest - 1
    if 0 < row < longest:
        raise ConfigError(f"'--row' must hold the longest sequence, {longest} positions, or be 0; got {row}")
    settings = {"remat": remat, "logprob_chunk": chunk, "attention": attention, "scan": {"auto": None, "yes": True, "no": False}[scan]}
    packed = trainer_config(dtype, micro_batch_tokens=row or -(-max(192, longest) // 64) * 64, micro_batch_rows=rows, **settings)
    machine = measure_machine(dtype, tiny=limits == "tiny", devices=len(devices))
    work, found = (real_tokens(load), training_flops(model, load)), {}
    for layout in layouts:
        if layout != "fixed":
            packed.trainer.packing = layout
            found[layout] = measure(packed, model, params, axes, devices, load, repeats, seed, work)
        else:
            tried = {k: measure(trainer_config(dtype, **settings), model, params, axes, devices, load, repeats, seed, work, k) for k in fixed if k <= count}
            found[layout] = max(tried.values(), key=lambda one: one["tokens_per_s"])
            found[layout]["tokens_per_s_by_micro_batches"] = {str(k): one["tokens_per_s"] for k, one in tried.items()}
    for one in found.values():
        one["share_of_matmul_peak"] = one["flops_per_s"] / machine.matmul_flops
    ratios = {f"{name}_over_fixed": one["tokens_per_s"] / found["fixed"]["tokens_per_s"] for name, one in found.items() if name != "fixed" and "fixed" in found}
    results: dict[str, Any] = {
        "machine": machine.described(),
        "policy": {"name": name, "parameters": parameter_count(model), "dtype": dtype},
        "load": {
            "sequences": count,
            "lengths": values["lengths"],
            "prompt": values["prompt"],
            "tokens": work[0],
            "longest": load.longest,
            "flops_a_step": work[1],
        },
        "trainer": {"mesh": values["mesh"], "devices": len(devices), **{key: value for key, value in settings.items() if value is not None}},
        **found,
        **ratios,
    }
    deliver(f"trainer: {name}, {dtype}, {machine.kind}", results, file)
    return 0


def take_devices(axes: dict[str, int]) -> list[Any]:
    """The devices of a mesh; a CPU is divided into so many, of which several compute with one thread each, as they share its cores.

    Raises:
      ConfigError: there are fewer.
    """
    import jax

    keep_freed_memory()
    wanted = 1
    for size in axes.values():
        wanted *= size
    if wanted > 1:
        os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + " --xla_cpu_multi_thread_eigen=false"
    jax.config.update("jax_num_cpu_devices", wanted)
    devices = jax.devices()
    if len(devices) < wanted:
        raise ConfigError(f"'--mesh' must multiply to at most the {len(devices)} devices here; got {wanted}")
    return devices[:wanted]


def measure(
    config: Any, model: Any, params: Any, axes: dict[str, int], devices: list[Any], load: Any, repeats: int, seed: int, work: tuple[int, float], fixed: int = 0
) -> dict[str, Any]:
    """Steps of a new trainer.

    Args:
      config: of the trainer.
      model, params: the policy.
      axes, devices: its mesh.
      load: the sequences' lengths.
      repeats: steps that are timed, after one that is not.
      seed: of the batches.
      work: (tokens, FLOPs) of a step.
      fixed: micro-batches, for as many without packing; 0 packs as ``trainer.packing`` says.
    """
    from areal_jax.benchmarks.footprint import PeakMemory
    from areal_jax.benchmarks.samples import padded, padded_rows, training_batch
    from areal_jax.cluster.meshes import build_mesh
    from areal_jax.trainer.build import advantages_of
    from areal_jax.trainer.trainer import Trainer

    mesh = build_mesh(devices, **axes)
    shards = mesh.shape["data"] * mesh.shape["fsdp"]
    if fixed:
        config.trainer.update(micro_batch_tokens=load.longest - 1, micro_batch_rows=padded_rows(len(load.lengths), fixed, shards))
    memory = PeakMemory(devices[0])
    trainer = Trainer(config, model, mesh, params)
    seconds, building, packed = [], [], None
    for step in range(repeats + 1):
        batch = training_batch(load, model.vocab_size, step, seed)
        began = time.perf_counter()
        packed = padded(batch, advantages_of(batch, config), fixed, shards) if fixed else trainer.build(batch)
        building.append(time.perf_counter() - began)
        began = time.perf_counter()
        trainer.step(packed)
        seconds.append(time.perf_counter() - began)
    step_s, micros = statistics.median(seconds[1:]), [m for part in packed.minibatches for m in part] if packed else []
    return {
        "positions_a_row": config.trainer.micro_batch_tokens,
        "rows": config.trainer.micro_batch_rows,
        "micro_batches": len(micros),
        "positions_computed": sum(m.tokens.size for m in micros),
        **{name.partition("/")[2]: packed.metrics[name] for name in ("packing/efficiency", "packing/balance") if packed and name in packed.metrics},
        "step_s": step_s,
        "build_s": statistics.median(building),
        "tokens_per_s": work[0] / step_s,
        "flops_per_s": work[1] / step_s,
        "peak_memory_bytes": memory.bytes(),
        "peak_memory_since": memory.since,
        "seconds": seconds[1:],
    }
