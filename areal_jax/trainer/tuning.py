"""Fine-tuning: steps, evaluations and checkpoints of one run, from its newest checkpoint on.

Invariants:
* The rows of a step depend on the data, the seed and the step's number alone: a run that was killed and begun again trains what the whole run trains.
* At a checkpoint of step s all rows of metrics and evaluations up to s are written; a resumed run drops those after it and does them again.
* The host runs one step ahead of the device: the numbers of a step are read when the next one is on its way.
* DPO's reference log-probs are kept in a file beside the checkpoints, bound to the data and the weights they were made with.
"""

from __future__ import annotations

import math
import os
import pathlib
import time
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from areal_jax.config import ConfigError
from areal_jax.models.adapters import fingerprint as checksum
from areal_jax.trainer.checkpoint import Checkpointer, CheckpointError
from areal_jax.trainer.examples import Corpus
from areal_jax.trainer.preference import PreferenceTrainer
from areal_jax.trainer.step import NonFiniteError
from areal_jax.trainer.supervised import SupervisedTrainer, learning_rate

Row = dict[str, Any]


class Tuning:
    """One run of fine-tuning.

    Attributes:
      steps: of the whole run.
      resumed: step of the checkpoint that it goes on from; None at the beginning.
    """

    def __init__(self, config: Any, trainer: SupervisedTrainer, directory: pathlib.Path, fingerprint: str):
        """Restores the newest checkpoint, or computes DPO's reference from the parameters to start from.

        Args:
          config: a validated configuration, ``sft.steps`` settled; reads ``sft``, ``checkpoint.keep`` and ``trainer.max_nonfinite_updates``.
          trainer: just made.
          directory: of the checkpoints.
          fingerprint: of the data.

        Raises:
          ConfigError: the checkpoint is of other data, other weights or another architecture.
        """
        self.config, self.trainer, self.steps = config, trainer, config.sft.steps
        self._read_at = time.monotonic()
        self._facts = {"steps": self.steps, "data": fingerprint, "base": trainer.base}
        if isinstance(trainer, PreferenceTrainer):
            _set_reference(trainer, directory.parent / "reference.npz", fingerprint)
        self._checkpoints = Checkpointer(directory, config.checkpoint.keep)
        self.resumed = self._checkpoints.latest()
        if self.resumed is not None:
            try:
                self._restore(self.resumed)
            except CheckpointError as error:
                self._checkpoints.close()
                raise ConfigError(str(error)) from error

    def _restore(self, step: int) -> None:
        state, meta = self._checkpoints.restore(step, self.trainer.abstract_state())
        self.trainer.check_base(meta)
        for name, what in (("data", "the data"), ("steps", "the number of steps")):
            if meta.get(name) != self._facts[name]:
                raise CheckpointError(
                    f"a resumed run keeps {what} of its checkpoints ({meta.get(name)}); got {self._facts[name]}; "
                    "put back the rows and keys it began with, or take another --workdir"
                )
        self.trainer.load_state(state)

    def run(self, on_row: Callable[[Row], None], on_eval: Callable[[Row], None], stop_requested: Callable[[], bool]) -> bool:
        """Trains to the end, or to the step in which a stop is asked for; either way the last step has a checkpoint.

        Args:
          on_row: called with a row of metrics.jsonl each step.
          on_eval: called with a row of eval.jsonl; before the first step, every ``sft.eval_every`` steps and after the last, where anything is held out.
          stop_requested: whether somebody asked the run to stop.

        Returns:
          Whether all steps are done.

        Raises:
          NonFiniteError: ``trainer.max_nonfinite_updates`` updates in a row were left out because their gradient was not finite.
          CheckpointError: a checkpoint could not be written.
        """
        trainer, section = self.trainer, self.config.sft
        if trainer.version == 0:
            self._evaluate(on_eval)
        unread: dict[str, jax.Array] | None = None
        self._read_at = time.monotonic()
        while trainer.version < self.steps:
            metrics = trainer.step()
            if unread is not None:
                self._read(unread, trainer.version - 1, on_row)
            unread, done, stopping = metrics, trainer.version, stop_requested()
            last = done == self.steps
            evaluates = last or (section.eval_every and done % section.eval_every == 0)
            saves = last or stopping or done % section.checkpoint_every == 0
            if evaluates or saves:
                self._read(unread, done, on_row)
                unread = None
                if evaluates:
                    self._evaluate(on_eval)
                if saves:
                    self._checkpoints.save(done, trainer.state, {"step": done, **self._facts})
                self._read_at = time.monotonic()
            if stopping:
                break
        return trainer.version == self.steps

    def _read(self, metrics: dict[str, jax.Array], step: int, on_row: Callable[[Row], None]) -> None:
        """Waits for the numbers of a step and hands on its row."""
        values = {name: float(value) for name, value in jax.device_get(metrics).items()}
        now = time.monotonic()
        seconds, self._read_at = now - self._read_at, now
        rows, section = len(self.trainer.corpus.bins), self.config.sft
        rate = learning_rate(section, step - 1)
        own = {name: values[name] for name in values.keys() - {"grad_norm", "skipped", "in_a_row", "tokens", "count"}}
        preference = self.trainer.corpus.paired
        on_row(
            {
                "step": step,
                "stage": "training",
                "epoch": min(step * section.rows / rows, section.epochs or math.inf),
                **({f"preference/{name}": value for name, value in own.items()} if preference else {"loss/supervised": own["loss"]}),
                "learning_rate": rate,
                "grad_norm": values["grad_norm"],
                "update/skipped_nonfinite": int(values["skipped"]),
                "tokens_per_second/trained": values["tokens"] / seconds,
                "time/step": seconds,
            }
        )
        if values["in_a_row"] >= self.config.trainer.max_nonfinite_updates:
            raise NonFiniteError(
                f"the gradient must be finite; {int(values['in_a_row'])} updates in a row were not, up to step {step} (loss {values['loss']}); "
                f"lower 'sft.learning_rate' = {section.learning_rate}, or look at the data of these steps"
            )

    def _evaluate(self, on_eval: Callable[[Row], None]) -> None:
        if self.trainer.heldout is None:
            return
        started = time.monotonic()
        values = self.trainer.evaluate()
        tokens = int(values.pop("tokens"))
        values.pop("count")
        if not self.trainer.heldout.paired:
            values["perplexity"] = math.exp(min(values["loss"], 700.0))
        row = {"step": self.trainer.version, "stage": "evaluation", "eval/n": len(self.trainer.heldout.examples), "eval/tokens": tokens}
        on_eval({**row, **{f"eval/{name}": value for name, value in values.items()}, "eval/time_s": time.monotonic() - started})

    def close(self) -> None:
        """Waits for the checkpoint that is being written and frees the threads.

        Raises:
          CheckpointError: it could not be written.
        """
        self._checkpoints.close()


def _set_reference(trainer: PreferenceTrainer, file: pathlib.Path, data: str) -> None:
    """Gives the corpora their reference log-probs: those of the file, else computed from the present parameters and kept there.

    Raises:
      ConfigError: the file is of other data or other weights.
    """
    corpora: list[Corpus] = [corpus for corpus in (trainer.corpus, trainer.heldout) if corpus is not None]
    made_with = f"{data} {checksum(trainer.policy)}"
    if file.is_file():
        with np.load(file) as stored:
            found, values = str(stored["made_with"]), stored["reference"]
        if found != made_with:
            raise ConfigError(
                f"'{file}' holds the reference log-probs of other data or other weights than 'sft.data' and 'model.path' name now; "
                "put back those that the run began with, or take another --workdir"
            )
    else:
        values = np.concatenate([trainer.reference_logprobs(corpus) for corpus in corpora])
        temporary = file.with_suffix(".tmp.npz")
        np.savez(temporary, made_with=made_with, reference=values)
        os.replace(temporary, file)
    start = 0
    for corpus in corpora:
        corpus.reference = values[start : start + len(corpus.examples)]
        start += len(corpus.examples)
