"""``launch/benchmark.py peers``: the same training step by TRL, by Tunix and by this project's trainer, in turn.

Invariants:
* All sides hold the same checkpoint, saved by ``transformers``, in float32, and train on the same samples; their log-probs of the first ones agree.
* A step is forward, backward and update of all samples, whose old log-probs and advantages are given; tokens a second count the samples' own tokens.
* A peer runs under its own Python, in a process that imports nothing of this project, with the batch size, threads and devices that served it best on
  the same samples with lengths divided by 4; all sides are warm, and take turns.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import pathlib
import shutil
import statistics
import subprocess
import tempfile
import time
from typing import Any

import numpy as np

from areal_jax.benchmarks import flags
from areal_jax.benchmarks.loads import make_load
from areal_jax.benchmarks.transformers_side import TransformersSide
from areal_jax.config import ConfigError
from areal_jax.config_devices import parse_mesh

SHORTER = 4
"""Lengths are divided by this where a peer's settings are chosen."""
SIDES = pathlib.Path(__file__).parent / "peer_side"
PEERS = ("trl", "tunix")
ALLOCATOR = {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": str(1 << 46), "MALLOC_TOP_PAD_": str(1 << 26)}
"""The setting of ``host_memory.keep_freed_memory`` for a peer, which is faster with it, too."""
AGREE = 2e-3
"""Most difference between two sides' mean log-probs of the same tokens."""
DEFAULTS = {
    "against": "all",
    "trl-python": "",
    "tunix-python": "",
    "random": "qwen2-small",
    "sequences": "256",
    "lengths": "longtail:32:256",
    "prompt": "8:24",
    "group": "8",
    "batches": "16,32,64,128",
    "threads": "1,2",
    "tunix-devices": "1,2",
    "layout": "balanced",
    "row": "0",
    "rows": "8",
    "mesh": "data=1",
    "repeats": "3",
    "seed": "0",
    "out": "",
}


class Peer:
    """A peer's program under its own Python; a context manager.

    Args:
      python: of an environment that has the peer.
      program: in ``peer_side``.
      threads: cores that it may use.
      devices: of JAX, into which they are divided.
    """

    def __init__(self, python: str, program: str, threads: int, devices: int = 1):
        keep = (
            {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "XLA_FLAGS")} | ALLOCATOR | {"JAX_NUM_CPU_DEVICES": str(devices)}
        )
        self._name, self._log = program, tempfile.TemporaryFile("w+")  # noqa: SIM115  # closed in __exit__
        command = [python, str(SIDES / f"{program}.py")]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._log, text=True, env=keep)
        if hasattr(os, "sched_setaffinity"):  # before the program has made a thread; its threads inherit it
            os.sched_setaffinity(self._process.pid, sorted(os.sched_getaffinity(0))[:threads])

    def __enter__(self) -> Peer:
        return self

    def __exit__(self, *_: Any) -> None:
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        try:
            self._process.wait(timeout=20.0)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._log.close()

    def ask(self, **request: Any) -> dict[str, Any]:
        """The answer to one request.

        Raises:
          RuntimeError: the program ended, with what it said last.
        """
        assert self._process.stdin is not None and self._process.stdout is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write(json.dumps(request) + "\n")
            self._process.stdin.flush()
        line = self._process.stdout.readline()
        if not line:
            self._log.seek(0)
            raise RuntimeError(f"{self._name} ended with status {self._process.wait()}: {self._log.read()[-2000:]}")
        return json.loads(line)


