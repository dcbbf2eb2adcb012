"""The stream of prompts: a Grain pipeline over problems, endless and resumable.

Invariants:
* Each problem is used once per epoch; every epoch has an order of its own, made from (seed, epoch) alone.
* Epochs follow each other without a gap or a tail: when a batch does not divide the number of problems, it takes
  the rest from the next epoch. ``Prompt.index`` counts on over epochs, so it is unique in a run.
* The state is one number and a fingerprint of the data; restored on the same data it goes on with exactly the next prompt.
* A prompt that is too long is left out by name (``dropped``), never cut.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Iterator, Sequence
from typing import Any

import grain
import numpy as np

from areal_jax.data.problems import Problem
from areal_jax.data.render import Renderer
from areal_jax.types import Prompt


@dataclasses.dataclass(frozen=True)
class Overlong:
    """A problem that was left out: its prompt has ``length`` tokens."""

    problem_id: str
    length: int


def make_prompts(problems: Sequence[Problem], render: Renderer, max_prompt_tokens: int) -> tuple[list[Prompt], list[Overlong]]:
    """Prompts of ``problems`` in their order, and those that are too long.

    Args:
      problems: their ids must be unique.
      render: makes text and tokens.
      max_prompt_tokens: longest prompt that is kept, in tokens; 0 keeps all.

    Returns:
      (prompts with ``index`` 0, 1, ..., left-out problems).

    Raises:
      ValueError: no problem is left, two have the same id, a prompt is empty, or cannot be rendered.
    """
    prompts: list[Prompt] = []
    overlong: list[Overlong] = []
    seen: set[str] = set()
    for problem in problems:
        if problem.problem_id in seen:
            raise ValueError(f"problem ids must be unique; '{problem.problem_id}' comes twice; give each row an id of its own")
        seen.add(problem.problem_id)
        rendered = render(problem)
        tokens = rendered.tokens
        if tokens.size == 0:
            raise ValueError(f"a prompt must have a token; that of '{problem.problem_id}' is empty; give it a question or a longer task.prompt_template")
        if max_prompt_tokens and tokens.size > max_prompt_tokens:
            overlong.append(Overlong(problem.problem_id, int(tokens.size)))
        else:
            tokens.setflags(write=False)
            metadata = {**problem.metadata, "in_thinking": True} if rendered.opens_thinking else problem.metadata
            prompts.append(Prompt(len(prompts), problem.problem_id, rendered.text, tokens, problem.answer, metadata))
    if not prompts:
        least = f"the shortest has {min(o.length for o in overlong)} tokens, the limit is {max_prompt_tokens}" if overlong else "the data set is empty"
        raise ValueError(f"a prompt set must hold a prompt of at most task.max_prompt_tokens; {least}; raise the limit or choose other rows")
    return prompts, overlong


class PromptDataset:
    """An endless shuffled stream of ``Prompt``; iterate it by ``iter(dataset)``.

    Attributes:
      prompts: what one epoch holds, in the data's order.
      dropped: problems left out because their prompt is longer than ``max_prompt_tokens``.
      longest: tokens of the longest prompt kept.
      fingerprint: of the prompts and the seed; a saved state is refused on others.
    """

    def __init__(self, problems: Sequence[Problem], render: Renderer, max_prompt_tokens: int = 0, seed: int = 0):
        self.prompts, self.dropped = make_prompts(problems, render, max_prompt_tokens)
        self.longest = max(int(p.tokens.size) for p in self.prompts)
        digest = hashlib.blake2b(str(seed).encode(), digest_size=16)
        for prompt in self.prompts:
            digest.update(f"{prompt.problem_id}\0{prompt.answer}\0".encode())
            digest.update(np.ascontiguousarray(prompt.tokens).tobytes())
        self.fingerprint = digest.hexdigest()
        self.dataset = grain.MapDataset.source(self.prompts).seed(seed % 2**32).shuffle().repeat().map_with_index(_numbered)

    def __len__(self) -> int:
        """Prompts in an epoch."""
        return len(self.prompts)

    def __iter__(self) -> PromptIterator:
        return PromptIterator(self)


class PromptIterator(Iterator[Prompt]):
    """One pass over the endless stream. ``get_state`` and ``set_state`` are Grain's checkpoint protocol; the state is JSON-able."""

    def __init__(self, dataset: PromptDataset):
        self._dataset = dataset
        # Read in the caller's thread: a prompt takes less than a millisecond, and threads would only add to what a resume has to wait for.
        self._iterator = iter(dataset.dataset.to_iter_dataset(grain.ReadOptions(num_threads=0, prefetch_buffer_size=0)))

    def __iter__(self) -> PromptIterator:
        return self

    def __next__(self) -> Prompt:
        return next(self._iterator)

    @property
    def epoch(self) -> int:
        """Epochs finished so far."""
        return int(self._iterator.get_state()["next_index"]) // len(self._dataset)

    def get_state(self) -> dict[str, Any]:
        """{"next_index": prompts given so far, "fingerprint": of the data}."""
        return {"next_index": int(self._iterator.get_state()["next_index"]), "fingerprint": self._dataset.fingerprint}

    def set_state(self, state: dict[str, Any]) -> None:
        """Goes on after ``state["next_index"]`` prompts.

        Raises:
          ValueError: the state is of other data, another template or tokenizer, or another seed.
        """
        if state["fingerprint"] != self._dataset.fingerprint:
            raise ValueError(
                "a prompt stream goes on with the data, template, tokenizer and seed it was saved with; "
                f"the state's fingerprint is {state['fingerprint']}, the data's {self._dataset.fingerprint}; restore the data or start a new run"
            )
        self._iterator.set_state({"next_index": int(state["next_index"])})


def _numbered(index: int, prompt: Prompt) -> Prompt:
    return dataclasses.replace(prompt, index=int(index))
