"""Tunix's side of whole runs: ``GRPOLearner.train`` with its own (vanilla) rollout, actor and rollout on the same devices, float32, no reference model.

Its devices are those that JAX_NUM_CPU_DEVICES says. Requests and answers as of ``trl_run``.
"""

# pyright: reportMissingImports=false

from __future__ import annotations

import importlib.metadata
import itertools
import json
import pathlib
import time
from typing import Any

import numpy as np
import optax
from serving import serve
from tunix.rl.grpo.grpo_learner import GRPOConfig, GRPOLearner
from tunix.rl.rl_cluster import ClusterConfig, RLCluster, RLTrainingConfig, Role
from tunix.rl.rollout.base_rollout import RolloutConfig
from tunix_policy import mesh, policy
from words import Words, verify


def answer(request: dict[str, Any]) -> dict[str, Any]:
    rows = [json.loads(line) for line in pathlib.Path(request["rows"]).read_text().splitlines()]
    prompts, group, rewards, marks = request["prompts"], request["group"], [], []
    longest = max(len(row["question"].split()) for row in rows)

    def reward(prompts: list[str], completions: list[str], answer: list[str], **_: Any) -> list[float]:
        found = [verify(text, right, {})["correct"] for text, right in zip(completions, answer, strict=True)]
        rewards.append(sum(found) / len(found))
        return found

    def stream() -> Any:  # a step's prompts are fetched when it begins
        for first in range(0, request["steps"] * prompts, prompts):
            marks.append(time.perf_counter())
            part = rows[first : first + prompts]
            yield {"prompts": np.asarray([row["question"] for row in part]), "answer": np.asarray([row["answer"] for row in part])}

    cluster = ClusterConfig(
        role_to_mesh=dict.fromkeys((Role.ACTOR, Role.REFERENCE, Role.ROLLOUT), mesh()),
        rollout_engine="vanilla",
        training_config=RLTrainingConfig(
            actor_optimizer=optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-5)),
            eval_every_n_steps=1 << 30,
            max_steps=request["steps"],
            mini_batch_size=prompts,
            train_micro_batch_size=request["batch"] // group,
            rollout_micro_batch_size=request["rollout"] // group,
        ),
        rollout_config=RolloutConfig(
            max_tokens_to_generate=request["new_tokens"],
            max_prompt_length=longest,
            kv_cache_size=max(16, 1 << (longest - 1).bit_length()) + request["new_tokens"] + 1,  # prompts are padded to a power of two
            temperature=1.0,
            top_p=1.0,
        ),
    )
    with mesh():
        actor = policy(request["checkpoint"])
        learner = GRPOLearner(RLCluster(actor=actor, tokenizer=Words(), cluster_config=cluster), GRPOConfig(num_generations=group, beta=0.0), reward_fns=reward)
        learner.train(stream())
    marks.append(time.perf_counter())
    versions = {name: importlib.metadata.version(name) for name in ("google-tunix", "jax", "flax", "optax")}
    return {"seconds": [after - before for before, after in itertools.pairwise(marks)], "rewards": rewards, "lengths": [], "versions": versions}


if __name__ == "__main__":
    serve(answer)
