"""Measures the system: one command a question.

  python launch/benchmark.py sampler --model=DIRECTORY --slots=64 --lengths=longtail:32:256 --out=sampler.json
  python launch/benchmark.py sampler --random=qwen2-small --parts=load,steps
  python launch/benchmark.py transformers --random=qwen2-small
  python launch/benchmark.py trainer --random=qwen2-small
  python launch/benchmark.py peers --trl-python=TRL_ENVIRONMENT/bin/python --tunix-python=TUNIX_ENVIRONMENT/bin/python
  python launch/benchmark.py endtoend --against=trl --trl-python=TRL_ENVIRONMENT/bin/python
  python launch/benchmark.py kernels
  python launch/benchmark.py table sampler.json trainer.json
  python launch/benchmark.py training --config=configs/math.py --workdir=runs/benchmark --warmup=runs/RUN/warmup --steps=40

sampler        one policy's sampler: tokens/s of a load and of prefill, ms a decode step over pages and over dense caches with its share of the
               roofline, what a weight update costs, interrupting against waiting, a group's shared prompt, sequences in the same KV memory
transformers   the same load through transformers' generate and through the sampler, in turn
trainer        one training step of a length distribution: real tokens/s, share of the measured matmul peak, memory; packed by Algorithm 1, packed in
               balance, and padded in a fixed number of micro-batches
peers          the same training step by TRL, by Tunix (each in an environment of its own) and here, in turn
endtoend       whole runs, from prompts to updates, by TRL, by Tunix and, asynchronously, here
kernels        attention kernels against plain attention: errors, forward and backward
table          results of several JSON files in one table
training       whole training runs, asynchronous against synchronous

The same commands run on a CPU and on an accelerator. Every command prints one table; ``--out=FILE.json`` also writes it as JSON.
Flags and their defaults are DEFAULTS of each command's module, named below.
"""

import importlib

from areal_jax.config import ConfigError, run_main

COMMANDS = {
    "sampler": "areal_jax.benchmarks.sampler",
    "transformers": "areal_jax.benchmarks.comparison",
    "trainer": "areal_jax.benchmarks.trainer",
    "peers": "areal_jax.benchmarks.peers",
    "endtoend": "areal_jax.benchmarks.endtoend",
    "kernels": "areal_jax.benchmarks.kernels",
    "table": "areal_jax.benchmarks.report",
    "training": "areal_jax.benchmarks.asynchrony",
}


def main(argv: list[str]) -> int:
    if argv in (["--help"], ["-h"]):
        print(__doc__)
        return 0
    if not argv or argv[0] not in COMMANDS:
        raise ConfigError(f"name what to measure: {', '.join(COMMANDS)}; got '{argv[0] if argv else ''}'; --help says more")
    return importlib.import_module(COMMANDS[argv[0]]).main(argv[1:])


if __name__ == "__main__":
    run_main(main)
