"""The task of a run: what is trained on, what is held out, and the demonstrations of the warm-up.

Invariants:
* Held-out problems are disjoint from the training problems by canonical form, and demonstrations come from the training problems alone.
* Problems whose prompt is too long are left out by name and counted, on both sides.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np

from areal_jax.config import ConfigError
from areal_jax.config_devices import row_capacity
from areal_jax.data.arithmetic import MIXES, build_pools
from areal_jax.data.demonstrations import demonstration_corpus
from areal_jax.data.problems import Problem
from areal_jax.data.prompts import Overlong, PromptDataset, make_prompts
from areal_jax.data.render import task_renderer
from areal_jax.data.rows import BadRow, read_rows, split_rows, without
from areal_jax.types import Prompt, TextTokenizer

DEMONSTRATIONS = 60000
"""Size of the procedural warm-up corpus."""


@dataclasses.dataclass(frozen=True)
class Task:
    """Attributes:
    train: the training problems.
    prompts: their endless shuffled stream.
    heldout: held-out prompts; every prefix has the kinds in the mix's proportions.
    longest_prompt: in tokens, over both.
    bad_rows, overlong: what was left out.
    """

    train: Sequence[Problem]
    prompts: PromptDataset
    heldout: list[Prompt]
    longest_prompt: int
    bad_rows: list[BadRow]
    overlong: list[Overlong]

    def report(self) -> list[str]:
        """What was left out, in words; empty if nothing."""
        lines = [f"skipped {len(self.bad_rows)} broken rows, the first: {self.bad_rows[0]}"] if self.bad_rows else []
        if self.overlong:
            longest = max(o.length for o in self.overlong)
            lines.append(
                f"left out {len(self.overlong)} prompts longer than 'task.max_prompt_tokens' (the longest has {longest}): {self.overlong[0].problem_id}, …"
            )
        return lines


def load_task(config: Any, tokenizer: TextTokenizer) -> Task:
    """Reads or generates the problems.

    Raises:
      ConfigError: the rows cannot be used, or no problem is left on one side.
    """
    section = config.task
    bad: list[BadRow] = []
    try:
        render = task_renderer(section, tokenizer)
        if section.name == "jsonl":
            train, bad = read_rows(section.path, section.question_key, section.answer_key, section.on_bad_row)
            if section.eval_path:
                heldout, more = read_rows(section.eval_path, section.question_key, section.answer_key, section.on_bad_row)
                train, bad = without(train, heldout)[0], bad + more
                if not train:
                    raise ConfigError(f"every row of '{section.path}' is also in '{section.eval_path}'; hold other rows out")
            else:
                train, heldout = split_rows(train, section.holdout_fraction)
        else:
            pools = build_pools(section, config.seed, MIXES[section.name])
            train, heldout = pools.train, pools.heldout
        prompts = PromptDataset(train, render, section.max_prompt_tokens, config.seed)
        held, overlong = make_prompts(heldout, render, section.max_prompt_tokens)
    except (ValueError, OSError) as error:
        raise error if isinstance(error, ConfigError) else ConfigError(str(error)) from error
    longest = max(prompts.longest, max(len(p.tokens) for p in held))
    return Task(train, prompts, held, longest, bad, [*prompts.dropped, *overlong])


def demonstrations(config: Any, task: Task, tokenizer: TextTokenizer) -> list[tuple[np.ndarray, np.ndarray]]:
    """The warm-up's corpus: (prompt tokens, response tokens with the stop token), each response within ``rollout.max_new_tokens``.

    Generated problems are solved by the two teachers; rows are shown with their worked solution, or their bare answer when they have none.

    Raises:
      ConfigError: no demonstration is short enough.
    """
    if config.task.name == "jsonl":
        corpus = [(problem, _solution(problem)) for problem in task.train]
    else:
        corpus = demonstration_corpus(task.train, config.sft.careless_fraction, DEMONSTRATIONS, config.seed)
    render = task_renderer(config.task, tokenizer)
    prompts = {problem.problem_id: render(problem).tokens for problem in {p.problem_id: p for p, _ in corpus}.values()}
    stop = np.asarray(tokenizer.eos_ids[:1], np.int32)
    pairs = [(prompts[problem.problem_id], np.concatenate([tokenizer.encode(response), stop])) for problem, response in corpus]
    fitting = [(p, r) for p, r in pairs if len(r) <= config.rollout.max_new_tokens and len(p) <= task.longest_prompt]
    if not fitting:
        shortest = min(len(r) for _, r in pairs)
        raise ConfigError(
            f"the warm-up needs a demonstration of at most 'rollout.max_new_tokens' = {config.rollout.max_new_tokens} tokens; "
            f"the shortest has {shortest}; raise the limit or set 'sft.steps=0'"
        )
    return fitting


def _solution(problem: Problem) -> str:
    solution = str(problem.metadata.get("solution", "")).strip()
    return solution if "####" in solution else f"{solution}####{problem.answer}" if solution else f"####{problem.answer}"


def settle_lengths(config: Any, task: Task) -> tuple[int, int]:
    """(longest sequence, capacity of a packed row) of a run; a chosen capacity is a multiple of the trainer's context axis.

    Raises:
      ConfigError: ``trainer.micro_batch_tokens`` is given and too small.
    """
    longest = task.longest_prompt + config.rollout.max_new_tokens
    capacity = row_capacity(config, longest)
    if capacity < longest - 1:
        raise ConfigError(
            f"'trainer.micro_batch_tokens' must hold the longest sequence, prompt {task.longest_prompt} + 'rollout.max_new_tokens' = "
            f"{config.rollout.max_new_tokens}; got {capacity}; raise it, or set it to 0 to have it chosen"
        )
    return longest, capacity
