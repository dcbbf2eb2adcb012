"""What the controller knows of one outstanding group, and how that is written down.

Invariants:
* v(g), ``Group.version``, never exceeds the version of any token the group has or will have: it is the version at admission until every sample has its
  first token, and then the oldest token's version. It never falls, so a deadline never moves nearer.
* ``to_dict`` and ``from_dict`` are exact: float32 → JSON number → float32 is the identity.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np

from areal_jax.controller.answers import ControllerError
from areal_jax.types import GenerationRequest, Prompt, Trajectory, TrajectoryGroup

Partial = tuple[np.ndarray, np.ndarray, np.ndarray]
"""tokens int32 [n], behaviour_logprobs float32 [n], versions int32 [n] of an unfinished sample."""


def partial_to_dict(partial: Partial) -> dict[str, list]:
    """JSON-able lists of a sample's three aligned arrays."""
    tokens, logprobs, versions = partial
    return {
        "tokens": np.asarray(tokens, np.int32).tolist(),
        "behaviour_logprobs": np.asarray(logprobs, np.float32).astype(np.float64).tolist(),
        "versions": np.asarray(versions, np.int32).tolist(),
    }


def partial_from_dict(state: Mapping[str, list]) -> Partial:
    """The inverse of ``partial_to_dict``."""
    return np.array(state["tokens"], np.int32), np.array(state["behaviour_logprobs"], np.float32), np.array(state["versions"], np.int32)


def prompt_to_dict(prompt: Prompt) -> dict[str, Any]:
    """JSON-able."""
    return {**{f.name: getattr(prompt, f.name) for f in dataclasses.fields(prompt)}, "tokens": prompt.tokens.tolist(), "metadata": dict(prompt.metadata)}


def prompt_from_dict(state: Mapping[str, Any]) -> Prompt:
    """The inverse of ``prompt_to_dict``."""
    return Prompt(**{**state, "tokens": np.array(state["tokens"], np.int32)})


def version_runs(versions: np.ndarray) -> list[list[int]]:
    """Run-length code of versions [n]: [[version, count], ...], the token indices at which new weights came in."""
    starts = np.flatnonzero(np.diff(versions, prepend=np.int64(-1))) if len(versions) else np.zeros(0, np.int64)
    counts = np.diff(np.append(starts, len(versions)))
    return [[int(versions[s]), int(n)] for s, n in zip(starts, counts, strict=True)]


def check_aligned(trajectory: Trajectory) -> None:
    """Raises ControllerError unless each token has one log-prob and one version and versions never fall."""
    key, versions = (trajectory.group_id, trajectory.sample_index), trajectory.versions
    lengths = len(trajectory.tokens), len(trajectory.behaviour_logprobs), len(versions)
    if len(set(lengths)) > 1:
        raise ControllerError("each token has one log-prob and one version; sample {} has {} tokens, {} log-probs, {} versions".format(key, *lengths))
    if np.any(np.diff(versions) < 0):
        raise ControllerError(f"versions within a sample never fall; sample {key} has {version_runs(versions)} as [version, tokens]")


@dataclasses.dataclass
class Sample:
    """One sample of a group.

    Attributes:
      generated: tokens that the sampler reported and that still belong to this sample.
      first_version: version of its first token, None before that.
      trajectory: set when it is finished; its ``reward`` is set when it is known.
      partial: tokens taken over from a checkpoint, for the request that takes the sample up again.
    """

    generated: int = 0
    first_version: int | None = None
    trajectory: Trajectory | None = None
    partial: Partial | None = None

    @property
    def finished(self) -> bool:
        return self.trajectory is not None

    @property
    def rewarded(self) -> bool:
        return self.trajectory is not None and self.trajectory.reward is not None

    @property
    def started(self) -> bool:
        return self.finished or self.first_version is not None

    @property
    def tokens(self) -> int:
        """Tokens it holds: those of its trajectory once there is one."""
        return self.trajectory.length if self.trajectory is not None else self.generated


