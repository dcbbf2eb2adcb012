"""A sampler of requests with given lengths, and the other stand-ins around a run in virtual time."""

import collections

import numpy as np

from areal_jax.sampler.driver import DriverStatistics, Progress
from areal_jax.types import Prompt, Trajectory, WeightUpdate


class ScriptedSampler:
    """Decodes ``steps`` tokens of up to ``slots`` requests a round; request (g, k) has ``length(g, k)`` tokens. Takes weights at the beginning of a round."""

    def __init__(self, slots, steps, length):
        self.slots, self.steps, self.length = slots, steps, length
        self.queue, self.running, self.pending = collections.deque(), {}, None
        self.version, self.statistics = 0, DriverStatistics()
        self.on_progress = self.on_weights = None
        self.rounds = []

    def submit(self, requests):
        self.queue.extend(requests)

    def cancel(self, keys):
        for key in keys:
            self.running.pop(key, None)
        self.queue = collections.deque(r for r in self.queue if r.key not in set(keys))

    def publish(self, update):
        self.pending = update

    @property
    def unfinished(self):
        return len(self.queue) + len(self.running)

    def run_once(self, wait_s):
        assert wait_s == 0.0, "a run in virtual time waits for nobody"
        if self.pending is not None:
            self.version, self.pending = self.pending.version, None
            self.on_weights(self.version)
        while self.queue and len(self.running) < self.slots:
            request = self.queue.popleft()
            self.running[request.key] = (request, [])
        new, finished, longest = [], [], 0
        for key, (request, versions) in list(self.running.items()):
            count = min(self.steps, self.length(*key) - len(versions))
            versions += [self.version] * count
            longest = max(longest, count)
            new.append((key, count))
            if len(versions) == self.length(*key):
                del self.running[key]
                n = len(versions)
                finished.append(Trajectory(*key, request.prompt_tokens, np.ones(n, np.int32), np.zeros(n, np.float32), np.asarray(versions, np.int32), False))
        self.statistics.slot_steps += self.slots * longest
        self.rounds.append(self.version)
        self.on_progress(Progress(self.version, tuple(new), tuple(finished)))
        return bool(new)


class CountingLearner:
    def __init__(self):
        self.params, self.version = {}, 0

    def build(self, batch):
        return batch

    def step(self, batch):
        assert batch.step == self.version
        self.version += 1
        return {"reward/mean": float(np.mean([t.reward for g in batch.groups for t in g.trajectories]))}


class Pusher:
    def push(self, params, version):
        return WeightUpdate(version, params)


def prompts():
    index = 0
    while True:
        yield Prompt(index, f"p{index}", "", np.ones(2, np.int32), str(index), {})
        index += 1


def result(accuracies, staleness=0.0, diverged=None):
    """What a cell found, with these held-out accuracies at steps 0, 10, 20, …"""
    evaluations = [{"step": 10 * i, "accuracy": a, "n": 10, "k": 1} for i, a in enumerate(accuracies)]
    names = (
        *("reward/mean", "staleness/mean", "staleness/max", "trajectory_spans/max", "clip_ratio/low", "clip_ratio/high", "entropy"),
        *("importance_weight/ess", "importance_weight/max"),
    )
    steps = [{"step": i + 1, "tick": i, **dict.fromkeys(names, staleness)} for i in range(4)]
    return {"evaluations": evaluations, "steps": steps, "staleness_tokens": {"0": 10}, "diverged": diverged}
