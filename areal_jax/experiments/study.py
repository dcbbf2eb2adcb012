"""What the staleness study is made of: its policy and settings, its cells, and the configuration of each.

Invariants:
* All cells of a seed start from one policy, that seed's warm-up, and train the same number of samples of the same stream of prompts.
* Cells differ in the keys of ``GRID`` alone; ``settings`` is everything else, and results of unlike settings are never put into one table.
"""

from __future__ import annotations

import dataclasses
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

from areal_jax.config import Config, ConfigError, base_config, fields, get, parse_value, put, unknown_key, validate
from areal_jax.experiments.task import DEMONSTRATIONS, MIX

FORMAT = 1
"""Of a cell's file; raised whenever the schedule, the task or what is measured changes."""

GRID = {"algorithm.loss": "losses", "rollout.max_staleness": "etas", "seed": "seeds"}
"""Keys in which cells differ, and the flags that say their values."""
PLACED = {
    "model.path": "the warm-up",
    "sft.path": "the warm-up",
    "cluster.host_devices": "one device a cell",
    "cluster.compilation_cache": "beside the warm-ups",
}
"""Keys that the study sets by itself, and to what."""
SHORT = {"steps": "trainer.steps", "learning-rate": "trainer.learning_rate", "minibatches": "trainer.minibatches"}
"""Flags that stand for a key."""
WARMUP_SECTIONS = ("model", "task", "sft")
"""What a warm-up depends on, beside the seed and ``rollout.max_new_tokens``."""


@dataclasses.dataclass(frozen=True, order=True)
class Cell:
    """One run of the grid."""

    loss: str
    eta: int
    seed: int

    @property
    def name(self) -> str:
        return f"{self.loss}-eta{self.eta}-seed{self.seed}"

    def __str__(self) -> str:
        return f"{self.loss}, η = {self.eta}, seed {self.seed}"


def study_config() -> Config:
    """A policy of 0.12M parameters on the short kinds of arithmetic; some two minutes a run on one core."""
    config = base_config()
    config.model.update(layers=2, hidden_size=64, heads=4, kv_heads=2, head_dim=16, mlp_size=192)
    config.task.train_problems = 4000
    config.sft.update(steps=2000, rows=16, row_tokens=96, checkpoint_every=300)
    config.rollout.update(group_size=8, max_new_tokens=64, slots=256, steps_per_dispatch=8)
    config.trainer.update(steps=150, groups_per_step=32, minibatches=2, micro_batch_rows=8, schedule="constant", warmup_steps=5)
    config.eval.update(every_steps=10, problems=320, samples=2, periodic_problems=200)
    config.cluster.host_devices = 1
    config.algorithm.allow_uncorrected_staleness = True  # what naive PPO loses by it is the question
    return config


def overridden(config: Config, overrides: Sequence[tuple[str, str]]) -> Config:
    """The configuration with keys set to values given as text.

    Raises:
      ConfigError: a key does not exist, has another type, or is the study's own to set.
    """
    known = dict(fields())
    for key, text in overrides:
        if key not in known:
            raise unknown_key(key)
        if key in GRID:
            raise ConfigError(f"'{key}' is what the study varies; name its values by '--{GRID[key]}', not by --config.{key}={text}")
        if key in PLACED:
            raise ConfigError(f"'{key}' is set by the study ({PLACED[key]}); leave --config.{key}={text} out")
        put(config, key, parse_value(key, known[key], text))
    return config


def cell_config(base: Config, cell: Cell, policy: pathlib.Path, compiled: pathlib.Path, *, planned: bool) -> Config:
    """The configuration of a cell.

    Args:
      base: from ``study_config``, overridden.
      cell: which.
      policy: directory of the warm-up's exported policy.
      compiled: JAX's persistent compilation cache.
      planned: the policy need not be there yet.

    Raises:
      ConfigError: the cell must not run with these settings.
    """
    config = base.copy_and_resolve_references()
    config.algorithm.loss, config.rollout.max_staleness, config.seed = cell.loss, cell.eta, cell.seed
    config.model.path, config.sft.steps = str(policy), 0
    config.cluster.compilation_cache = str(compiled)
    try:
        return validate(config, planned=planned)
    except ConfigError as error:
        raise ConfigError(f"the cell {cell}: {error}") from error


def warmup_config(base: Config, seed: int) -> Config:
    """The configuration of a seed's warm-up: only what it depends on, so that studies of other settings may share it."""
    config = base_config()
    for section in WARMUP_SECTIONS:
        config[section].update(base[section])
    config.rollout.max_new_tokens = base.rollout.max_new_tokens
    config.cluster.host_devices, config.seed = 1, seed
    return validate(config)


def settings(base: Config, train_ticks: int) -> dict[str, Any]:
    """All that the cells of a study have in common, JSON-able: it is written into each result, and compared."""
    own = {key: get(base, key) for key, _ in fields() if key not in GRID and key not in PLACED and not key.startswith(("telemetry.", "serve.", "checkpoint."))}
    plain = {key: list(value) if isinstance(value, tuple) else value for key, value in own.items()}
    mix = {f"task.mix.{kind}": list(shares) for kind, shares in MIX.items()}
    return {"format": FORMAT, "train_ticks": train_ticks, "demonstrations": DEMONSTRATIONS, **mix, **plain}


def difference(mine: Mapping[str, Any], theirs: Mapping[str, Any]) -> str:
    """The first setting that differs, in words; '' when none does."""
    for key in sorted(mine.keys() | theirs.keys()):
        if mine.get(key) != theirs.get(key):
            return f"'{key}' = {theirs.get(key)!r}, not {mine.get(key)!r}"
    return ""