@dataclasses.dataclass
class Group:
    """One admitted, not yet trained prompt with its samples; ``version`` is v(g)."""

    prompt: Prompt
    admitted_version: int
    version: int
    samples: list[Sample]

    @classmethod
    def new(cls, prompt: Prompt, version: int, group_size: int) -> Group:
        """A group without tokens, admitted at a version."""
        return cls(prompt, version, version, [Sample() for _ in range(group_size)])

    @property
    def group_id(self) -> int:
        return self.prompt.index

    @property
    def ready(self) -> bool:
        return all(s.rewarded for s in self.samples)

    @property
    def uniform(self) -> bool:
        """Whether all samples are rewarded, and alike: they teach nothing of one another."""
        return self.ready and len({s.trajectory.reward for s in self.samples if s.trajectory is not None}) == 1

    @property
    def generating(self) -> bool:
        return not all(s.finished for s in self.samples)

    @property
    def tokens(self) -> int:
        return sum(s.tokens for s in self.samples)

    def unfinished(self) -> list[int]:
        """Indices of samples that lack tokens."""
        return [i for i, s in enumerate(self.samples) if not s.finished]

    def unrewarded(self) -> list[int]:
        """Indices of samples that are finished and lack a reward."""
        return [i for i, s in enumerate(self.samples) if s.finished and not s.rewarded]

    def raise_version(self) -> bool:
        """Moves v(g) to the oldest token's version once every sample has started; says whether it moved."""
        firsts = [s.first_version for s in self.samples if s.first_version is not None]
        if not firsts or not all(s.started for s in self.samples) or min(firsts) <= self.version:
            return False
        self.version = min(firsts)
        return True

    def request(self, sample_index: int, max_new_tokens: int) -> GenerationRequest:
        """The request that draws a sample, or takes it up again."""
        request = GenerationRequest(self.group_id, sample_index, self.prompt.tokens, max_new_tokens)
        partial = self.samples[sample_index].partial
        if partial is None:
            return request
        return dataclasses.replace(request, tokens=partial[0], behaviour_logprobs=partial[1], versions=partial[2])

    def complete(self) -> TrajectoryGroup:
        """The group as the trainer gets it. All samples must be rewarded."""
        trajectories = tuple(s.trajectory for s in self.samples if s.trajectory is not None)
        oldest = min((int(t.versions.min()) for t in trajectories if t.length), default=self.version)
        return TrajectoryGroup(self.prompt, oldest, trajectories)

    def to_dict(self, partials: Mapping[tuple[int, int], Partial]) -> dict[str, Any]:
        """JSON-able. Of an unfinished sample the first ``generated`` tokens of its partial are kept."""
        samples = []
        for index, sample in enumerate(self.samples):
            state: dict[str, Any] = {"generated": sample.generated}
            if sample.trajectory is not None:
                t = sample.trajectory
                state |= partial_to_dict((t.tokens, t.behaviour_logprobs, t.versions))
                state |= {"truncated": bool(t.truncated), "reward": t.reward, "components": dict(t.components), "finished": True}
            else:
                partial = partials.get((self.group_id, index), sample.partial)
                if partial is not None and min(sample.generated, len(partial[0])):
                    tokens, logprobs, versions = (array[: sample.generated] for array in partial)
                    state |= partial_to_dict((tokens, logprobs, versions))
            samples.append(state)
        return {"prompt": prompt_to_dict(self.prompt), "admitted_version": self.admitted_version, "version": self.version, "samples": samples}

    @classmethod
    def from_dict(cls, state: Mapping[str, Any]) -> tuple[Group, list[int]]:
        """The inverse of ``to_dict``.

        Returns:
          The group, and for each sample how many of its generated tokens the state does not hold; they are no longer counted in ``generated``.
        """
        prompt, samples, lost = prompt_from_dict(state["prompt"]), [], []
        for index, s in enumerate(state["samples"]):
            partial = partial_from_dict(s) if "tokens" in s else None
            first = int(partial[2][0]) if partial is not None and len(partial[2]) else None
            if s.get("finished"):
                assert partial is not None
                trajectory = Trajectory(
                    prompt.index, index, prompt.tokens, *partial, truncated=s["truncated"], reward=s["reward"], components=dict(s["components"])
                )
                samples.append(Sample(s["generated"], first, trajectory))
                lost.append(0)
            else:
                kept = 0 if partial is None else len(partial[0])
                samples.append(Sample(kept, first, None, partial if kept else None))
                lost.append(s["generated"] - kept)
        return cls(prompt, state["admitted_version"], state["version"], samples), lost
