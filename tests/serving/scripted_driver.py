"""A driver with the sampler's interface whose answers are written down: for tests of everything around it."""

import collections
import hashlib
import threading
import time

import numpy as np

from areal_jax.sampler.driver import Progress
from areal_jax.types import NewTokens, Trajectory

END, TOP, VOCABULARY = 1, 20, 263


def letters(request, tokenizer):
    """Answer of a sampled request: letters that its random stream names; of a greedy one (temperature 0): those that its prompt names."""
    sampling = request.sampling
    name = request.prompt_tokens.tolist() if sampling and sampling.temperature == 0 else (request.stream or request.key)
    text, count = "", 0
    while len(text) < 60:
        text += hashlib.blake2b(f"{name}/{count}".encode()).hexdigest()
        count += 1
    return [*tokenizer.encode(text[:60]).tolist(), END]


class ScriptedDriver:
    """Gives ``answer(request, tokenizer)`` in dispatches of ``steps`` tokens a slot; ``held`` stops it between dispatches, ``failure`` makes it raise."""

    def __init__(self, on_progress, tokenizer, slots=4, steps=3, answer=letters, pause_s=0.0005):
        self.on_progress, self.tokenizer, self.steps, self.answer, self.pause_s = on_progress, tokenizer, steps, answer, pause_s
        self.lock = threading.Condition()
        self.queue, self.slots = collections.deque(), [None] * slots
        self.held, self.failure, self.most_live = False, None, 0
        self.submitted = []

    @property
    def unfinished(self):
        with self.lock:
            return len(self.queue) + sum(slot is not None for slot in self.slots)

    def submit(self, requests):
        requests = list(requests)
        for request in requests:
            if request.prompt_tokens[0] == 7:
                raise ValueError("a prompt that begins with token 7 is refused")
        with self.lock:
            self.queue.extend(requests)
            self.submitted += requests
            self.lock.notify_all()

    def cancel(self, keys):
        gone = set(keys)
        with self.lock:
            self.queue = collections.deque(r for r in self.queue if r.key not in gone)
            self.slots = [None if slot and slot[0].key in gone else slot for slot in self.slots]

    def run_once(self, wait_s=0.05):
        if self.failure:
            raise self.failure
        with self.lock:
            for i, slot in enumerate(self.slots):
                if slot is None and self.queue:
                    request = self.queue.popleft()
                    self.slots[i] = [request, self.answer(request, self.tokenizer)[: request.max_new_tokens], 0]
            live = [i for i, slot in enumerate(self.slots) if slot]
            if self.held or not live:
                self.lock.wait(wait_s)
                return False
            self.most_live = max(self.most_live, len(live))
            made, finished = [], []
            for i in live:
                request, answer, done = self.slots[i]
                tokens = np.asarray(answer[done : done + self.steps], np.int32)
                self.slots[i][2] += len(tokens)
                tops = np.stack([(token + np.arange(TOP)) % VOCABULARY for token in tokens]).astype(np.int32)
                values = np.broadcast_to(-0.25 - np.arange(TOP, dtype=np.float32), tops.shape)
                made.append(NewTokens(request.key, tokens, np.zeros(len(tokens), np.float32), values[:, 0], tops, values))
                if self.slots[i][2] == len(answer):
                    self.slots[i] = None
                    whole = np.asarray(answer, np.int32)
                    finished.append(Trajectory(*request.key, request.prompt_tokens, whole, np.zeros(len(whole), np.float32), whole * 0, answer[-1] != END))
            self.on_progress(Progress(0, tuple((new.key, len(new.tokens)) for new in made), tuple(finished), tuple(made)))
        time.sleep(self.pause_s)
        return True

    def close(self, timeout_s):
        pass
