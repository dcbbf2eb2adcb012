"""Direct preference optimisation (DPO, arXiv 2305.18290) of packed pairs.

Invariants:
* The two sequences of a pair lie in one row, so that every division of rows keeps the pair.
* The reference policy is the one that training starts from. Its log-probs do not change, so they are computed once, before the first step, and kept on the
  host (8 bytes a pair): no second copy of the weights on the devices, and no second forward pass a step.
* Log-probs of a sequence are float32 sums over its learnt tokens.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from areal_jax.trainer.examples import Corpus, ExampleRows
from areal_jax.trainer.supervised import SupervisedTrainer


def pair_logprobs(logprobs: jax.Array, rows: ExampleRows) -> jax.Array:
    """Log-probs summed over the learnt tokens of each sequence.

    Args:
      logprobs: float32 [rows, C], of the targets.
      rows: with P places for pairs.

    Returns:
      float32 [rows, P, 2], chosen and rejected; 0 where there is no pair.
    """
    slots = rows.pairs.shape[1]
    own = rows.segment_ids[:, :, None] == 1 + jnp.arange(2 * slots)
    learnt = jnp.where(rows.loss_mask > 0, logprobs, 0.0)
    return jnp.where(own, learnt[:, :, None], 0.0).sum(1).reshape(-1, slots, 2)


@dataclasses.dataclass(frozen=True)
class DirectPreference:
    """−log σ(z) with z = β·[(log π(y_w) − log π_ref(y_w)) − (log π(y_l) − log π_ref(y_l))], arXiv 2305.18290 eq. 7, in nats a pair.

    Attributes:
      beta: β, strength of the pull to the reference.
      label_smoothing: ε, assumed share of pairs labelled the wrong way round: (1 − ε)·−log σ(z) + ε·−log σ(−z) (conservative DPO); 0: eq. 7.
    """

    beta: float
    label_smoothing: float = 0.0

    def count(self, rows: ExampleRows) -> jax.Array:
        return rows.pairs.sum()

    def sums(self, logprobs: jax.Array, rows: ExampleRows) -> dict[str, jax.Array]:
        """'loss', 'margin' (z), 'correct' (z above 0), and of either answer its 'reward' (β times its log-ratio) and its 'logprob'."""
        policy = pair_logprobs(logprobs, rows)
        reward = self.beta * (policy - rows.reference)
        margin = reward[..., 0] - reward[..., 1]
        loss = -(1.0 - self.label_smoothing) * jax.nn.log_sigmoid(margin) - self.label_smoothing * jax.nn.log_sigmoid(-margin)
        means = {
            "loss": loss,
            "margin": margin,
            "correct": (margin > 0).astype(jnp.float32),
            "chosen_reward": reward[..., 0],
            "rejected_reward": reward[..., 1],
            "chosen_logprob": policy[..., 0],
            "rejected_logprob": policy[..., 1],
        }
        return {name: jnp.sum(jnp.where(rows.pairs > 0, value, 0.0)) for name, value in means.items()}


class PreferenceTrainer(SupervisedTrainer):
    """A ``SupervisedTrainer`` of pairs; its corpora get their ``reference`` before the first step."""

    def reference_logprobs(self, corpus: Corpus) -> np.ndarray:
        """Log-probs of a corpus under the present parameters.

        Returns:
          float32 [examples, 2], chosen and rejected, in the corpus's order.
        """

        def score(params: Any, frozen: Any, rows: ExampleRows) -> jax.Array:
            return pair_logprobs(self._logprobs(params, frozen, rows), rows)

        shapes = self.abstract_state().params, self.abstract_frozen(), self._shapes(self._micro)
        program = jax.jit(score, out_shardings=self.placement.scalar).lower(*shapes).compile()
        scored = [program(self.state.params, self.frozen, rows) for rows in self._micro_batches(corpus)]
        values = np.concatenate(jax.device_get(scored))
        reference = np.zeros((len(corpus.examples), 2), np.float32)
        for row, indices in enumerate(corpus.bins):
            reference[indices] = values[row, : len(indices)]
        return reference
