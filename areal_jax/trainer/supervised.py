"""Supervised learning of demonstrations: the warm-up that gives reinforcement learning a policy to start from.

Invariants:
* The corpus is packed once; a step takes whole rows, each row once an epoch, in an order that depends on seed and epoch alone.
* Only response tokens are learnt; the loss is their mean over all rows of the step.
* One program, compiled once; the state's buffers are reused.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from areal_jax.models.adapters import join
from areal_jax.models.architecture import ModelConfig
from areal_jax.models.forward import ForwardSettings, packed_logprobs
from areal_jax.trainer.packing import MicroBatch, PackedSequence, pack_rows, take_rows
from areal_jax.trainer.step import StateHolder, TrainState, update

CHUNK = 1024
"""Demonstrations that are packed together."""


def pack_demonstrations(pairs: Sequence[tuple[np.ndarray, np.ndarray]], row_tokens: int) -> MicroBatch:
    """Packs a corpus into rows.

    Args:
      pairs: (prompt tokens, response tokens), int [n] each; the response ends with its stop token.
      row_tokens: positions of a row.

    Returns:
      Host arrays [rows, row_tokens]; ``loss_mask`` is 1 on the response's tokens.

    Raises:
      ValueError: there is no demonstration, or one does not fit a row.
    """
    if not pairs:
        raise ValueError("the warm-up needs at least one demonstration; got none")
    parts = []
    for start in range(0, len(pairs), CHUNK):
        sequences = []
        for prompt, response in pairs[start : start + CHUNK]:
            nothing = np.zeros(len(response), np.float32)
            sequences.append(PackedSequence(np.concatenate([prompt, response]).astype(np.int32), nothing, nothing.astype(np.int32), nothing))
        parts.append(pack_rows(sequences, row_tokens))
    return jax.tree.map(lambda *leaves: np.concatenate(leaves), *parts)


def rows_of_step(step: int, rows: int, count: int, seed: int) -> np.ndarray:
    """The rows of a step: the stream of all epochs' permutations, cut into pieces of ``count``.

    Args:
      step: from 0.
      rows: rows of the corpus.
      count: rows of a step.
      seed: of the run.

    Returns:
      int [count], a pure function of the arguments, so that a resumed warm-up goes on with the same rows.
    """
    places = np.arange(step * count, (step + 1) * count)
    orders = {epoch: np.random.default_rng([seed, epoch]).permutation(rows) for epoch in np.unique(places // rows)}
    return np.asarray([orders[p // rows][p % rows] for p in places], np.int64)


def learning_rate(section: Any, step: int) -> float:
    """Linear warm-up, constant, then a linear fall from ``decay_start`` to ``final_fraction`` of the peak at the last step."""
    warm = min(1.0, (step + 1) / section.warmup_steps) if section.warmup_steps else 1.0
    start = section.decay_start * section.steps
    past = min(1.0, max(0.0, (step - start) / (section.steps - 1 - start))) if section.steps - 1 > start else 0.0
    return section.learning_rate * warm * (1.0 - past * (1.0 - section.final_fraction))


class SupervisedTrainer(StateHolder):
    """Trains on packed demonstrations over the data-parallel shards of any mesh."""

    def __init__(
        self,
        section: Any,
        model: ModelConfig,
        mesh: Mesh,
        params: Any,
        corpus: MicroBatch,
        seed: int,
        forward: ForwardSettings,
        param_dtype: str = "float32",
    ):
        """Puts the state in place and compiles the step.

        Args:
          section: the ``sft`` section of a configuration.
          model: the architecture.
          mesh: from ``cluster.meshes``.
          params: to start from; copied.
          corpus: from ``pack_demonstrations``.
          seed: of the order of rows.
          forward: how the forward pass is computed.
          param_dtype: type of the parameters.
        """
        super().__init__(model, mesh, section, params, param_dtype)
        self.section, self.corpus, self.seed = section, corpus, seed
        self._forward = forward
        self._rows = -(-section.rows // self.placement.shards) * self.placement.shards
        self._compile()

    def _compile(self) -> None:
        def train(state: TrainState, frozen: Any, batch: MicroBatch, rate: jax.Array) -> tuple[TrainState, dict[str, jax.Array]]:
            tokens = jnp.maximum(batch.loss_mask.sum(), 1.0)

            def loss(params: Any) -> jax.Array:
                logprobs, _ = packed_logprobs(
                    self.model, join(params, frozen), batch.tokens, batch.positions, batch.segment_ids, batch.targets, 1.0, self._forward
                )
                return -jnp.sum(jnp.where(batch.loss_mask > 0, logprobs, 0.0)) / tokens

            value, gradients = jax.value_and_grad(loss)(state.params)
            gradients = jax.tree.map(lambda g: g.astype(jnp.float32), gradients)
            state, norm, finite = update(self.optimizer, state, gradients, rate, self.section.grad_clip)
            metrics = {"loss": value, "grad_norm": norm, "skipped": 1.0 - finite, "tokens": tokens}
            return dataclasses.replace(state, step=state.step + 1), metrics

        here = self.placement
        rows = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct((self._rows, leaf.shape[1]), leaf.dtype, sharding=here.rows), self.corpus)
        scalars = dict.fromkeys(("loss", "grad_norm", "skipped", "tokens"), here.scalar)
        self._train = (
            jax.jit(train, donate_argnums=0, out_shardings=(here.state, scalars))
            .lower(self.abstract_state(), self.abstract_frozen(), rows, jax.ShapeDtypeStruct((), jnp.float32, sharding=here.scalar))
            .compile()
        )

    def step(self) -> dict[str, jax.Array]:
        """One step on the next rows.

        Returns:
          Scalars on the device: ``loss`` (mean over response tokens, nats), ``grad_norm``, ``skipped`` (1: gradient not finite), ``tokens``.
          Reading one waits for the step; leave them unread to run ahead.
        """
        chosen = rows_of_step(self.version, self.corpus.tokens.shape[0], self.section.rows, self.seed)
        batch = jax.device_put(take_rows(self.corpus, chosen, self._rows), self.placement.rows)
        rate = jax.device_put(np.float32(learning_rate(self.section, self.version)), self.placement.scalar)
        self.state, metrics = self._train(self.state, self.frozen, batch, rate)
        self.version += 1
        return metrics