def main(argv: list[str]) -> int:
    """Measures, prints one table and writes JSON to ``--out``."""
    values = flags.parse(argv, DEFAULTS)
    count, group, rows, repeats = (flags.whole(values, name) for name in ("sequences", "group", "rows", "repeats"))
    row, seed, prompt, file = flags.whole(values, "row", 0), flags.whole(values, "seed", 0), flags.span(values, "prompt"), flags.output(values)
    against, [layout] = flags.chosen(values, "against", PEERS), flags.chosen(values, "layout", ("algorithm1", "balanced"))
    batches, threads, devices = (flags.several(values, name) for name in ("batches", "threads", "tunix-devices"))
    pythons = {name: python_of(name, values[f"{name}-python"]) for name in against}
    batches = tuple(batch for batch in batches if count % batch == 0 and batch % group == 0)
    if not batches:
        raise ConfigError(f"'--batches' must hold a divisor of '--sequences' = {count} that is a multiple of '--group' = {group}; got {values['batches']}")
    axes = parse_mesh("--mesh", values["mesh"])

    from areal_jax.benchmarks.trainer import take_devices

    taken = take_devices(axes)
    from areal_jax.benchmarks.machine import cores
    from areal_jax.benchmarks.policies import make_policy, parameter_count, random_model
    from areal_jax.benchmarks.report import deliver
    from areal_jax.benchmarks.samples import real_tokens, training_batch

    threads = tuple(n for n in threads if n <= cores()) or (1,)
    with contextlib.ExitStack() as stack:
        directory = stack.enter_context(tempfile.TemporaryDirectory())
        with TransformersSide(directory) as saving:
            saving.save_random(random_model(values["random"]), seed)
        _, model, params = make_policy(directory, "", "float32")
        load = make_load(model.vocab_size, count, values["lengths"], prompt, group, seed)
        tokens = real_tokens(load)
        batch = training_batch(load, model.vocab_size, 0, seed)
        own = OwnSide(model, params, taken, axes, load, layout, row, rows, seed)
        whole, short = (save(pathlib.Path(directory) / name, training_batch(one, model.vocab_size, 0, seed), own.advantages)
                        for name, one in (("whole.npz", load), ("short.npz", load.shortened(SHORTER))))  # fmt: skip
        sides: dict[str, Any] = {}
        settings: dict[str, dict[str, Any]] = {}
        for name in against:
            tried: dict[tuple[int, int, int], float] = {}
            for n, d in itertools.product(threads, (1,) if name == "trl" else devices):
                if d <= n:
                    with Peer(pythons[name], f"{name}_step", n, d) as peer:
                        for size in batches:
                            answer = peer.ask(checkpoint=directory, samples=str(short), batch=size, threads=n, repeats=2, group=group)
                            tried[n, d, size] = answer["seconds"][-1]
            n, d, size = min(tried, key=lambda key: tried[key])
            sides[name] = (stack.enter_context(Peer(pythons[name], f"{name}_step", n, d)), size, n)
            by = {f"threads {t}, devices {v}, batch {b}": took for (t, v, b), took in tried.items()}
            settings[name] = {"batch": size, "threads": n, "devices": d, "chosen_by_seconds": by}
        expected, answers = own.logprob(batch), {}
        own.seconds()
        for name, (peer, size, n) in sides.items():
            answers[name] = peer.ask(checkpoint=directory, samples=str(whole), batch=size, threads=n, repeats=1, group=group)
            if abs(answers[name]["logprob"] - expected) > AGREE:
                raise RuntimeError(f"{name} must hold the same policy and samples: mean log-prob {answers[name]['logprob']}, here {expected}")
        seconds: dict[str, list[float]] = {name: [] for name in (*sides, "areal_jax")}
        for _ in range(repeats):
            for name, (peer, size, n) in sides.items():
                seconds[name] += peer.ask(checkpoint=directory, samples=str(whole), batch=size, threads=n, repeats=1, group=group)["seconds"]
            seconds["areal_jax"].append(own.seconds())
    rates = {name: tokens / statistics.median(took) for name, took in seconds.items()}
    results: dict[str, Any] = {
        "policy": {"name": values["random"], "parameters": parameter_count(model), "dtype": "float32", "logprob": expected},
        "load": {"sequences": count, "lengths": values["lengths"], "prompt": values["prompt"], "tokens": tokens, "longest": load.longest},
        **{name: {**settings[name], **{k: answers[name][k] for k in ("versions", "logprob")}} for name in sides},
        "areal_jax": {"threads": cores(), "mesh": values["mesh"], "layout": layout, **own.shape},
    }
    for name, took in seconds.items():
        results[name] |= {"seconds": took, "tokens_per_s": rates[name]}
    results |= {f"areal_jax_over_{name}": rates["areal_jax"] / rates[name] for name in sides}
    deliver(f"one training step: {values['random']}, float32", results, file)
    return 0


