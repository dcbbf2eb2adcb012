"""Supervised learning of packed examples: the warm-up's demonstrations, conversations, or preference pairs.

Invariants:
* A step's gradient is that of the objective's mean over all its rows (over trained tokens, or over pairs), however rows are packed, divided into
  micro-batches or over devices.
* One program a step, compiled once; micro-batches run one after the other inside it, and the state's buffers are reused.
* An evaluation counts each held-out token (or pair) once.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from areal_jax.models.adapters import join
from areal_jax.models.architecture import ModelConfig
from areal_jax.models.forward import ForwardSettings, packed_logprobs
from areal_jax.trainer.examples import Corpus, ExampleRows, row_order
from areal_jax.trainer.step import StateHolder, TrainState, update
from areal_jax.types import Example, TrainingSequence


class Objective(Protocol):
    """What is learnt: a mean over something that packed rows have."""

    def count(self, rows: ExampleRows) -> jax.Array:
        """float32 []: over how much of these rows the mean goes."""
        ...

    def sums(self, logprobs: jax.Array, rows: ExampleRows) -> dict[str, jax.Array]:
        """Sums over these rows, float32 [] each; 'loss' is the one whose gradient is taken.

        Args:
          logprobs: of the targets, float32 like ``rows.tokens``.
          rows: one micro-batch.
        """
        ...


class Likelihood:
    """Cross-entropy of the trained tokens, in nats a token."""

    def count(self, rows: ExampleRows) -> jax.Array:
        return rows.loss_mask.sum()

    def sums(self, logprobs: jax.Array, rows: ExampleRows) -> dict[str, jax.Array]:
        return {"loss": -jnp.sum(jnp.where(rows.loss_mask > 0, logprobs, 0.0))}


def pack_demonstrations(pairs: Sequence[tuple[np.ndarray, np.ndarray]], row_tokens: int) -> Corpus:
    """Packs (prompt tokens, response tokens), int [n] each, into rows; responses are learnt, their stop token included.

    Raises:
      ValueError: there is no demonstration, or one does not fit a row of ``row_tokens`` positions.
    """
    examples = []
    for prompt, response in pairs:
        tokens = np.concatenate([prompt, response]).astype(np.int32)
        examples.append(Example((TrainingSequence(tokens, np.arange(tokens.size) >= len(prompt)),)))
    return Corpus(examples, row_tokens)


def learning_rate(section: Any, step: int) -> float:
    """Linear warm-up, constant, then a linear fall from ``decay_start`` to ``final_fraction`` of the peak at the last step."""
    warm = min(1.0, (step + 1) / section.warmup_steps) if section.warmup_steps else 1.0
    start = section.decay_start * section.steps
    past = min(1.0, max(0.0, (step - start) / (section.steps - 1 - start))) if section.steps - 1 > start else 0.0
    return section.learning_rate * warm * (1.0 - past * (1.0 - section.final_fraction))


class SupervisedTrainer(StateHolder):
    """Trains on packed examples over the data-parallel shards of any mesh.

    Attributes:
      corpus: what is trained on.
      order: element s is the rows of step s; without ``epochs`` it has no end.
    """

    def __init__(
        self,
        section: Any,
        model: ModelConfig,
        mesh: Mesh,
        params: Any,
        corpus: Corpus,
        seed: int,
        forward: ForwardSettings,
        param_dtype: str = "float32",
        *,
        objective: Objective | None = None,
        epochs: int | None = None,
        heldout: Corpus | None = None,
    ):
        """Puts the state in place and compiles the step, and the evaluation where something is held out.

        Args:
          section: the ``sft`` section of a configuration.
          model: the architecture.
          mesh: from ``cluster.meshes``.
          params: to start from; copied.
          corpus: what is trained on.
          seed: of the order of rows.
          forward: how the forward pass is computed.
          param_dtype: type of the parameters.
          objective: what is learnt; None: ``Likelihood``.
          epochs: passes over the corpus; None: without end.
          heldout: of the same capacity; None: nothing is held out.
        """
        super().__init__(model, mesh, section, params, param_dtype)
        self.section, self.corpus, self.heldout = section, corpus, heldout
        self.objective: Objective = Likelihood() if objective is None else objective
        self.order = row_order(len(corpus.bins), section.rows, seed, epochs)
        self._forward = forward
        shards = self.placement.shards
        self._micro = -(-min(section.micro_batch_rows or section.rows, section.rows) // shards) * shards
        self._pieces = -(-section.rows // self._micro)
        self._slots = max(c.most for c in (corpus, heldout) if c is not None) if corpus.paired else 0
        self._train = self._compile_train()
        self._measure = self._compile_measure() if heldout is not None else None

    def _placed(self, rows: ExampleRows, leading: int = 0) -> ExampleRows:
        """Rows of arrays or shapes with their shardings: rows over data and fsdp, positions over context; ``leading`` axes before them are whole."""
        axes = tuple(self.placement.rows.spec)

        def one(name: str, leaf: Any) -> Any:
            spec = P(*(None,) * leading, *(axes if name not in ("pairs", "reference") else axes[:1]))
            sharding = NamedSharding(self.placement.mesh, spec)
            if isinstance(leaf, jax.ShapeDtypeStruct):
                return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)
            return jax.device_put(leaf, sharding)

        leaves = {field.name: getattr(rows, field.name) for field in dataclasses.fields(ExampleRows)}
        return ExampleRows(**{name: None if leaf is None else one(name, leaf) for name, leaf in leaves.items()})

    def _shapes(self, *leading: int) -> ExampleRows:
        """Shapes and shardings of rows."""
        shape = (*leading, self.corpus.capacity)
        integers, floats = (jax.ShapeDtypeStruct(shape, dtype) for dtype in (jnp.int32, jnp.float32))
        rows = ExampleRows(integers, integers, integers, integers, floats)
        if self.corpus.paired:
            pairs = (*leading, self._slots)
            rows = dataclasses.replace(rows, pairs=jax.ShapeDtypeStruct(pairs, jnp.float32), reference=jax.ShapeDtypeStruct((*pairs, 2), jnp.float32))
        return self._placed(rows, len(leading) - 1)

    def _logprobs(self, params: Any, frozen: Any, rows: ExampleRows) -> jax.Array:
        return packed_logprobs(self.model, join(params, frozen), rows.tokens, rows.positions, rows.segment_ids, rows.targets, 1.0, self._forward)[0]

    def _compile_train(self) -> Any:
        here = self.placement

        def train(state: TrainState, frozen: Any, rows: ExampleRows, rate: jax.Array) -> tuple[TrainState, dict[str, jax.Array]]:
            count = jnp.maximum(self.objective.count(rows), 1.0)

            def loss(params: Any, micro: ExampleRows) -> tuple[jax.Array, dict[str, jax.Array]]:
                sums = self.objective.sums(self._logprobs(params, frozen, micro), micro)
                return sums["loss"] / count, sums

            def gradient(micro: ExampleRows) -> tuple[Any, dict[str, jax.Array]]:
                gradients, sums = jax.grad(loss, has_aux=True)(state.params, micro)
                return jax.tree.map(lambda g: g.astype(jnp.float32), gradients), sums

            if self._pieces == 1:
                total = gradient(jax.tree.map(lambda leaf: leaf[0], rows))
            else:
                micro = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype), rows)
                zeros = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), jax.eval_shape(gradient, micro))
                zeros = jax.lax.with_sharding_constraint(zeros[0], here.state.params), zeros[1]
                total, _ = jax.lax.scan(lambda sofar, micro: (jax.tree.map(jnp.add, sofar, gradient(micro)), None), zeros, rows)
            gradients, sums = total
            new, norm, finite = update(self.optimizer, state, gradients, rate, self.section.grad_clip)
            metrics = {name: value / count for name, value in sums.items()}
            metrics |= {"grad_norm": norm, "skipped": 1.0 - finite, "in_a_row": new.skipped, "tokens": rows.loss_mask.sum(), "count": count}
            return dataclasses.replace(new, step=new.step + 1), metrics

        return (
            jax.jit(train, donate_argnums=0, out_shardings=(here.state, here.scalar))
            .lower(
                self.abstract_state(),
                self.abstract_frozen(),
                self._shapes(self._pieces, self._micro),
                jax.ShapeDtypeStruct((), jnp.float32, sharding=here.scalar),
            )
            .compile()
        )

    def _compile_measure(self) -> Any:
        def measure(params: Any, frozen: Any, rows: ExampleRows) -> dict[str, jax.Array]:
            return {"count": self.objective.count(rows), "tokens": rows.loss_mask.sum(), **self.objective.sums(self._logprobs(params, frozen, rows), rows)}

        shapes = self.abstract_state().params, self.abstract_frozen(), self._shapes(self._micro)
        return jax.jit(measure, out_shardings=self.placement.scalar).lower(*shapes).compile()

    def step(self) -> dict[str, jax.Array]:
        """One step on the next rows.

        Returns:
          Scalars on the device: ``loss`` and the objective's other means, ``count`` (over how much they go), ``tokens`` (trained ones), ``grad_norm``,
          ``skipped`` (1: gradient not finite) and ``in_a_row`` (so many skipped up to here). Reading one waits for the step; leave them unread to run ahead.
        """
        _check_reference(self.corpus)
        host = self.corpus.rows(np.asarray(self.order[self.version]), self._pieces * self._micro, self._slots)
        rows = self._placed(jax.tree.map(lambda leaf: leaf.reshape(self._pieces, self._micro, *leaf.shape[1:]), host), 1)
        rate = jax.device_put(np.float32(learning_rate(self.section, self.version)), self.placement.scalar)
        self.state, metrics = self._train(self.state, self.frozen, rows, rate)
        self.version += 1
        return metrics

    def evaluate(self) -> dict[str, float]:
        """The objective's means over all that is held out, ``count`` and ``tokens``; sums over micro-batches are float64.

        Raises:
          ValueError: nothing is held out.
        """
        if self.heldout is None or self._measure is None:
            raise ValueError("an evaluation needs held-out examples; the trainer was made without; give 'sft.eval_data' or 'sft.eval_fraction'")
        _check_reference(self.heldout)
        parts = [self._measure(self.state.params, self.frozen, rows) for rows in self._micro_batches(self.heldout)]
        sums = {name: math.fsum(float(part[name]) for part in jax.device_get(parts)) for name in parts[0]}
        means = {name: value / max(sums["count"], 1.0) for name, value in sums.items() if name not in ("count", "tokens")}
        return means | {"count": sums["count"], "tokens": sums["tokens"]}

    def _micro_batches(self, corpus: Corpus) -> list[ExampleRows]:
        """All rows of a corpus, each once, as micro-batches on the devices."""
        starts = range(0, len(corpus.bins), self._micro)
        return [self._placed(corpus.rows(range(s, min(s + self._micro, len(corpus.bins))), self._micro, self._slots)) for s in starts]


def _check_reference(corpus: Corpus) -> None:
    if corpus.paired and corpus.reference is None:
        raise ValueError("pairs need their log-probs under the reference policy before they are trained; set 'reference' of the corpus")
