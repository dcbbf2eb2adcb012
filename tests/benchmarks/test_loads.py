"""The work given to generators: exact counts, quantiles, repeatable."""

import numpy as np
import pytest

from areal_jax.benchmarks.loads import SPREAD, draw_lengths, make_load
from areal_jax.config import ConfigError


def test_long_tailed_lengths_are_the_quantiles_of_the_cut_log_normal():
    lengths = draw_lengths("longtail:32:256", 256, np.random.default_rng(3))
    assert np.median(lengths) == 32 and max(lengths) == 256 and min(lengths) >= 1 and len(lengths) == 256
    logs = np.log(lengths)
    assert logs.mean() == pytest.approx(np.log(32), abs=0.02) and logs.std() == pytest.approx(SPREAD, rel=0.05)
    assert list(lengths) != sorted(lengths), "in a random order"


def test_a_load_is_a_function_of_its_arguments():
    loads = [make_load(100, 12, "longtail:8:20", (3, 9), group=4, seed=seed) for seed in (1, 1, 2)]
    assert loads[0].lengths == loads[1].lengths and all(map(np.array_equal, loads[0].prompts, loads[1].prompts))
    assert loads[0].lengths != loads[2].lengths
    assert loads[0].groups == (0,) * 4 + (1,) * 4 + (2,) * 4
    assert all(3 <= len(p) <= 9 and p.min() >= 2 and p.max() < 100 for p in loads[0].prompts)
    keys = [request.key for request in loads[0].requests()]
    assert keys == [(g, s) for g in range(3) for s in range(4)]
    assert loads[0].longest == max(len(p) + n for p, n in zip(loads[0].prompts, loads[0].lengths, strict=True))
    short = loads[0].shortened(4)
    assert short.lengths == tuple(max(1, n // 4) for n in loads[0].lengths) and short.prompts is loads[0].prompts


@pytest.mark.parametrize("text", ["longtail:32", "fixed", "fixed:0", "longtail:40:30", "uniform:1:2", "fixed:x"])
def test_lengths_that_are_not_understood(text):
    with pytest.raises(ConfigError, match="lengths"):
        draw_lengths(text, 4, np.random.default_rng(0))
