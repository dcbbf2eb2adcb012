"""Stand-ins for sampler, learner, weight push and rewards around the real loop, rollout thread and controller."""

from __future__ import annotations

import itertools
import threading
import types

import numpy as np

from areal_jax.controller.controller import Controller
from areal_jax.controller.loop import Loop
from areal_jax.controller.rollout import Rollout
from areal_jax.sampler.driver import DriverStatistics, Progress
from areal_jax.types import Prompt, Trajectory, WeightUpdate

TOKENS = 3


class FakeSampler:
    """Finishes every request in one round; those in ``held`` never end, and from ``fails_after`` rounds on it raises."""

    def __init__(self, held=(), fails_after=None):
        self.lock = threading.RLock()
        self.held, self.fails_after = set(held), fails_after
        self.queue, self.cancelled, self.published = {}, [], []
        self.version, self.statistics, self.rounds = 0, DriverStatistics(), 0
        self.on_progress = self.on_weights = None

    def submit(self, requests):
        self.queue.update({r.key: r for r in requests})

    def publish(self, update):
        self.published.append(update.version)

    def cancel(self, keys):
        for key in keys:
            self.cancelled.append(key)
            self.queue.pop(key, None)

    def close(self, timeout_s):
        self.closed = True

    def partials(self):
        return {key: (r.tokens, r.behaviour_logprobs, r.versions) for key, r in self.queue.items()}

    def run_once(self, wait_s=0.01):
        self.rounds += 1
        if self.fails_after is not None and self.rounds > self.fails_after:
            raise RuntimeError("the sampler broke on purpose")
        with self.lock:
            if self.published and self.published[-1] > self.version:
                self.version = self.published[-1]
                self.on_weights(self.version)
            done = [r for key, r in self.queue.items() if key[0] not in self.held]
            for request in done:
                del self.queue[request.key]
            finished = tuple(
                Trajectory(
                    r.group_id, r.sample_index, r.prompt_tokens, np.ones(TOKENS, np.int32), np.zeros(TOKENS, np.float32), np.full(TOKENS, self.version), False
                )
                for r in done
            )
            self.on_progress(Progress(self.version, tuple((r.key, TOKENS) for r in done), finished))
        threading.Event().wait(0.001 if done else 0.005)
        return bool(done)


class FakeRewards:
    """Answers at once; samples of the groups in ``failing`` fail, those in ``silent`` are never answered."""

    def __init__(self, failing=(), silent=()):
        self.failing, self.silent, self.on_result = set(failing), set(silent), None
        self.consecutive_failures, self.last_cause = 0, ""

    def submit(self, key, response, answer, metadata):
        if key[0] in self.silent:
            return
        failed = key[0] in self.failing
        self.consecutive_failures = self.consecutive_failures + 1 if failed else 0
        self.last_cause = "the verifier broke on purpose" if failed else self.last_cause
        self.on_result(types.SimpleNamespace(key=key, reward=None if failed else 1.0, components={}, failure="error" if failed else None, latency_s=0.0))

    def counts(self):
        return {}


class FakeLearner:
    def __init__(self):
        self.batches, self.params, self.state = [], {}, {}

    def build(self, batch):
        return batch

    def step(self, packed):
        self.batches.append([g.group_id for g in packed.groups])
        return {"reward/mean": 1.0}


class FakePusher:
    def push(self, params, version):
        return WeightUpdate(version, params)


class Prompts:
    def __init__(self):
        self.next = 0

    def __next__(self):
        self.next += 1
        return Prompt(self.next - 1, f"p{self.next - 1}", "", np.ones(2, np.int32), "1")

    def get_state(self):
        return {"next": self.next}

    def set_state(self, state):
        self.next = state["next"]


class LoopWorld:
    """A run of stand-ins, ready to ``run()``; ``saved`` are its checkpoints, ``rows`` its metrics, ``journal`` its events."""

    def __init__(
        self,
        *,
        steps=6,
        max_staleness=1,
        on_overdue="wait",
        on_failure="zero",
        sampler=None,
        rewards=None,
        timeout_s=20.0,
        stop=lambda: False,
        save_every=0,
        refills=0,
    ):
        self.sampler, self.rewards, self.learner = sampler or FakeSampler(), rewards or FakeRewards(), FakeLearner()
        self.journal, self.saved, self.rows, self.after = [], [], [], []
        changed = threading.Condition(threading.RLock())
        self.sampler.lock = changed
        self.controller = Controller(
            groups_per_step=2,
            group_size=2,
            max_new_tokens=8,
            max_staleness=max_staleness,
            on_overdue=on_overdue,
            max_concurrent_groups=None,
            journal=self.journal.append,
            clock=itertools.count().__next__,
            total_steps=steps,
            refills_per_step=refills,
        )
        trace = lambda *arguments, **more: None  # noqa: E731
        self.rollout = Rollout(
            self.controller, Prompts(), lambda tokens: "text", self.rewards, on_failure=on_failure, max_failures=5, changed=changed, trace=trace
        )
        self.sampler.on_progress, self.sampler.on_weights, self.rewards.on_result = self.rollout.on_progress, self.rollout.on_weights, self.rollout.on_result
        self.rollout.attach(self.sampler)
        self.loop = Loop(
            self.controller,
            self.rollout,
            self.learner,
            FakePusher(),
            self._stream,
            changed=changed,
            total_steps=steps,
            wait_timeout_s=timeout_s,
            stop_requested=stop,
            on_step=self.rows.append,
            save=lambda version, snapshot: self.saved.append((version, snapshot)),
            save_every=save_every,
            after_step=self.after.append,
            extra_metrics=lambda version: {},
            trace=trace,
        )

    def _stream(self, fetch):
        while (batch := fetch()) is not None:
            yield self.learner.build(batch)

    def events(self, name):
        return [e for e in self.journal if e["event"] == name]
