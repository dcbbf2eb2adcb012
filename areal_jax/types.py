"""The values that cross rooms.

Invariants:
* Token ids are the ones that were sampled; nothing is ever decoded and encoded again.
* Each generated token carries its behaviour log-prob and the policy version that made it.
* A value is not changed after it has been handed on; a later stage makes a new one (``dataclasses.replace``).

Units: lengths in tokens, times in seconds, versions in trainer steps.
"""

from __future__ import annotations

import dataclasses
import datetime
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import numpy as np


class Chat(Protocol):
    """A chat template, as ``models.chat.ChatTemplate``."""

    @property
    def origin(self) -> str: ...

    @property
    def variables(self) -> frozenset[str]: ...

    def render(self, turns: Sequence[Mapping[str, Any]], now: datetime.datetime | None = None, **variables: Any) -> str: ...


class TextTokenizer(Protocol):
    """Text to ids and back, as ``models.tokenizer.Tokenizer``."""

    @property
    def eos_ids(self) -> tuple[int, ...]: ...

    @property
    def prefix(self) -> tuple[int, ...]: ...

    @property
    def chat(self) -> Chat | None: ...

    def encode(self, text: str) -> np.ndarray: ...

    def decode(self, ids: Sequence[int] | np.ndarray) -> str: ...


@dataclasses.dataclass(frozen=True)
class Prompt:
    """One problem, as it leaves the prompt stream.

    Attributes:
      index: place in the prompt stream; unique in a run, and the group's id.
      problem_id: id of the problem in its data set (the same problem may come again in a later epoch).
      text: the prompt as text, template applied.
      tokens: int32 [prompt_length].
      answer: the reference answer, as text.
      metadata: JSON-able facts that the reward needs (task name, the generator's entry, ...).
    """

    index: int
    problem_id: str
    text: str
    tokens: np.ndarray
    answer: str
    metadata: Mapping[str, Any] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class Sampling:
    """A request's own sampling distribution: temperature (0: the likeliest token), then top-k (0: all), then top-p (1: all)."""

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0


@dataclasses.dataclass(frozen=True)
class GenerationRequest:
    """One sample to be drawn. The random key of its t-th token depends on (run seed, random stream, t) alone.

    ``tokens``, ``behaviour_logprobs`` and ``versions`` hold what was generated before (a half-finished generation
    that is taken up again); they are empty for a new request.

    ``sampling``: its own distribution, for an engine made with ``per_request=True``; None: the engine's.
    ``stream``: names its random stream, two uint32; None: (group_id, sample_index).

    Requests of one ``group_id`` have one prompt, which is prefilled once.
    """

    group_id: int
    sample_index: int
    prompt_tokens: np.ndarray
    max_new_tokens: int
    tokens: np.ndarray = dataclasses.field(default_factory=lambda: np.zeros(0, np.int32))
    behaviour_logprobs: np.ndarray = dataclasses.field(default_factory=lambda: np.zeros(0, np.float32))
    versions: np.ndarray = dataclasses.field(default_factory=lambda: np.zeros(0, np.int32))
    sampling: Sampling | None = None
    stream: tuple[int, int] | None = None

    @property
    def key(self) -> tuple[int, int]:
        return self.group_id, self.sample_index


@dataclasses.dataclass(frozen=True)
class NewTokens:
    """What one dispatch added to a request.

    Attributes:
      key: of the request.
      tokens: int32 [n].
      logprobs: float32 [n], under the distribution each was drawn from.
      raw_logprobs: float32 [n], under temperature 1 and without filters; None unless the engine is made with ``per_request=True``.
      top_ids, top_logprobs: int32 and float32 [n, engine.top_logprobs], the likeliest tokens in that sense, descending; likewise.
    """

    key: tuple[int, int]
    tokens: np.ndarray
    logprobs: np.ndarray
    raw_logprobs: np.ndarray | None = None
    top_ids: np.ndarray | None = None
    top_logprobs: np.ndarray | None = None


@dataclasses.dataclass(frozen=True)
class Trajectory:
    """One finished sample.

    Attributes:
      group_id, sample_index: name the request.
      prompt_tokens: int32 [prompt_length].
      tokens: int32 [length], the generated ids, the stop token included when there is one.
      behaviour_logprobs: float32 [length], under exactly the distribution each token was drawn from.
      versions: int32 [length], the policy version that made each token; never decreasing.
      truncated: the sampler's flag: ended by the length limit, not by a stop token.
      reward: the scalar reward, None until it is known.
      components: named parts of the reward (``correct``, ...).
    """

    group_id: int
    sample_index: int
    prompt_tokens: np.ndarray
    tokens: np.ndarray
    behaviour_logprobs: np.ndarray
    versions: np.ndarray
    truncated: bool
    reward: float | None = None
    components: Mapping[str, float] = dataclasses.field(default_factory=dict)

    @property
    def length(self) -> int:
        return int(self.tokens.shape[0])


@dataclasses.dataclass(frozen=True)
class TrajectoryGroup:
    """The samples of one prompt, complete and rewarded, ordered by ``sample_index``."""

    prompt: Prompt
    version: int
    """Version of the group's oldest token."""
    trajectories: tuple[Trajectory, ...]

    @property
    def group_id(self) -> int:
        return self.prompt.index

    @property
    def tokens(self) -> int:
        """Generated tokens of all samples."""
        return sum(t.length for t in self.trajectories)


@dataclasses.dataclass(frozen=True)
class TrainingBatch:
    """The groups of one training step, oldest first."""

    step: int
    groups: tuple[TrajectoryGroup, ...]
    due: int
    """How many of them had to be in this step to keep the staleness bound."""


@dataclasses.dataclass(frozen=True)
class TrainingSequence:
    """Text to be learnt, as tokens.

    Attributes:
      tokens: int32 [n], n at least 2.
      trained: bool [n], the tokens whose log-prob is learnt; the first is never one.
    """

    tokens: np.ndarray
    trained: np.ndarray

    @property
    def positions(self) -> int:
        """Positions that the sequence takes in a packed row: its last token is only ever a target."""
        return self.tokens.shape[0] - 1


@dataclasses.dataclass(frozen=True)
class Example:
    """What is learnt together and never divided.

    Attributes:
      sequences: one; or of a preference pair the chosen one and the rejected one.
      source: file and line, for people.
      context: the normalised text before what is learnt; examples of one context are on one side of a held-out split.
    """

    sequences: tuple[TrainingSequence, ...]
    source: str = ""
    context: str = ""

    @property
    def positions(self) -> int:
        return sum(sequence.positions for sequence in self.sequences)


@dataclasses.dataclass(frozen=True)
class WeightUpdate:
    """Parameters on the sampler's mesh, ready on its devices, with the version that names them."""

    version: int
    params: Any
    transfer_s: float = 0.0
    bytes: int = 0
