"""The work that a benchmark gives to a generator: prompts, and how many tokens each is to be answered with.

Invariants:
* A load is a function of its arguments alone: the same seed, the same prompts, lengths and order.
* Lengths are forced: a request ends at its own number of tokens, never at an end token, so that every generator samples the same count.
"""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Sequence

import numpy as np

from areal_jax.config import ConfigError
from areal_jax.types import GenerationRequest

SPREAD = 0.83
"""Standard deviation of the logarithm of long-tailed lengths: with median 32 and maximum 256 their mean is 45."""


@dataclasses.dataclass(frozen=True)
class Load:
    """Requests in the order of their arrival.

    Attributes:
      prompts: int32 [length] each; requests of one group have one prompt.
      lengths: tokens to sample for each.
      groups: number of the prompt of each.
    """

    prompts: tuple[np.ndarray, ...]
    lengths: tuple[int, ...]
    groups: tuple[int, ...]

    @property
    def tokens(self) -> int:
        """To be sampled in all."""
        return sum(self.lengths)

    @property
    def longest(self) -> int:
        """Tokens of the longest sequence, its prompt included."""
        return max(len(prompt) + length for prompt, length in zip(self.prompts, self.lengths, strict=True))

    def shortened(self, divisor: int) -> Load:
        """The same requests with lengths divided, at least 1 token each."""
        return dataclasses.replace(self, lengths=tuple(max(1, length // divisor) for length in self.lengths))

    def first(self, count: int) -> Load:
        """The first so many requests."""
        return Load(self.prompts[:count], self.lengths[:count], self.groups[:count])

    def requests(self) -> list[GenerationRequest]:
        """As the driver takes them."""
        numbers: dict[int, int] = {}
        requests = []
        for prompt, length, group in zip(self.prompts, self.lengths, self.groups, strict=True):
            numbers[group] = numbers.get(group, -1) + 1
            requests.append(GenerationRequest(group, numbers[group], prompt, length))
        return requests


def whole_number(name: str, text: str, least: int = 1) -> int:
    """The value of a flag that counts something.

    Raises:
      ConfigError: it is no whole number, or below ``least``.
    """
    if not text.isdigit() or int(text) < least:
        raise ConfigError(f"'--{name}' must be a whole number from {least}; got '{text}'")
    return int(text)


def draw_lengths(text: str, count: int, random: np.random.Generator) -> tuple[int, ...]:
    """Lengths of a named distribution.

    Args:
      text: 'fixed:N', or 'longtail:MEDIAN:MAX' (log-normal, cut at MAX; the values are its quantiles in a random order, so that median
        and maximum are those named).
      count: how many.
      random: for the order.

    Raises:
      ConfigError: the text names neither.
    """
    kind, *rest = text.split(":")
    if kind == "fixed" and len(rest) == 1:
        return (whole_number("lengths=fixed", rest[0]),) * count
    if kind == "longtail" and len(rest) == 2:
        median, most = (whole_number("lengths=longtail", part) for part in rest)
        if median > most:
            raise ConfigError(f"'--lengths=longtail:MEDIAN:MAX' must have MEDIAN at most MAX; got '{text}'")
        normal = statistics.NormalDist()
        values = [median * math.exp(SPREAD * normal.inv_cdf((i + 0.5) / count)) for i in range(count)]
        return tuple(int(v) for v in random.permutation([min(most, max(1, round(v))) for v in values]))
    raise ConfigError(f"'--lengths' must be longtail:MEDIAN:MAX or fixed:N; got '{text}'")


def make_load(vocab_size: int, requests: int, lengths: str, prompt: Sequence[int], group: int = 1, seed: int = 0) -> Load:
    """Random prompts with lengths to be sampled.

    Args:
      vocab_size: of the policy.
      requests: how many; a multiple of ``group``.
      lengths: for ``draw_lengths``.
      prompt: (shortest, longest) prompt in tokens; lengths between are equally likely.
      group: requests that share a prompt.
      seed: of everything random.
    """
    random = np.random.default_rng(seed)
    if requests % group:
        raise ConfigError(f"'--requests' must be a multiple of '--group' = {group}; got {requests}")
    sizes = random.integers(prompt[0], prompt[-1] + 1, requests // group)
    prompts = [random.integers(2, vocab_size, size).astype(np.int32) for size in sizes]
    numbers = tuple(i // group for i in range(requests))
    return Load(tuple(prompts[n] for n in numbers), draw_lengths(lengths, requests, random), numbers)