def python_of(name: str, given: str) -> str:
    """The Python of a peer.

    Raises:
      ConfigError: none is named, or it is not there.
    """
    found = shutil.which(given) if given else None
    if not found:
        package = {"trl": "trl torch", "tunix": "google-tunix"}[name]
        raise ConfigError(
            f"'--{name}-python' must name the Python of an environment of its own (pip install {package}); got '{given}'; or leave {name} out of '--against'"
        )
    return found


def save(file: pathlib.Path, batch: Any, advantages: Any) -> pathlib.Path:
    """The samples of a batch as ``peer_side.serving.samples`` reads them, each with its one advantage."""
    every = [t for one in batch.groups for t in one.trajectories]
    widths = max(len(t.prompt_tokens) for t in every), max(t.length for t in every)
    prompts, completions = (np.zeros((len(every), width), np.int64) for width in widths)
    logprobs = np.zeros(completions.shape, np.float32)
    for index, t in enumerate(every):
        prompts[index, widths[0] - len(t.prompt_tokens) :] = t.prompt_tokens
        completions[index, : t.length], logprobs[index, : t.length] = t.tokens, t.behaviour_logprobs
    np.savez(
        file,
        prompts=prompts,
        completions=completions,
        prompt_lengths=np.asarray([len(t.prompt_tokens) for t in every]),
        lengths=np.asarray([t.length for t in every]),
        old_logprobs=logprobs,
        advantages=np.asarray([values[0] for values in advantages(batch)], np.float32),
    )
    return file


class OwnSide:
    """This project's trainer on the same samples."""

    def __init__(self, model: Any, params: Any, devices: list[Any], axes: dict[str, int], load: Any, layout: str, row: int, rows: int, seed: int):
        from areal_jax.benchmarks.samples import trainer_config
        from areal_jax.cluster.meshes import build_mesh
        from areal_jax.trainer.trainer import Trainer

        capacity = row or -(-max(192, load.longest - 1) // 64) * 64
        self.config = trainer_config("float32", micro_batch_tokens=capacity, micro_batch_rows=rows, packing=layout)
        self.shape = {"positions_a_row": capacity, "rows": rows}
        self._model, self._params, self._load, self._seed = model, params, load, seed
        self._trainer = Trainer(self.config, model, build_mesh(devices, **axes), params)

    def advantages(self, batch: Any) -> list[np.ndarray]:
        """Of each sample, a token each."""
        from areal_jax.trainer.build import advantages_of

        return advantages_of(batch, self.config)

    def seconds(self) -> float:
        """Of one step on the load's samples, as they come to the trainer's version; building the batch is not in it."""
        from areal_jax.benchmarks.samples import training_batch

        packed = self._trainer.build(training_batch(self._load, self._model.vocab_size, self._trainer.version, self._seed))
        began = time.perf_counter()
        self._trainer.step(packed)
        return time.perf_counter() - began

    def logprob(self, batch: Any, count: int = 16) -> float:
        """Mean log-prob of the first samples' completion tokens under the checkpoint."""
        import jax.numpy as jnp

        from areal_jax.models.forward import packed_logprobs
        from areal_jax.trainer.packing import PackedSequence, pack_rows

        first = [t for group in batch.groups for t in group.trajectories][:count]
        whole = [np.concatenate([t.prompt_tokens, t.tokens]).astype(np.int32) for t in first]
        nothing = [np.zeros(t.length, np.float32) for t in first]
        rows = pack_rows([PackedSequence(w, n, t.versions, n) for w, n, t in zip(whole, nothing, first, strict=True)], self.config.trainer.micro_batch_tokens)
        tokens, positions, segments, targets = (jnp.asarray(part) for part in (rows.tokens, rows.positions, rows.segment_ids, rows.targets))
        logprobs, _ = packed_logprobs(self._model, self._params, tokens, positions, segments, targets, 1.0)
        return float((np.asarray(logprobs) * rows.loss_mask).sum() / rows.loss_mask.sum())
