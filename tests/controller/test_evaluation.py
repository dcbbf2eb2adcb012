"""Evaluation with a stand-in for the sampler: one version, every sample checked, its own thread."""

import threading
import types

import numpy as np
import pytest

from areal_jax.controller.evaluation import EVALUATION, Evaluator
from areal_jax.types import Prompt, Trajectory, WeightUpdate

PROMPTS = [Prompt(i, f"h{i}", "", np.ones(2, np.int32), str(i), {"kind": "even" if i % 2 == 0 else "odd"}) for i in range(6)]


class World:
    """Problem i's samples are right when ``right(i, k)``; ``gate`` holds generation back until it is set."""

    def __init__(self, right=lambda i, k: i < 3, samples=1, failing=(), silent=(), deadline_s=5.0, stop=lambda: False, gate=None):
        self.right, self.failing, self.silent, self.gate = right, set(failing), set(silent), gate
        self.rows, self.versions = [], []
        self.evaluator = Evaluator(
            self._sampler,
            PROMPTS,
            lambda tokens: "text",
            self,
            samples=samples,
            max_new_tokens=8,
            on_row=self.rows.append,
            trainer_version=lambda: 7,
            deadline_s=deadline_s,
            stop_requested=stop,
            trace=lambda *arguments, **more: None,
        )

    def _sampler(self, update, on_progress):
        self.versions.append(update.version)
        return types.SimpleNamespace(
            submit=lambda requests: self.__dict__.update(requests=list(requests)), run_until_done=lambda *a: self._generate(on_progress)
        )

    def _generate(self, on_progress):
        if self.gate is not None:
            assert self.gate.wait(5.0)
        tokens = np.ones(4, np.int32)
        drawn = [Trajectory(r.group_id, r.sample_index, r.prompt_tokens, tokens, np.zeros(4), np.zeros(4), r.group_id == 5) for r in self.requests]
        on_progress(types.SimpleNamespace(finished=drawn))

    def submit(self, key, response, answer, metadata):
        _, _, i, k = key
        assert key[0] == EVALUATION and answer == str(i)
        if i not in self.silent:
            failure = "error" if i in self.failing else None
            self.evaluator.on_result(types.SimpleNamespace(key=key, failure=failure, reward=None if failure else float(self.right(i, k))))


def test_row():
    world = World()
    row = world.evaluator.evaluate(WeightUpdate(4, {}), 6)
    assert world.rows == [row] and world.versions == [4]
    assert row["eval/accuracy"] == 0.5 and row["eval/n"] == 6 and row["eval/version"] == row["step"] == 4 and row["eval/lag_steps"] == 3
    assert row["eval/accuracy/even"] == pytest.approx(2 / 3) and row["eval/accuracy/odd"] == pytest.approx(1 / 3)
    assert row["eval/truncated_ratio"] == pytest.approx(1 / 6) and row["eval/response_length"] == 4
    assert row["eval/confidence95"] == pytest.approx(1.96 * np.std([1, 1, 1, 0, 0, 0], ddof=1) / np.sqrt(6))


def test_samples_of_a_problem_are_averaged_before_the_interval():
    row = World(right=lambda i, k: k == 0, samples=2).evaluator.evaluate(WeightUpdate(0, {}), 6)
    assert row["eval/accuracy"] == 0.5 and row["eval/confidence95"] == 0.0 and row["eval/k"] == 2


def test_failed_check_counts_as_wrong():
    assert World(failing=[0, 4]).evaluator.evaluate(WeightUpdate(0, {}), 6)["eval/accuracy"] == pytest.approx(2 / 6)


def test_unanswered_check_passes_the_deadline():
    with pytest.raises(TimeoutError, match=r"version 2: 1 of 6 answers unchecked after 0\.2 s"):
        World(silent=[1], deadline_s=0.2).evaluator.evaluate(WeightUpdate(2, {}), 6)


def test_left_out_while_one_runs():
    world = World(gate=threading.Event())
    assert world.evaluator.start(WeightUpdate(1, {}), 2) is True
    assert world.evaluator.start(WeightUpdate(2, {}), 2) is False and world.evaluator.left_out == 1
    with pytest.raises(TimeoutError, match="did not end within"):
        world.evaluator.finish(0.05)
    world.gate.set()
    world.evaluator.finish(5.0)
    assert [row["eval/version"] for row in world.rows] == [1]
    assert world.evaluator.start(WeightUpdate(3, {}), 2) is True
    world.evaluator.finish(5.0)
    assert [row["eval/version"] for row in world.rows] == [1, 3]


def test_failure_in_the_background_is_raised_by_finish():
    world = World(silent=[0], deadline_s=0.1)
    world.evaluator.start(WeightUpdate(1, {}), 2)
    with pytest.raises(TimeoutError, match="unchecked"):
        world.evaluator.finish(5.0)


def test_stop_request_gives_it_up():
    world = World(stop=lambda: True)
    assert world.evaluator.evaluate(WeightUpdate(1, {}), 6) is None and not world.rows
