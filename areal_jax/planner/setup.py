"""What is planned: a checked configuration on a topology, as sizes. No device is touched, no file of a checkpoint is needed.

Invariants:
* Sizes come from the project's own tables: the parameter tree, its sharding rules, the train state's placement, the split of the devices.
* Trainer devices come first in the topology, and a mesh's last axes are neighbours, as in ``cluster.meshes``.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import os
from typing import Any

import jax
import numpy as np
from jax.sharding import AbstractMesh, AxisType

from areal_jax.config import Config, ConfigError, put
from areal_jax.config_devices import MESH_AXES, check_heads, check_pages, divide_devices, fewest_pages, mesh_sizes, row_capacity
from areal_jax.models.architecture import ModelConfig, adapted, new_model
from areal_jax.models.config_json import read_model
from areal_jax.models.files import PolicyFilesError
from areal_jax.models.policy import param_shapes
from areal_jax.models.sharding import named_shardings, param_specs
from areal_jax.models.tokenizer import embedded_tokenizer
from areal_jax.planner.topology import Topology
from areal_jax.trainer.step import Placement, TrainState, abstract, abstract_parts, make_optimizer, place

PROMPT = 64
"""Longest prompt where neither the configuration nor a task says it."""


@dataclasses.dataclass(frozen=True)
class Axes:
    """Sizes of a mesh's axes."""

    data: int = 1
    fsdp: int = 1
    context: int = 1
    tensor: int = 1

    @property
    def devices(self) -> int:
        return self.data * self.fsdp * self.context * self.tensor

    @property
    def shards(self) -> int:
        """Parts into which rows or slots are divided."""
        return self.data * self.fsdp

    def __str__(self) -> str:
        return " ".join(f"{name}={size}" for name, size in dataclasses.asdict(self).items() if size > 1) or "one device"

    def mesh(self) -> Any:
        """A mesh of these sizes without devices, for shapes and shardings."""
        sizes = dataclasses.asdict(self)
        return AbstractMesh(tuple(sizes[axis] for axis in MESH_AXES), MESH_AXES, axis_types=(AxisType.Auto,) * len(MESH_AXES))

    def stride(self, axis: str) -> int:
        """Distance between neighbours along an axis, in devices."""
        sizes = dataclasses.asdict(self)
        return math.prod(sizes[name] for name in MESH_AXES[MESH_AXES.index(axis) + 1 :])


@dataclasses.dataclass(frozen=True)
class Workload:
    """Mean tokens of a prompt and of a response, the one thing that a configuration does not say."""

    prompt: int
    response: int

    @property
    def sequence(self) -> int:
        return self.prompt + self.response


