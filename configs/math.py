"""The main job: asynchronous RL on maths.

  python launch/train.py --config=configs/math.py

The default is the embedded job: a new small policy and generated problems, nothing to download. Every key and its
meaning stands in areal_jax/config_fields.py.

Where the defaults are those of the paper (arXiv 2505.24298, Table 3): no critic, no KL, γ = λ = 1, rewards ±5, ε = 0.2, Adam
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

from areal_jax.config import Config, ConfigError, base_config


def get_config(variant: str = "") -> Config:
    config = base_config()
    if variant:
        raise ConfigError(f"configs/math.py has no variant '{variant}'; leave it out for the embedded job")
    return config
