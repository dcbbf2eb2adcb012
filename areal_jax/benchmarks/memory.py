"""How many sequences the same KV memory holds, by pages and by dense slots of the longest length."""

from __future__ import annotations

from typing import Any

from areal_jax.benchmarks.generation import Subject, run_requests
from areal_jax.benchmarks.loads import Load
from areal_jax.config import ConfigError
from areal_jax.sampler.driver import Progress


def concurrency(subject: Subject, load: Load) -> dict[str, Any]:
    """Sequences decoded together while requests wait, under a budget of pages.

    The budget is that of an eighth of the slots, dense, each of the load's longest sequence; the pages of the budget serve up to all slots.

    Args:
      subject: its sampler; ``slots`` bounds what pages can hold.
      load: more requests than the pages hold at once.
    """
    dense_slots = max(2, subject.slots // 8)
    pages = dense_slots * load.longest // subject.page_size
    engine = subject.other_engine(max_length=load.longest, pages=pages + 1)  # and the page that nobody holds
    together: list[int] = []

    def look(progress: Progress) -> None:
        if driver.schedule.queue:
            together.append(len(progress.new_tokens))

    driver = subject.driver(engine, on_progress=look)
    seconds = run_requests(driver, load.requests())
    if not together:
        raise ConfigError(f"requests must wait for pages, so there must be more of them than {max(2, subject.slots // 8)} dense slots; raise '--requests'")
    mean = sum(together) / len(together)
    return {
        "budget_positions": pages * subject.page_size,
        "dense_sequences": pages * subject.page_size / load.longest,
        "paged_sequences_mean": mean,
        "paged_sequences_peak": max(together),
        "paged_over_dense": mean * load.longest / (pages * subject.page_size),
        "preemptions": driver.statistics.preemptions,
        "sampled_tokens_per_s": load.tokens / seconds,
    }