@dataclasses.dataclass(frozen=True)
class Setup:
    """One plan's subject.

    Attributes:
      config: checked; lengths settled, rows a multiple of the trainer's shards, slots of the sampler's replicas.
      model: the architecture.
      topology: the machines.
      trainer, sampler: axes of the meshes; the sampler's data axis counts replicas, each an engine with a cache of its own.
      workload: assumed lengths.
      notes: what was rounded to fit, for people.
    """

    config: Config
    model: ModelConfig
    topology: Topology
    trainer: Axes
    sampler: Axes
    workload: Workload
    notes: tuple[str, ...] = ()

    @property
    def rows(self) -> int:
        """Rows of a micro-batch on a trainer's shard."""
        return max(1, self.config.trainer.micro_batch_rows // self.trainer.shards)

    @property
    def slots(self) -> int:
        """Slots of a replica of the sampler."""
        return self.config.rollout.slots // self.sampler.data

    @property
    def replica(self) -> Axes:
        """Axes of one replica of the sampler."""
        return dataclasses.replace(self.sampler, data=1)

    @property
    def sequence_pages(self) -> int:
        """Pages of the longest sequence."""
        return self.pages_of(self.longest)

    @property
    def fewest_pages(self) -> int:
        """Of a cache with which an engine runs."""
        return fewest_pages(self.longest, self.config.rollout.page_size)

    @property
    def mean_pages(self) -> int:
        """Pages of a sequence of the mean length at its end."""
        return self.pages_of(self.workload.sequence)

    @property
    def pages(self) -> int:
        """Pages of a replica's cache, the scrap page included."""
        return self.config.rollout.kv_pages or self.slots * self.sequence_pages + 1

    @property
    def concurrent(self) -> int:
        """Sequences of the mean length that a replica decodes together: as many as have slots, and pages to their ends."""
        return min(self.slots, (self.pages - 1) // self.mean_pages)

    @property
    def longest(self) -> int:
        """Tokens of the longest sequence."""
        return self.config.task.max_prompt_tokens + self.config.rollout.max_new_tokens

    def pages_of(self, tokens: int) -> int:
        """Pages that so many tokens of a sequence need."""
        return -(-tokens // self.config.rollout.page_size)

    @property
    def local_tokens(self) -> int:
        """Positions of a micro-batch on a trainer's device."""
        return self.rows * self.config.trainer.micro_batch_tokens // self.trainer.context


def planned_model(config: Config) -> ModelConfig:
    """The architecture: the checkpoint's where it is here, else that of the configuration's ``model`` section.

    Raises:
      ConfigError: the checkpoint's files are broken, or there is none and the section does not say the vocabulary.
    """
    path = config.model.path
    if path and os.path.isdir(path):
        try:
            return adapted(read_model(path, config.model.dtype), config.model)
        except PolicyFilesError as error:
            raise ConfigError(f"'model.path': {error}") from None
    if path and os.path.exists(path):
        raise ConfigError(f"'model.path' must be a directory with config.json; '{path}' is a file; name its directory, or one that is not here")
    vocabulary = config.model.vocab_size
    if not vocabulary:
        if path:
            raise ConfigError(
                f"'model.vocab_size' must be given, as the checkpoint '{path}' is not here; got 0; set it and the other sizes of its config.json "
                "(model.layers, model.hidden_size, …), or fetch that file"
            )
        vocabulary = embedded_tokenizer().vocab_size
    return new_model(config.model, vocabulary, (1,), 0)


def make_setup(config: Config, topology: Topology, prompt: int | None = None, response: int | None = None, *, free: bool = False) -> Setup:
    """The subject of a plan.

    Args:
      config: validated with ``planned=True``.
      topology: the machines.
      prompt, response: mean tokens; None assumes a quarter of their limits.
      free: leave the configured meshes out, for a search over all of them.

    Raises:
      ConfigError: the devices cannot be divided as the configuration says, or a mesh does not divide the policy.
    """
    config = config.copy_and_resolve_references()
    model = planned_model(config)
    if not config.task.max_prompt_tokens:
        put(config, "task.max_prompt_tokens", PROMPT)
    longest = config.task.max_prompt_tokens + config.rollout.max_new_tokens
    put(config, "trainer.micro_batch_tokens", row_capacity(config, longest))
    workload = Workload(prompt or max(1, config.task.max_prompt_tokens // 4), response or max(1, config.rollout.max_new_tokens // 4))
    if workload.sequence > longest:
        raise ConfigError(f"'--prompt' + '--response' must be at most the longest sequence = {longest}; got {workload.sequence}")
    sampler, trainer, _ = divide_devices(config, topology.devices)
    if free:
        for role in ("trainer", "sampler"):
            put(config, f"cluster.mesh.{role}", "")
    check_heads(config, model.heads, "the policy's heads")
    axes = {role: Axes(**mesh_sizes(config, role, count)) for role, count in (("trainer", trainer), ("sampler", sampler))}
    settled = with_meshes(Setup(config, model, topology, axes["trainer"], axes["sampler"], workload))
    check_pages(config, longest)
    return dataclasses.replace(settled, notes=(*settled.notes, *machine_notes(config, model, topology)))


def machine_notes(config: Config, model: ModelConfig, topology: Topology) -> list[str]:
    """What a reader must know of the machines and of the plan's reach."""
    notes = []
    if topology.hosts > 1:
        notes.append(f"this version drives the devices of one host; on {topology.hosts} hosts this is a plan only, and launch/train.py does not run there yet")
    if not topology.listed:
        shapes = ", ".join("x".join(map(str, sides)) for sides in topology.chip.slices)
        notes.append(f"{topology.name} is no slice that can be rented as such; those of {topology.chip.name} are {shapes}")
    if model.experts:
        notes.append("a mixture compiled on the CPU computes every expert for every token (dense ragged_dot): its compiled memory overstates the run's")
    return notes


def with_meshes(setup: Setup, trainer: Axes | None = None, sampler: Axes | None = None, slots: int | None = None, pages: int | None = None) -> Setup:
    """The setup with other meshes of as many devices, other slots and other pages a replica.

    Rows and slots are raised to multiples of the trainer's shards and the sampler's replicas, with a note.
    """
    trainer, sampler = trainer or setup.trainer, sampler or setup.sampler
    config = setup.config.copy_and_resolve_references()
    notes = []
    parts = (("micro_batch_rows", config.trainer, trainer.shards, "shards"), ("slots", config.rollout, sampler.data, "replicas"))
    for key, section, count, what in parts:
        wanted = (slots if key == "slots" and slots else section[key]) or count
        settled = -(-wanted // count) * count
        if settled != wanted:
            notes.append(f"{key} {wanted} raised to {settled}, a multiple of {count} {what}")
        section[key] = settled
    if pages is not None:
        config.rollout.kv_pages = pages
    return dataclasses.replace(setup, config=config, trainer=trainer, sampler=sampler, notes=tuple(notes))


@functools.cache
def _shapes(model: ModelConfig) -> Any:
    return param_shapes(model)


def shard_bytes(tree: Any, dtype: Any = None) -> int:
    """Bytes of a tree of ``jax.ShapeDtypeStruct`` with shardings on one device; ``dtype`` replaces the leaves' own."""
    return sum(math.prod(leaf.sharding.shard_shape(leaf.shape)) * np.dtype(dtype or leaf.dtype).itemsize for leaf in jax.tree.leaves(tree))


def sharded_params(model: ModelConfig, mesh: Any) -> Any:
    """The parameter tree as shapes with their shardings on a mesh (real or abstract)."""
    shapes = _shapes(model)
    return abstract(shapes, named_shardings(mesh, param_specs(model), shapes))


def train_state(setup: Setup, mesh: Any) -> tuple[Placement, Any, TrainState, Any]:
    """(placement, optimizer, state, frozen parameters) of the trainer, as shapes with shardings on a mesh (real or abstract)."""
    optimizer, dtype = make_optimizer(setup.config.trainer), setup.config.model.param_dtype
    here = place(setup.model, mesh, optimizer, dtype)
    state, frozen = abstract_parts(setup.model, optimizer, dtype)
    return here, optimizer, abstract(state, here.state), abstract(frozen, here.frozen)
