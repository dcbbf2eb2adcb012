"""The trajectory stream under Grain's own transforms."""

from __future__ import annotations

import json

import grain
import numpy as np
import pytest

from areal_jax.data.stream import TrajectoryStream
from areal_jax.types import Prompt, TrainingBatch, Trajectory, TrajectoryGroup


def batch(step: int, tokens: tuple[int, ...] = (1, 2, 3)) -> TrainingBatch:
    ids = np.array(tokens, np.int32)
    trajectory = Trajectory(step, 0, np.array([9], np.int32), ids, np.zeros(len(ids), np.float32), np.full(len(ids), step, np.int32), False, 1.0)
    return TrainingBatch(step, (TrajectoryGroup(Prompt(step, "p", "q", np.array([9], np.int32), "1"), step, (trajectory,)),), 0)


class Source:
    def __init__(self, steps: int, start: int = 0):
        self.steps, self.next = steps, start

    def __call__(self) -> TrainingBatch | None:
        if self.next == self.steps:
            return None
        self.next += 1
        return batch(self.next - 1)


def test_batches_come_in_order_and_end():
    iterator = iter(TrajectoryStream(Source(3)))
    assert [b.step for b in iterator] == [0, 1, 2]
    with pytest.raises(StopIteration):
        next(iterator)


def test_nothing_is_fetched_before_it_is_asked_for():
    source = Source(5)
    iterator = iter(TrajectoryStream(source).map(lambda b: b.step))
    assert source.next == 0
    assert next(iterator) == 0 and source.next == 1
    assert next(iterator) == 1 and source.next == 2


def test_grain_transforms_apply():
    class Lengths(grain.transforms.Map):
        def map(self, element: TrainingBatch) -> np.ndarray:
            return np.array([g.tokens for g in element.groups])

    stream = TrajectoryStream(Source(5)).filter(lambda b: b.step != 1).apply(Lengths()).batch(2)
    assert [b.tolist() for b in stream] == [[[3], [3]], [[3], [3]]]


def test_the_state_continues_at_the_trainers_step():
    iterator = iter(TrajectoryStream(Source(4)).map(lambda b: b))
    next(iterator), next(iterator)
    state = json.loads(json.dumps(iterator.get_state()))
    assert state == {"step": 2}
    resumed = iter(TrajectoryStream(Source(4, start=2)).map(lambda b: b))
    resumed.set_state(state)
    assert [b.step for b in resumed] == [2, 3]
    assert resumed.get_state() == {"step": 4}


def test_a_lost_or_doubled_batch_is_refused():
    with pytest.raises(ValueError, match="step 0 but got the batch of step 2"):
        next(iter(TrajectoryStream(Source(4, start=2))))


def test_a_failing_fetch_reaches_the_reader_and_the_stream_can_go_on():
    answers = iter([batch(0), TimeoutError("waiting for 1 due groups"), batch(1), None])

    def fetch() -> TrainingBatch | None:
        answer = next(answers)
        if isinstance(answer, Exception):
            raise answer
        return answer

    iterator = iter(TrajectoryStream(fetch).map(lambda b: b.step))
    assert next(iterator) == 0
    with pytest.raises(TimeoutError, match="due groups"):
        next(iterator)
    assert list(iterator) == [1]


def test_token_ids_travel_and_not_text():
    """Ids that no decode-encode round trip would keep arrive as they were generated."""
    odd = (255, 254, 255, 0, 7)
    delivered = next(iter(TrajectoryStream(lambda: batch(0, odd)).map(lambda b: b)))
    assert delivered.groups[0].trajectories[0].tokens.tolist() == list(odd)
