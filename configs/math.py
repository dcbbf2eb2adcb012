"""The main job: asynchronous RL on maths.

  python launch/train.py --config=configs/math.py

The default is the embedded job: a new small policy and generated problems, nothing to download. Every key and its
meaning stands in areal_jax/config_fields.py. The variants are real policies and other algorithms:

  python launch/train.py --config=configs/math.py:smollm2-135m --config.model.path=DIRECTORY
  python launch/plan.py --config=configs/math.py:qwen2.5-1.5b --topology=h800:16x8
  python launch/train.py --config=configs/math.py:qwen2.5-1.5b --config.task.path=problems.jsonl
  python launch/train.py --config=configs/math.py:dapo

``dapo`` and the other names of areal_jax/algorithms/recipes.py are the embedded job with another algorithm.
``smollm2-135m`` trains SmolLM2-135M-Instruct on one-digit sums with a few examples in the prompt, on two CPU cores. ``qwen2.5-1.5b``, ``-7b``, ``-14b`` and
``-32b`` are the paper's maths runs (areal_jax/paper.py): DeepSeek-R1-Distill-Qwen, 512 × 16 samples in 4 minibatches, learning rate 2e-5, advantages
over the batch, η = 8, 32k tokens of context.

Where the embedded job's settings are those of the paper (arXiv 2505.24298, Table 3): no critic, no KL, γ = λ = 1, rewards ±5, ε = 0.2, Adam
0.9/0.95 with ε 1e-5 and weight decay 0.05, gradients clipped at 1, temperature 1. Where they differ, and why:

* batch 32 × 8 samples and 2 minibatches, not 512 × 16 and 4: sized for a policy of 0.35M parameters and two cores;
* learning rate 3e-4, not 2e-5: a policy this small is trained at 2e-3 in its warm-up;
* the rate falls to 0 by a cosine, not constant: the run is short, and its last version is the one that is kept;
* advantages take the group's mean and the batch's scale ('lite_ppo'), not the batch's mean: the kinds of problem have very different
  success rates, so that the batch's mean rewards every sample of an easy prompt; with it, in the one run that was tried
  (seed 0, constant rate, stopped at step 16), the reward fell back from .67 to .49 while the median response grew from 17 to 52 tokens; the run with
  the group's mean and the same learning settings otherwise did not;
* samples of advantage 0 are not computed (same gradient).
"""

from collections.abc import Callable

from areal_jax.algorithms.recipes import RECIPES, with_recipe
from areal_jax.config import Config, ConfigError, base_config
from areal_jax.paper import SIZES, paper_run

EXAMPLES = "2 + 5 = 7\n4 + 7 = 11\n6 + 6 = 12\n"
"""None of them is among the held-out problems."""


def paper_variant(size: str) -> Callable[[], Config]:
    """The paper's maths run on a policy of ``SIZES``."""
    return lambda: paper_run(size, max_staleness=8, steps=250)


def algorithm_variant(name: str) -> Callable[[], Config]:
    """The embedded job with an algorithm of ``RECIPES``."""
    return lambda: with_recipe(base_config(), name)


def smollm2_135m() -> Config:
    """A real language model on one-digit sums, examples in the prompt; two CPU cores, some ten minutes."""
    config = base_config()
    config.model.path = "checkpoints/SmolLM2-135M-Instruct"
    config.model.repository = "HuggingFaceTB/SmolLM2-135M-Instruct"
    config.model.update(family="llama", vocab_size=49152, layers=30, hidden_size=576, heads=9, kv_heads=3, head_dim=64, mlp_size=1536)
    config.model.update(rope_theta=1e5, norm_epsilon=1e-5, tie_embeddings=True)
    config.task.name = "sums"
    config.task.chat = "off"
    config.task.prompt_template = EXAMPLES + "{question} ="
    config.reward.verifier = "areal_jax.rewards.verify:verify_line"
    config.rollout.stop = ("\n",)
    config.rollout.max_new_tokens = 6
    config.trainer.steps = 30
    config.trainer.groups_per_step = 8
    config.trainer.minibatches = 1
    config.trainer.learning_rate = 1e-5
    config.trainer.schedule = "constant"
    config.trainer.warmup_steps = 2
    config.eval.problems = config.eval.periodic_problems = 40
    config.eval.samples = 8
    config.eval.every_steps = 5
    return config


VARIANTS: dict[str, Callable[[], Config]] = {
    "": base_config,
    "smollm2-135m": smollm2_135m,
    **{name: algorithm_variant(name) for name in RECIPES},
    **{f"qwen2.5-{size}": paper_variant(size) for size in SIZES},
}


def get_config(variant: str = "") -> Config:
    if variant not in VARIANTS:
        raise ConfigError(f"configs/math.py has no variant '{variant}'; it has {', '.join(filter(None, VARIANTS))}; leave it out for the embedded job")
    return VARIANTS[variant]()
