"""The scheduler's invariants under the driver, over runs that hypothesis invents, on an engine whose pages are on the host."""

import collections
import dataclasses
import types

import host_engine
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from areal_jax.sampler.driver import RolloutDriver
from areal_jax.sampler.pages import PagePool
from areal_jax.sampler.sequences import WAITS
from areal_jax.types import GenerationRequest, WeightUpdate

LENGTH = 20


class World:
    """A driver on a host engine, whose scheduler is watched at every call.

    Args:
      plan: attributes of the run, as ``plans`` draws them.
    """

    def __init__(self, plan):
        self.plan = plan
        self.requests, self.finished, self.told, self.cancelled, self.version = {}, {}, collections.defaultdict(list), set(), 0
        self.ends, self.texts, self.admitted = {}, {}, {}
        self.engine = host_engine.HostEngine(
            slots=plan.slots,
            max_length=LENGTH,
            page_size=plan.page_size,
            pages=plan.pages,
            blocks=plan.blocks,
            width=plan.width,
            steps=plan.steps,
            ends=self.ends,
            texts=self.texts,
            admitted=self.admitted,
        )
        self.driver = RolloutDriver(
            self.engine,
            WeightUpdate(0, 0),
            seed=0,
            interruptible=plan.interruptible,
            kv_on_update=plan.kv_on_update,
            share_prompts=plan.share,
            on_progress=self.on_progress,
            on_weights=self.on_weights,
        )
        self.schedule = self.driver.schedule
        self.schedule.admit, self.admit = self.watched_admit, self.schedule.admit
        self.schedule.pieces, self.pieces = self.watched_pieces, self.schedule.pieces
        self.schedule.grow, self.grow = self.watched_grow, self.schedule.grow
        self.schedule.copies, self.copies = self.watched_copies, self.schedule.copies
        self.engine.writes = lambda key, pages: self.only_owner(self.schedule.running.get(key), pages)

    # What the driver tells.

    def on_progress(self, progress):
        for new in progress.tokens:
            self.told[new.key] += new.tokens.tolist()
        for trajectory in progress.finished:
            key = trajectory.group_id, trajectory.sample_index
            assert key not in self.finished and key not in self.cancelled, f"{key} ended twice, or after it was cancelled"
            self.finished[key] = trajectory

    def on_weights(self, version):
        assert version > self.version
        self.version = version
        if self.plan.kv_on_update == "recompute":
            for key in self.admitted:
                self.admitted[key] = version

    # What the scheduler is watched for.

    def owners(self, page):
        """The sequences and prompts in whose tables a page is."""
        return [x for x in (*self.schedule.running.values(), *self.schedule._prompts) if page in x.pages]

    def only_owner(self, sequence, pages):
        """A page that a sequence writes is in no other's table (and in its own, unless it was cancelled a moment ago)."""
        for page in pages:
            assert all(owner is sequence for owner in self.owners(page)), f"page {page} is written by a sequence and held by another"

    def watched_admit(self, begin):
        before = list(self.schedule.queue)
        idle = not self.schedule.running
        running, preempted = set(self.schedule.running), set(self.schedule.preempted)
        self.admit(begin)
        new = [key for key in self.schedule.running if key not in running]
        assert [r.key for r in before] == new + [r.key for r in self.schedule.queue], "admission must be first come first served"
        assert new or not before or not idle or not begin, "with nothing running the first one fits"
        assert begin or preempted.issuperset(new), "nobody begins while an update waits"
        orders = [s.order for s in self.schedule.running.values()]
        assert sorted(orders) == orders
        self.admitted |= dict.fromkeys(new, self.driver.version)

    def watched_pieces(self, most, width):
        waiting = [s for s in self.schedule.running.values() if s.filled == WAITS]
        found = self.pieces(most, width)
        assert len(found) <= most
        for piece in found:
            (owner,) = [x for x in (*self.schedule.running.values(), *self.schedule._prompts) if tuple(x.pages) == piece.pages]
            assert 0 < len(piece.tokens) <= width
            size = self.plan.page_size
            pages = {piece.pages[p // size] for p in range(piece.start, piece.start + len(piece.tokens))}
            if owner in self.schedule._prompts:
                users = [x for page in pages for x in self.owners(page) if x is not owner]
                assert all(x in waiting and x.prompt is owner for x in users), "a shared page is written while one of its users does not wait for it"
            else:
                self.only_owner(owner, pages)
        return found

    def watched_copies(self):
        pairs = self.copies()
        for _, page in pairs:
            assert len(self.owners(page)) == 1, "a copy goes to a page of one sequence"
        return pairs

    def watched_grow(self, tokens, preempt):
        queue, running = list(self.schedule.queue), sorted(self.schedule.running.values(), key=lambda s: s.order)
        enough = self.grow(tokens, preempt)
        preempted = [s for s in running if s.gone]
        assert preempt or not preempted
        assert preempted == running[len(running) - len(preempted) :], "the youngest are preempted"
        assert not running or not running[0].gone, "the oldest is never preempted"
        assert [r.key for r in self.schedule.queue] == [s.request.key for s in preempted] + [r.key for r in queue], "preempted ones come next, in their order"
        if enough:
            for s in self.schedule.decoding():
                assert len(s.pages) * self.plan.page_size >= min(s.length + tokens, s.longest) - 1
        return enough

    def check(self):
        """What holds between any two rounds."""
        schedule = self.schedule
        tables = [x.pages for x in (*schedule.running.values(), *schedule._prompts)]
        holders = collections.Counter(page for table in tables for page in table)
        assert all(len(set(table)) == len(table) for table in tables)
        wanted = np.zeros(self.engine.pages, np.int64)
        wanted[list(holders)] = list(holders.values())
        np.testing.assert_array_equal(schedule.pool._holders, wanted)
        assert sorted(schedule.pool._free) == [page for page in range(1, self.engine.pages) if not wanted[page]]
        assert schedule.pool.free + schedule.pool.held == self.engine.pages - 1 and not wanted[0]
        slots = [s.slot for s in schedule.running.values()]
        assert sorted(slots + schedule._free_slots) == list(range(self.plan.slots))
        assert {r.key for r in list(schedule.queue)[: len(schedule.preempted)]} == schedule.preempted
        assert schedule._queued == collections.Counter(r.group_id for r in schedule.queue)
        users = collections.Counter(id(s.prompt) for s in schedule.running.values() if s.prompt is not None)
        assert all(prompt.users == users[id(prompt)] for prompt in schedule._prompts)
        for s in schedule.running.values():
            if s.prompt is not None:
                assert s.prompt in schedule._prompts and s.pages[: s.prompt.whole] == s.prompt.pages[: s.prompt.whole]

    # What happens to it.

    def unfinished(self):
        return [key for key in self.requests if key not in self.finished and key not in self.cancelled]

    def submit(self, group):
        requests = [GenerationRequest(group.number, i, group.prompt, limit) for i, (limit, _) in enumerate(group.samples)]
        for request, (_, end) in zip(requests, group.samples, strict=True):
            self.requests[request.key], self.ends[request.key], self.texts[request.key] = request, end, group.prompt.tolist()
        self.driver.submit(requests)

    def cancel(self, choice):
        """Cancels the request that a number names, if there is one."""
        keys = self.unfinished()
        if keys:
            key = keys[choice % len(keys)]
            self.cancelled.add(key)
            self.driver.cancel([key])

    def move(self, choice):
        """Takes a request out and submits it again with what it has."""
        keys = self.unfinished()
        if keys:
            key = keys[choice % len(keys)]
            tokens, logprobs, versions = self.driver.partials()[key]
            self.driver.cancel([key])
            self.driver.submit([dataclasses.replace(self.requests[key], tokens=tokens, behaviour_logprobs=logprobs, versions=versions)])

    def publish(self):
        newest = (self.driver._pending or self.driver._current).version
        self.driver.publish(WeightUpdate(newest + 1, newest + 1))

    def race(self, choice):
        """Cancels a request while the next program is being enqueued."""

        def now():
            self.engine.before = lambda: None
            self.cancel(choice)

        self.engine.before = now

    def go(self):
        groups = list(self.plan.groups)
        for name, number in self.plan.actions:
            if name == "submit":
                if groups:
                    self.submit(groups.pop(0))
            else:
                getattr(self, name)(*([] if name == "publish" else [number]))
            for _ in range(number % 3):
                self.driver.run_once(0.0)
                self.check()
        for group in groups:
            self.submit(group)
        rounds = 0
        while self.driver.unfinished:
            self.driver.run_once(0.0)
            self.check()
            rounds += 1
            assert rounds < 3000, "it does not come to an end"
        self.driver.run_once(0.0)  # fetches what is on its way for nobody
        self.check()
        assert self.schedule.pool.held == 0 and not self.schedule._prompts and not self.schedule._copies
        assert self.finished.keys() == self.requests.keys() - self.cancelled
        for key, trajectory in self.finished.items():
            request, end = self.requests[key], self.ends[key]
            assert len(trajectory.tokens) == min(end, request.max_new_tokens) and trajectory.truncated == (end > request.max_new_tokens)
            wanted = [host_engine.token_of(key, t, int(v), end) for t, v in enumerate(trajectory.versions)]
            assert trajectory.tokens.tolist() == wanted == self.told[key], "each token is told once, and is the one of the version it is stamped with"
            assert trajectory.behaviour_logprobs.tolist() == [host_engine.logprob_of(key, t, int(v)) for t, v in enumerate(trajectory.versions)]
            assert np.all(np.diff(trajectory.versions) >= 0)
            assert self.plan.interruptible or len(set(trajectory.versions.tolist())) == 1 or "move" in {name for name, _ in self.plan.actions}


@st.composite
def plans(draw, actions=("submit", "cancel", "move", "publish", "race")):
    page_size = draw(st.integers(1, 5))
    least = -(-LENGTH // page_size) + 2

    def group(number):
        prompt = np.array(draw(st.lists(st.integers(1, 3), min_size=1, max_size=11)), np.int32)
        longest = LENGTH - len(prompt)
        samples = draw(st.lists(st.tuples(st.integers(1, longest), st.integers(1, longest + 3)), min_size=1, max_size=4))
        return types.SimpleNamespace(number=number, prompt=prompt, samples=samples)

    return types.SimpleNamespace(
        slots=draw(st.integers(1, 5)),
        page_size=page_size,
        pages=least + draw(st.integers(0, 2 * least)),
        blocks=draw(st.integers(1, 4)),
        width=3,
        steps=draw(st.integers(1, 4)),
        share=draw(st.booleans()),
        interruptible=draw(st.sampled_from([True, True, True, False])),
        kv_on_update=draw(st.sampled_from(["recompute", "recompute", "keep"])),
        groups=[group(number) for number in range(draw(st.integers(1, 5)))],
        actions=draw(st.lists(st.tuples(st.sampled_from(actions), st.integers(0, 11)), max_size=14)),
    )


relaxed = {"deadline": None, "suppress_health_check": list(HealthCheck), "derandomize": True}


@settings(max_examples=400, **relaxed)
@given(plans())
def test_every_request_ends_with_its_tokens_whatever_happens_around_it(plan):
    World(plan).go()


@settings(max_examples=100, **relaxed)
@given(plans(actions=("submit", "publish")), st.integers(0, 1))
def test_with_hardly_more_pages_than_one_sequence_needs(plan, more):
    plan.pages, plan.slots, plan.interruptible = -(-LENGTH // plan.page_size) + 2 + more, 5, True
    World(plan).go()


def fixed(**changes):
    groups = [types.SimpleNamespace(number=g, prompt=np.arange(1, 8, dtype=np.int32), samples=[(13, 20)] * 3) for g in range(4)]
    plan = {"slots": 4, "page_size": 2, "pages": 14, "blocks": 2, "width": 3, "steps": 3, "share": True, "interruptible": True, "kv_on_update": "recompute"}
    return types.SimpleNamespace(**plan | {"groups": groups, "actions": [("submit", 2)] * 4 + [("publish", 1)] * 3} | changes)


@pytest.mark.parametrize("share", [True, False])
@pytest.mark.parametrize("kv_on_update", ["recompute", "keep"])
def test_preemption_is_constant_in_a_small_pool(share, kv_on_update):
    world = World(fixed(share=share, kv_on_update=kv_on_update))
    world.go()
    assert world.driver.statistics.preemptions >= 8 and world.driver.statistics.updates == 3


def test_preempted_requests_too_are_finished_before_an_update_that_interrupts_nobody():
    world = World(fixed(interruptible=False))
    world.go()
    assert world.driver.statistics.preemptions >= 8 and world.driver.statistics.interrupts == 0
    assert {int(v) for t in world.finished.values() for v in t.versions} > {0}


def test_a_shared_prompt_is_computed_once_and_held_once():
    """Three samples of 7 prompt tokens: 6 tokens and 3 pages once, then a page each; without sharing 18 tokens."""
    for share, computed, held in ((True, 6, 3 + 3), (False, 18, 3 * 4)):
        world = World(fixed(share=share, pages=40, steps=1, blocks=8, groups=fixed().groups[:1], actions=[]))
        world.submit(world.plan.groups[0])
        world.driver.run_once(0.0)
        assert world.driver.statistics.prefill_tokens == computed
        assert world.schedule.pool.held == held
        world.plan.groups = []
        world.go()


def test_a_prompts_last_page_is_kept_for_samples_that_wait_for_a_slot():
    """6 tokens in pages of 4: the second page is copied for each of three samples, one after another, and computed once."""
    world = World(fixed(page_size=4, slots=1, pages=40, groups=fixed().groups[:1], actions=[]))
    world.go()
    assert world.driver.statistics.prefill_tokens == 6


def test_a_pool_gives_a_page_to_one_holder_and_takes_it_back_from_the_last():
    pool = PagePool(5)
    pages = pool.take(3)
    assert sorted(pages + pool.take(1)) == [1, 2, 3, 4] and pool.free == 0
    pool.share(pages[:1])
    pool.release(pages)
    assert (pool.free, pool.held) == (2, 2)
    with pytest.raises(ValueError, match="3 pages are asked for and 2 are free"):
        pool.take(3)
    with pytest.raises(ValueError, match=f"page {pages[1]} is free already"):
        pool.release(pages[1:2])
    with pytest.raises(ValueError, match=f"page {pages[1]} is free and cannot be shared"):
        pool.share(pages[1:2])
    pool.release(pages[:1])
    assert pool.free == 3
