"""``launch/benchmark.py trainer``: one training step of packed rows, its tokens a second and its share of the measured matmul peak.

Invariants:
* The step is the run's own ``Trainer.step``: π_prox, gradients over all micro-batches, one AdamW update.
* FLOPs are the policy's (forward, and backward twice it), not those of recomputed activations; padding does not count.
"""

from __future__ import annotations

import dataclasses
import statistics
import time
from typing import Any

import numpy as np

from areal_jax.benchmarks import flags
from areal_jax.benchmarks.sampler import device_dtype
from areal_jax.config import ConfigError, base_config

DEFAULTS = {
    "random": "qwen2-small",
    "model": "",
    "rows": "4",
    "length": "512",
    "micro-batches": "2",
    "sequences": "4",
    "remat": "none",
    "attention": "auto",
    "repeats": "5",
    "dtype": "auto",
    "limits": "full",
    "seed": "0",
    "out": "",
}


def main(argv: list[str]) -> int:
    """Measures, prints one table and writes JSON to ``--out``."""
    values = flags.parse(argv, DEFAULTS)
    rows, length, micros, sequences, repeats = (flags.whole(values, name) for name in ("rows", "length", "micro-batches", "sequences", "repeats"))
    seed, file = flags.whole(values, "seed", 0), flags.output(values)
    [limits], [remat] = flags.chosen(values, "limits", ("full", "tiny")), flags.chosen(values, "remat", ("none", "dots", "full"))
    [attention] = flags.chosen(values, "attention", ("auto", "plain", "blockwise", "kernel"))
    if length % sequences or length // sequences < 4:
        raise ConfigError(f"'--length' must be a multiple of '--sequences' = {sequences}, 4 positions a sequence at least; got {length}")

    import jax

    from areal_jax.benchmarks.machine import measure_machine
    from areal_jax.benchmarks.policies import make_policy, parameter_count
    from areal_jax.benchmarks.report import deliver
    from areal_jax.cluster.meshes import build_mesh
    from areal_jax.planner.work import forward_flops
    from areal_jax.trainer.trainer import Trainer

    dtype = device_dtype(values["dtype"], jax.default_backend())
    name, model, params = make_policy(values["model"], values["random"] if not values["model"] else "", "float32", seed)
    model = dataclasses.replace(model, dtype=dtype)
    config = base_config()
    config.model.update(dtype=dtype, attention=attention)
    config.trainer.update(micro_batch_tokens=length, micro_batch_rows=rows, minibatches=1, remat=remat, warmup_steps=0)
    machine = measure_machine(dtype, tiny=limits == "tiny")
    trainer = Trainer(config, model, build_mesh(jax.devices()[:1]), params)
    del params
    seconds = []
    for step in range(repeats + 1):
        batch = packed_batch(model.vocab_size, step, rows, length, sequences, micros, seed)
        began = time.perf_counter()
        trainer.step(batch)
        seconds.append(time.perf_counter() - began)
    step_s = statistics.median(seconds[1:])
    tokens = micros * rows * length
    flops = 3.0 * forward_flops(model, tokens, length / sequences / 2)
    results: dict[str, Any] = {
        "machine": machine.described(),
        "policy": {"name": name, "parameters": parameter_count(model), "dtype": dtype, "remat": remat, "attention": attention},
        "trainer": {
            "rows": rows,
            "positions_a_row": length,
            "micro_batches": micros,
            "tokens_a_step": tokens,
            "step_ms": step_s * 1e3,
            "tokens_per_s": tokens / step_s,
            "flops_a_step": flops,
            "share_of_matmul_peak": flops / step_s / machine.matmul_flops,
            "seconds": seconds[1:],
        },
    }
    deliver(f"trainer: {name}, {dtype}, {machine.kind}", results, file)
    return 0


def packed_batch(vocab_size: int, step: int, rows: int, length: int, sequences: int, micros: int, seed: int) -> Any:
    """Rows that are full: ``sequences`` of equal length each, whose second halves are trained on."""
    from areal_jax.trainer.packing import MicroBatch, PackedBatch

    random = np.random.default_rng((seed, step))
    each = length // sequences
    positions = np.tile(np.arange(each, dtype=np.int32), (rows, sequences))
    segments = np.tile(np.repeat(np.arange(1, sequences + 1, dtype=np.int32), each), (rows, 1))
    mask = (positions >= each // 2).astype(np.float32)

    def micro() -> MicroBatch:
        tokens = random.integers(2, vocab_size, (rows, length)).astype(np.int32)
        advantages = (random.standard_normal((rows, length)) * mask).astype(np.float32)
        logprobs = np.where(mask > 0, -np.log(vocab_size), 0.0).astype(np.float32)
        versions = np.where(mask > 0, step, -1).astype(np.int32)
        return MicroBatch(tokens, positions, segments, np.roll(tokens, -1, 1), mask, logprobs, versions, advantages, mask)

    return PackedBatch(step, (tuple(micro() for _ in range(micros)),), (int(mask.sum()) * micros,), {}, (float(mask.sum()) * micros,))
