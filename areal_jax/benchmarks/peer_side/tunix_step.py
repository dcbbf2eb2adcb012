"""Tunix's side: forward, backward and update of the trainer that ``GRPOLearner`` drives, on samples that were drawn before.

What runs is public: ``tunix.rl.trainer.Trainer.train`` (its compiled step, gradients accumulated by optax) with the registered GRPO loss, as ``GRPOLearner``
sets them, on ``TrainExample``s padded to the longest prompt and completion; Tunix's own Qwen2. No reference model (beta 0), no rematerialisation,
float32. Its packing of sequences is not used: outside of the TPU's kernel its Qwen2 has no causal mask for packed rows.

Its devices are those that JAX_NUM_CPU_DEVICES says, over which Tunix divides rows and parameters (fsdp). Requests: {checkpoint, samples, batch, repeats,
group}; answers as of ``trl_step``.
"""

# pyright: reportMissingImports=false

from __future__ import annotations

import functools
import importlib.metadata
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from serving import masks, samples, serve
from tunix.rl import algo_core, common
from tunix.rl.grpo.grpo_learner import GRPOConfig
from tunix.rl.trainer import Trainer
from tunix.sft.peft_trainer import TrainingConfig
from tunix_policy import mesh, policy
from words import END, PAD


@functools.cache
def trainer(checkpoint: str, accumulation: int, group: int) -> tuple[Any, Any]:
    actor = policy(checkpoint)
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-5))
    settings = TrainingConfig(eval_every_n_steps=1 << 30, gradient_accumulation_steps=accumulation)
    made = Trainer(actor, optimizer, settings, custom_checkpoint_metadata_fn=dict)
    algorithm = GRPOConfig(num_generations=group, beta=0.0)
    algorithm.temperature = 1.0
    made.with_loss_fn(
        lambda model, train_example, algo_config: algo_core.grpo_loss_fn(model, train_example, algo_config=algorithm, pad_id=PAD, eos_id=END), has_aux=True
    )
    made.with_gen_model_input_fn(lambda example: {"train_example": example, "algo_config": algorithm})
    made.is_managed_externally = True
    return made, actor


def logprob(actor: Any, example: Any, count: int = 16) -> float:
    """See ``trl_step``."""
    first = jax.tree.map(lambda leaf: leaf[:count], example)
    graph, state = nnx.split(actor)
    chosen = common.compute_per_token_logps(graph, state, prompt_tokens=first.prompt_ids, completion_tokens=first.completion_ids, pad_id=PAD, eos_id=END)
    return float((chosen * first.completion_mask).sum() / first.completion_mask.sum())


def answer(request: dict[str, Any]) -> dict[str, Any]:
    arrays, batch = samples(request["samples"]), request["batch"]
    prompt, completion = masks(arrays)
    whole = common.TrainExample(
        prompt_ids=arrays["prompts"].astype(np.int32),
        prompt_mask=prompt,
        completion_ids=arrays["completions"].astype(np.int32),
        completion_mask=completion,
        advantages=arrays["advantages"],
        ref_per_token_logps=None,
        old_per_token_logps=arrays["old_logprobs"],
    )
    parts = [jax.tree.map(lambda leaf, first=first: jnp.asarray(leaf[first : first + batch]), whole) for first in range(0, len(prompt), batch)]
    with mesh():
        made, actor = trainer(request["checkpoint"], len(parts), request["group"])
        before = logprob(actor, jax.tree.map(jnp.asarray, whole))
        seconds = []
        for _ in range(request["repeats"]):
            began = time.perf_counter()
            made.train(parts)
            jax.block_until_ready(nnx.state(actor))
            seconds.append(time.perf_counter() - began)
    versions = {name: importlib.metadata.version(name) for name in ("google-tunix", "jax", "flax", "optax")}
    return {"seconds": seconds, "loss": None, "logprob": before, "versions": versions}


if __name__ == "__main__":
    serve(answer)
