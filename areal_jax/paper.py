"""The paper's runs (arXiv 2505.24298, Table 3 and Table 1) as settings: policies, hyper-parameters, clusters.

Invariant: nothing here imports JAX; ``configs/*.py`` start from it and say where they differ.

Chosen here, not by the paper: how the devices of a role are arranged (the paper trained under Megatron and sampled under SGLang), slots and pages, and
what the backward pass recomputes. ``launch/plan.py`` shows what they cost.
"""

from __future__ import annotations

import dataclasses

from areal_jax.config import Config, ConfigError, base_config


@dataclasses.dataclass(frozen=True)
class Size:
    """A DeepSeek-R1-Distill-Qwen policy and where the paper ran it.

    Attributes:
      name: part of the repository's name.
      layers ... norm_epsilon: of its config.json (Qwen2.5-Math-1.5B and -7B, Qwen2.5-14B and -32B, embeddings not tied).
      nodes: of 8 devices each, a quarter of them for training.
      replicas: of the sampler.
      longest: sequences of the longest for which a replica has pages; about what fits beside an evaluation's.
      trainer, sampler: axes of the meshes.
    """

    name: str
    layers: int
    hidden_size: int
    heads: int
    kv_heads: int
    mlp_size: int
    vocab_size: int
    rope_theta: float
    norm_epsilon: float
    nodes: int
    replicas: int
    longest: int
    trainer: str
    sampler: str


SIZES = {
    "1.5b": Size("1.5B", 28, 1536, 12, 2, 8960, 151936, 1e4, 1e-6, 16, 96, 40, "fsdp=8", ""),
    "7b": Size("7B", 28, 3584, 28, 4, 18944, 152064, 1e4, 1e-6, 24, 72, 36, "fsdp=8", "tensor=2"),
    "14b": Size("14B", 48, 5120, 40, 8, 13824, 152064, 1e6, 1e-5, 32, 48, 20, "fsdp=16", "tensor=4"),
    "32b": Size("32B", 64, 5120, 40, 8, 27648, 152064, 1e6, 1e-5, 48, 36, 28, "fsdp=32", "tensor=8"),
}
PAGE = 64
"""Tokens of a page: a sequence wastes half a page, and 28,672 tokens have 448 of them."""


def paper_run(size: str, *, max_staleness: int, steps: int) -> Config:
    """A run of the paper on one of ``SIZES``, without its task.

    Args:
      size: key of ``SIZES``.
      max_staleness: η.
      steps: training steps.

    Raises:
      ConfigError: there is no such size.
    """
    if size not in SIZES:
        raise ConfigError(f"the paper's policies are {', '.join(SIZES)}; got '{size}'")
    s = SIZES[size]
    config = base_config()
    config.model.update(
        path=f"checkpoints/DeepSeek-R1-Distill-Qwen-{s.name}",
        repository=f"deepseek-ai/DeepSeek-R1-Distill-Qwen-{s.name}",
        family="qwen2",
        vocab_size=s.vocab_size,
        layers=s.layers,
        hidden_size=s.hidden_size,
        heads=s.heads,
        kv_heads=s.kv_heads,
        head_dim=128,
        mlp_size=s.mlp_size,
        rope_theta=s.rope_theta,
        norm_epsilon=s.norm_epsilon,
        dtype="bfloat16",
        param_dtype="float32",
        sampler_dtype="bfloat16",
    )
    config.task.update(name="jsonl", max_prompt_tokens=1024)
    config.rollout.update(max_staleness=max_staleness, group_size=16, max_new_tokens=27648, steps_per_dispatch=32, page_size=PAGE, prefill_chunk=8192)
    # Each slot has pages for a third of the longest sequence: more would be idle most of the time, fewer be short of the mean that plans assume, a quarter.
    pages = s.longest * -(-(config.task.max_prompt_tokens + config.rollout.max_new_tokens) // PAGE)
    config.rollout.update(slots=3 * s.longest * s.replicas, kv_pages=pages + 1)
    config.rollout.wait_timeout_s = 7200.0
    config.trainer.update(
        steps=steps,
        groups_per_step=512,
        minibatches=4,
        micro_batch_tokens=32768,
        micro_batch_rows=0,
        remat="full",
        learning_rate=2e-5,
        schedule="constant",
        warmup_steps=0,  # 0.001 of the steps is less than one
    )
    config.checkpoint.export_dtype = "bfloat16"  # float32 is 131 GB for 32B
    config.algorithm.advantage = "batch"
    config.eval.update(problems=64, samples=32)
    config.cluster.sampler_share = 0.75
    config.cluster.mesh.update(trainer=s.trainer, sampler=s.sampler)
    return config
