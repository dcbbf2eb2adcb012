"""Asynchronous RL on programming problems, as the paper's code runs (arXiv 2505.24298): η = 4, 32k tokens of context.

  python launch/plan.py --config=configs/code.py:qwen2.5-14b --topology=h800:32x8
  python launch/train.py --config=configs/code.py:qwen2.5-14b --config.task.path=problems.jsonl --config.reward.verifier=my_package.judge:check

Variants are qwen2.5-1.5b, -7b, -14b (the default) and -32b (DeepSeek-R1-Distill-Qwen). The problems and the verifier that runs an answer's program are yours: a
function (response, answer, metadata) -> {"correct": …}; it runs in processes with a hard time limit, but has to confine the program itself.
"""

from areal_jax.config import Config, ConfigError
from areal_jax.paper import SIZES, paper_run

STEPS = {"1.5b": 80, "7b": 80, "14b": 80, "32b": 60}


def get_config(variant: str = "") -> Config:
    size = variant.removeprefix("qwen2.5-") or "14b"
    if variant == size or size not in SIZES:
        raise ConfigError(f"configs/code.py has no variant '{variant}'; it has {', '.join(f'qwen2.5-{s}' for s in SIZES)}")
    config = paper_run(size, max_staleness=4, steps=STEPS[size])
    config.reward.update(verifier="", timeout_s=30.0)
    return config
