"""Named algorithms as settings: what each is made of, executable (``configs/math.py:NAME``). ``README.md`` beside this file explains the table.

Invariants:
* Nothing here imports JAX.
* Keys are those of the ``algorithm`` section; what a recipe does not name keeps its default.
* Each runs with samples of older policies: what clips around the policy that sampled, as published, here clips around π_prox and is weighed by
  π_prox/π_behav, which is the same where no token is old. ``ppo`` alone leaves that out, and says so.
"""

from __future__ import annotations

from typing import Any

RECIPES: dict[str, dict[str, Any]] = {
    "areal": {"loss": "decoupled_ppo", "advantage": "batch"},
    "ppo": {"loss": "ppo", "advantage": "batch", "allow_uncorrected_staleness": True},
    "dual_clip": {"loss": "decoupled_ppo", "advantage": "batch", "dual_clip": 3.0},
    "grpo": {"loss": "decoupled_ppo", "advantage": "grpo", "aggregation": "sequence", "kl_coefficient": 0.04, "kl_estimator": "k3"},
    "dr_grpo": {"loss": "decoupled_ppo", "advantage": "dr_grpo", "aggregation": "constant"},
    "rloo": {"loss": "reinforce", "decoupled": True, "advantage": "rloo", "aggregation": "constant"},
    "lite_ppo": {"loss": "decoupled_ppo", "advantage": "lite_ppo"},
    "reinforce": {"loss": "reinforce", "decoupled": True, "advantage": "batch"},
    "reinforce_pp": {"loss": "decoupled_ppo", "advantage": "reinforce_pp", "kl_coefficient": 0.001, "kl_estimator": "k1", "kl_in": "reward"},
    "reinforce_pp_baseline": {"loss": "decoupled_ppo", "advantage": "reinforce_pp_baseline", "kl_coefficient": 0.001, "kl_estimator": "k2"},
    "dapo": {"loss": "decoupled_ppo", "advantage": "grpo", "clip_epsilon_high": 0.28, "dynamic_sampling": True, "overlong_penalty": 1.0},
    "gspo": {"loss": "gspo", "decoupled": True, "advantage": "grpo", "aggregation": "sequence", "clip_epsilon": 3e-4, "clip_epsilon_high": 4e-4},
    "cispo": {"loss": "cispo", "advantage": "grpo", "clip_epsilon": 1.0, "clip_epsilon_high": 4.0},
    "scale_rl": {
        "loss": "cispo",
        "advantage": "lite_ppo",
        "aggregation": "prompt",
        "clip_epsilon": 1.0,
        "clip_epsilon_high": 4.0,
        "dynamic_sampling": True,
    },
    "sapo": {"loss": "sapo", "decoupled": True, "advantage": "grpo", "aggregation": "sequence"},
    "m2po": {"loss": "m2po", "advantage": "grpo", "m2_threshold": 0.04},
    "tis": {"loss": "decoupled_ppo", "advantage": "grpo", "importance_weight_cap": 2.0},
    "icepop": {
        "loss": "decoupled_ppo",
        "advantage": "grpo",
        "importance_weight_mode": "mask",
        "importance_weight_floor": 0.5,
        "importance_weight_cap": 5.0,
    },
    "mis": {
        "loss": "decoupled_ppo",
        "advantage": "grpo",
        "importance_weight_mode": "mask",
        "importance_weight_level": "sequence",
        "importance_weight_cap": 2.0,
    },
    "geometric_mis": {
        "loss": "decoupled_ppo",
        "advantage": "grpo",
        "importance_weight_mode": "mask",
        "importance_weight_level": "geometric",
        "importance_weight_floor": 0.9,
        "importance_weight_cap": 1.1,
    },
}

OVERLONG_SHARE = 0.2
"""Of the length limit, DAPO's buffer (4,096 of 20,480 tokens)."""


def with_recipe(config: Any, name: str) -> Any:
    """The configuration with an algorithm of ``RECIPES``; changed in place."""
    config.algorithm.update(RECIPES[name])
    if config.algorithm.overlong_penalty:
        config.algorithm.overlong_buffer = int(OVERLONG_SHARE * config.rollout.max_new_tokens)
    return config
