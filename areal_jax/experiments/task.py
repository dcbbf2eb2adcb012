"""The studies' task: the short kinds of the built-in arithmetic, so that a run takes minutes on one core.

Invariants:
* Problems, pools, teachers and verifier are the built-in task's; only the mix is this module's own.
* As there, held-out problems are disjoint from training problems by canonical form.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from areal_jax.data import arithmetic
from areal_jax.data.demonstrations import demonstration_corpus
from areal_jax.data.prompts import PromptDataset, make_prompts
from areal_jax.data.render import task_renderer
from areal_jax.data.task import Task
from areal_jax.types import TextTokenizer

DEMONSTRATIONS = 20000
"""Size of the warm-up's corpus."""

MIX = {"sum_short": (0.55, 0.45), "equation": (0.30, 0.35), "gcd": (0.15, 0.20)}
"""Kind → (share in training and in the held-out set, share in the demonstrations)."""

KINDS = {name: dataclasses.replace(arithmetic.KINDS[name], weight=weight, warmup_weight=warmup) for name, (weight, warmup) in MIX.items()}


def load_study_task(config: Any, tokenizer: TextTokenizer) -> Task:
    """The task of a run, from its ``task`` section and seed."""
    pools = arithmetic.build_pools(config.task, config.seed, KINDS)
    render = task_renderer(config.task, tokenizer)
    prompts = PromptDataset(pools.train, render, config.task.max_prompt_tokens, config.seed)
    held, overlong = make_prompts(pools.heldout, render, config.task.max_prompt_tokens)
    return Task(pools.train, prompts, held, max(prompts.longest, max(len(p.tokens) for p in held)), [], [*prompts.dropped, *overlong])


def study_demonstrations(config: Any, task: Task, tokenizer: TextTokenizer) -> list[tuple[np.ndarray, np.ndarray]]:
    """The warm-up's (prompt tokens, response tokens with the stop token), by the careful and the careless teacher."""
    render = task_renderer(config.task, tokenizer)
    stop = np.asarray(tokenizer.eos_ids[:1], np.int32)
    prompts = {problem.problem_id: render(problem).tokens for problem in task.train}
    corpus = demonstration_corpus(task.train, config.sft.careless_fraction, DEMONSTRATIONS, config.seed, KINDS)
    pairs = [(prompts[problem.problem_id], np.concatenate([tokenizer.encode(response), stop])) for problem, response in corpus]
    return [(prompt, response) for prompt, response in pairs if len(response) <= config.rollout.max_new_tokens]
