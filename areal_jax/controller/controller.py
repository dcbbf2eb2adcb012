"""The controller: admission, buffer, consumption and ledger as one deterministic state machine.

Events go in as calls, decisions come out as return values, and each change is appended to the journal by the controller itself. It starts no
thread, holds no lock, draws no random number and never waits; its caller does. Of samplers, rewards and trainers it knows only these calls.

                 admit            tokens_generated, sample_finished, sample_rewarded         next_batch          batch_trained
    prompt ───────────────► in flight ─────────────────────────────────────────► ready ───────────────► handed out ───────────► trained
                                │                                                  │
                                └──────────────── drop_group(reason) ◄─────────────┘      (by next_batch when on_overdue is 'drop'; by dynamic sampling)

Invariants:
* η is strict: unless ``on_overdue`` is 'keep', no token is trained at step i whose version is older than i − η. Admission (``gate``) and
  consumption (``schedule``) together give it; ``next_batch`` verifies it on the tokens themselves.
* Groups stay whole, are trained once, oldest first.
* Dynamic sampling (arXiv 2503.14476, equation 11) drops a group of equal rewards when the last one comes, and frees its place; at most
  ``refills_per_step`` of them between two steps, so that a step always comes.
* The ledger closes after every event; ``batch_trained`` checks it.
* ``snapshot`` may be taken between any two events, and ``restore`` continues with the same bound, count and ledger.

Units: versions in trainer steps, lengths in tokens, times in seconds.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from areal_jax.controller.answers import ControllerError, Waiting
from areal_jax.controller.gate import StalenessGate
from areal_jax.controller.groups import Group, Partial, Sample, check_aligned, version_runs
from areal_jax.controller.ledger import STALE, ZERO_STD, LedgerBalance
from areal_jax.controller.schedule import Plan, check_age, check_feasible, plan_step
from areal_jax.controller.state import ControllerState, check_arguments
from areal_jax.types import GenerationRequest, Prompt, TrainingBatch, Trajectory


class Controller:
    """See the module. All methods return at once; guard them with one lock where several threads call.

    Args:
      groups_per_step: B.
      group_size: G, samples of a prompt.
      max_new_tokens: length limit of a response.
      max_staleness: η; None: unbounded.
      on_overdue: due groups that are unready once B others are ready: 'wait' for them, 'drop' them as stale, or 'keep' them and train past η.
      max_concurrent_groups: most groups being generated at once; None: as many as η admits (B if η is None).
      journal, clock: the one receives a JSON-able dict for each change, the other stamps it, in seconds.
      total_steps: steps of the whole run; None: endless.
      refills_per_step: groups of equal rewards dropped before a step; 0: no dynamic sampling.
    """

    def __init__(
        self,
        *,
        groups_per_step: int,
        group_size: int,
        max_new_tokens: int,
        max_staleness: int | None,
        on_overdue: str,
        max_concurrent_groups: int | None,
        journal: Callable[[dict], None],
        clock: Callable[[], float],
        total_steps: int | None,
        refills_per_step: int = 0,
    ):
        check_arguments(groups_per_step, group_size, max_new_tokens, max_staleness, on_overdue, refills_per_step)
        self.gate = StalenessGate(groups_per_step, max_staleness, max_concurrent_groups, total_steps)
        self.groups_per_step, self.group_size, self.max_new_tokens = groups_per_step, group_size, max_new_tokens
        self.max_staleness, self.on_overdue, self.total_steps, self.refills_per_step = max_staleness, on_overdue, total_steps, refills_per_step
        self._journal, self._clock = journal, clock
        self._state = ControllerState()
        self._dropped: dict[int, str] = {}
        self._to_cancel: list[tuple[int, int]] = []
        self._batch: TrainingBatch | None = None

    @property
    def version(self) -> int:
        """i: the trainer's version, the steps done."""
        return self._state.version

    @property
    def active_version(self) -> int:
        """Version of the weights that the sampler runs."""
        return self._state.active_version

    @property
    def admitted(self) -> int:
        """Groups admitted since the start of the run, dropped ones included."""
        return self._state.admitted

    @property
    def submitted(self) -> int:
        """N_r: groups trained and outstanding; the lost and the dropped do not count."""
        return self._state.version * self.groups_per_step + len(self._state.groups)

    def is_live(self, group_id: int) -> bool:
        """Whether a group is admitted and neither trained nor dropped."""
        return group_id in self._state.groups

    # Events from the sampler

    def capacity(self) -> int:
        """Groups that may be admitted now (equation 3, with the version that will generate them: the sampler's)."""
        running = sum(g.generating for g in self._state.groups.values())
        return self.gate.capacity(version=self._state.active_version, submitted=self.submitted, running=running)

    def admit(self, prompt: Prompt) -> list[GenerationRequest]:
        """Admits a prompt as a new group.

        Args:
          prompt: its ``index`` is the group's id and greater than those admitted before.

        Returns:
          The ``group_size`` requests to be generated.

        Raises:
          ControllerError: there is no capacity, or the index is not new.
        """
        if self.capacity() < 1:
            raise ControllerError(f"a group may be admitted only while capacity() > 0; prompt {prompt.index} came at 0; ask capacity() first")
        if prompt.index <= self._state.last_admitted:
            raise ControllerError(
                f"prompt indices must rise; got {prompt.index} after {self._state.last_admitted}; take each prompt of the stream once, in order"
            )
        group = Group.new(prompt, self._state.active_version, self.group_size)
        self._state.groups[prompt.index] = group
        self._state.last_admitted = prompt.index
        self._state.admitted += 1
        self._write("admit", group=prompt.index, problem=prompt.problem_id, version=group.version)
        return [group.request(i, self.max_new_tokens) for i in range(self.group_size)]

    def tokens_generated(self, group_id: int, sample_index: int, count: int, version: int) -> None:
        """Counts newly sampled tokens of one version. Every token is reported once, before its sample is reported as finished.

        Raises:
          ControllerError: the sample is finished or was never admitted, or no such version can have been running.
        """
        if count < 0:
            raise ControllerError(f"a count of tokens must be at least 0; got {count} for sample {(group_id, sample_index)}")
        sample = self._sample(group_id, sample_index)
        if sample is None:
            self._state.ledger.generated += count
            self._state.ledger.drop(self._dropped[group_id], count)
            return
        group = self._state.groups[group_id]
        if sample.finished:
            raise ControllerError(f"a finished sample has no more tokens; {count} came for {(group_id, sample_index)}; report tokens before the finish")
        self._state.check_version(group, version)
        self._state.ledger.generated += count
        sample.generated += count
        if count and sample.first_version is None:
            sample.first_version = version
            self._update_version(group)

    def sample_finished(self, trajectory: Trajectory) -> None:
        """Takes over a finished sample. Its reward, if it has one, is ignored: rewards come by ``sample_rewarded``.

        Raises:
          ControllerError: it is finished already or was never admitted, its arrays do not align, or its versions fall or cannot have been running.
        """
        key = trajectory.group_id, trajectory.sample_index
        sample = self._sample(*key)
        if sample is None:
            return
        group, versions = self._state.groups[trajectory.group_id], trajectory.versions
        if sample.finished:
            raise ControllerError(f"a sample finishes once; {key} came twice")
        check_aligned(trajectory)
        if len(versions):
            self._state.check_version(group, int(versions[0]))
            self._state.check_version(group, int(versions[-1]))
            sample.first_version = int(versions[0])
        sample.trajectory = dataclasses.replace(trajectory, reward=None, components={})
        sample.partial = None
        facts = {"length": trajectory.length, "versions": version_runs(versions), "truncated": bool(trajectory.truncated)}
        self._write("finish", group=key[0], sample=key[1], **facts)
        self._update_version(group)

    def weights_active(self, version: int) -> None:
        """The sampler runs these weights from now on.

        Raises:
          ControllerError: they are older than the ones before, or newer than the trainer's.
        """
        if not self._state.active_version <= version <= self._state.version:
            raise ControllerError(
                f"the sampler's version rises up to the trainer's, from {self._state.active_version} to {self._state.version}; got {version}; "
                "call batch_trained before the weights of that step are pushed"
            )
        self._state.active_version = version
        self._write("version", version=version)

    # Events from the reward service

    def sample_rewarded(self, group_id: int, sample_index: int, reward: float, components: Mapping[str, float], latency_s: float) -> None:
        """Takes over the reward of a finished sample. With dynamic sampling its group may be dropped by that: all of it is finished, nothing to cancel.

        Raises:
          ControllerError: the sample is not finished, has a reward, or was never admitted; or the reward is not finite.
        """
        sample = self._sample(group_id, sample_index)
        if sample is None:
            return
        key = group_id, sample_index
        if sample.trajectory is None:
            raise ControllerError(f"only a finished sample has a reward; {key} is still generating")
        if sample.rewarded:
            raise ControllerError(f"a sample is rewarded once; {key} came twice")
        reward = float(reward)
        if not np.isfinite(reward):
            raise ControllerError(f"a reward is a finite number; {key} got {reward}; treat the check as failed (reward.on_failure)")
        values = {str(k): float(v) for k, v in components.items()}
        sample.trajectory = dataclasses.replace(sample.trajectory, reward=reward, components=values)
        self._write("reward", group=group_id, sample=sample_index, reward=reward, components=values, latency_s=float(latency_s))
        if self._state.refilled < self.refills_per_step and self._state.groups[group_id].uniform:
            self._state.refilled += 1
            self.drop_group(group_id, ZERO_STD)

    def drop_group(self, group_id: int, reason: str) -> list[tuple[int, int]]:
        """Gives a group up; its place is free again. What still comes for it is ignored, and its tokens are booked under the same reason.

        Returns:
          The samples that may still be generating, for the sampler to cancel; none if the group was dropped before.

        Raises:
          ControllerError: the group was never admitted, is trained, or is in the batch being trained.
        """
        if group_id in self._dropped:
            return []
        group = self._live(group_id)
        if self._batch is not None and any(g.group_id == group_id for g in self._batch.groups):
            raise ControllerError(f"group {group_id} is in the batch of step {self._batch.step}, which is being trained; it cannot be dropped")
        self._state.ledger.drop(reason, group.tokens)
        del self._state.groups[group_id]
        self._dropped[group_id] = reason
        self._state.drop_counts[reason] += 1
        self._write("drop", group=group_id, reason=reason, tokens=group.tokens)
        return [(group_id, i) for i in group.unfinished()]

    def take_cancelled(self) -> list[tuple[int, int]]:
        """Samples that ``next_batch`` dropped as stale while they were generating, each told once, for the sampler to cancel."""
        cancelled, self._to_cancel = self._to_cancel, []
        return cancelled

    # Events from the trainer

    def next_batch(self) -> TrainingBatch | Waiting:
        """The batch of step ``version``, or what it waits for. With on_overdue='drop' stale groups may be dropped (see ``take_cancelled``).

        Raises:
          ControllerError: the last batch is not trained yet, or the run has no more steps.
          StalenessError: a token of the batch would be older than η; the groups chosen cannot be trained within the bound.
        """
        if self._batch is not None:
            raise ControllerError(f"one batch at a time; that of step {self._batch.step} is not trained yet; call batch_trained first")
        if self.total_steps is not None and self._state.version >= self.total_steps:
            raise ControllerError(f"all {self.total_steps} steps are done; no batch is left")
        plan = self._plan()
        if len(plan.batch) < self.groups_per_step:
            unready = sorted((g for g in self._state.groups.values() if not g.ready), key=lambda g: (g.version, g.group_id))
            return self._waiting("batch", self.groups_per_step - len(plan.batch), tuple(g.group_id for g in unready))
        if self.on_overdue != "keep":
            check_feasible(plan, step=self._state.version, groups_per_step=self.groups_per_step)
        if plan.missing and self.on_overdue == "wait":
            return self._waiting("due", plan.missing, plan.late)
        while plan.missing and self.on_overdue == "drop":
            for group_id in plan.late[: plan.missing]:
                self._to_cancel += self.drop_group(group_id, STALE)
            plan = self._plan()
        batch = TrainingBatch(self._state.version, tuple(self._state.groups[g].complete() for g in plan.batch), min(plan.due, self.groups_per_step))
        if self.max_staleness is not None and self.on_overdue != "keep":
            check_age(batch, self.max_staleness)
        self._batch = batch
        self._write("batch", step=batch.step, groups=list(plan.batch), versions=[g.version for g in batch.groups], due=batch.due)
        return batch

    def batch_trained(self, batch: TrainingBatch) -> None:
        """The update is done: the trainer's version is one higher and the batch's groups are gone.

        Raises:
          ControllerError: it is not the batch that was handed out last.
          LedgerError: the ledger does not close.
        """
        if self._batch is None or batch.step != self._batch.step or [g.group_id for g in batch.groups] != [g.group_id for g in self._batch.groups]:
            handed_out = "none" if self._batch is None else f"that of step {self._batch.step}"
            raise ControllerError(f"only the batch handed out last is trained, once; handed out: {handed_out}; got that of step {batch.step}")
        for group in batch.groups:
            del self._state.groups[group.group_id]
            self._state.ledger.trained += group.tokens
        self._batch = None
        self._state.version += 1
        self._state.refilled = 0
        self._write("trained", version=self._state.version)
        self.check()

    def ledger(self) -> LedgerBalance:
        """The account, in tokens: buffered are those of finished samples, in flight those of unfinished ones."""
        return self._state.balance()

    def check(self) -> None:
        """Raises LedgerError, naming the numbers and the samples at fault, unless the ledger closes."""
        self._state.check()

    def counts(self) -> dict[str, int | None]:
        """Flow and ledger metrics by their names in metrics.jsonl. ``drop/lost_on_resume`` counts samples, other drops count groups."""
        groups, handed_out = self._state.groups.values(), 0 if self._batch is None else len(self._batch.groups)
        return {
            "buffer/depth": sum(g.ready for g in groups) - handed_out,
            "buffer/capacity": None if self.max_staleness is None else (self.max_staleness + 1) * self.groups_per_step,
            "groups/in_flight": sum(not g.ready for g in groups),
            "groups/due": self._plan().due,
            **self.ledger().metrics(),
            **{f"drop/{reason}": count for reason, count in sorted(self._state.drop_counts.items())},
        }

    def dropped_tokens(self) -> dict[str, int]:
        """Dropped tokens by reason."""
        return dict(self._state.ledger.dropped)

    # Stop and resume

    def snapshot(self, partials: Mapping[tuple[int, int], Partial]) -> dict[str, Any]:
        """The whole state, JSON-able. A batch handed out and not trained counts as buffered: the resumed run takes it again.

        Args:
          partials: (group_id, sample_index) → (tokens, behaviour_logprobs, versions) so far, of the unfinished samples. Those of a sample
            that is missing, or longer ago than what was reported, are lost on resume and booked as such.
        """
        return {"settings": self._settings(), **self._state.to_dict(partials)}

    @classmethod
    def restore(cls, snapshot: Mapping[str, Any], **constructor: Any) -> Controller:
        """A controller that goes on where a snapshot was taken. Hand ``pending_requests`` to the sampler and ``unrewarded`` to the rewards.

        Args:
          snapshot: from ``snapshot``, through JSON or not.
          **constructor: the arguments of ``Controller``.

        Raises:
          ControllerError: the snapshot is of a run with another B, G or η.
          ValueError: it is of another format.
        """
        controller = cls(**constructor)
        state, lost_tokens = ControllerState.from_dict(snapshot)
        if snapshot["settings"] != controller._settings():
            raise ControllerError(f"a resumed run keeps its settings {snapshot['settings']}; got {controller._settings()}; resume with the saved configuration")
        controller._state = state
        controller._write("resume", version=state.version, groups=list(state.groups), lost_tokens=lost_tokens)
        controller.check()
        return controller

    def pending_requests(self) -> list[GenerationRequest]:
        """Requests of the unfinished samples, with the tokens that a checkpoint held; oldest group first. For a restored controller."""
        groups = sorted(self._state.groups.values(), key=lambda g: (g.version, g.group_id))
        return [group.request(i, self.max_new_tokens) for group in groups for i in group.unfinished()]

    def prompt_of(self, group_id: int) -> Prompt | None:
        """The prompt of an outstanding group; None when it was trained or dropped meanwhile."""
        group = self._state.groups.get(group_id)
        return None if group is None else group.prompt

    def unrewarded(self) -> list[tuple[Prompt, Trajectory]]:
        """Finished samples whose reward is not known, with their prompts. For a restored controller."""
        pairs = [(g.prompt, g.samples[i].trajectory) for g in self._state.groups.values() for i in g.unrewarded()]
        return [(prompt, trajectory) for prompt, trajectory in pairs if trajectory is not None]

    def _settings(self) -> dict[str, int | None]:
        return {"groups_per_step": self.groups_per_step, "group_size": self.group_size, "max_staleness": self.max_staleness}

    def _write(self, event: str, **facts: Any) -> None:
        self._journal({"event": event, "time": self._clock(), **facts})

    def _live(self, group_id: int) -> Group:
        if group_id not in self._state.groups:
            raise ControllerError(f"group {group_id} is not outstanding: it was never admitted or is trained; events name live groups")
        return self._state.groups[group_id]

    def _sample(self, group_id: int, sample_index: int) -> Sample | None:
        """The live sample, or None if its group was dropped."""
        if group_id in self._dropped:
            return None
        group = self._live(group_id)
        if not 0 <= sample_index < self.group_size:
            raise ControllerError(f"sample_index must be from 0 to {self.group_size - 1}; got {sample_index} for group {group_id}")
        return group.samples[sample_index]

    def _update_version(self, group: Group) -> None:
        if group.raise_version():
            self._write("start", group=group.group_id, version=group.version)

    def _plan(self) -> Plan:
        return plan_step(self._state.candidates(), step=self._state.version, groups_per_step=self.groups_per_step, max_staleness=self.max_staleness)

    def _waiting(self, kind: str, missing: int, group_ids: tuple[int, ...]) -> Waiting:
        groups = [self._state.groups[g] for g in group_ids]
        return Waiting(kind, missing, group_ids, {g.group_id: {"tokens": tuple(g.unfinished()), "reward": tuple(g.unrewarded())} for g in groups})
