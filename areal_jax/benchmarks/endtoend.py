"""``launch/benchmark.py endtoend``: whole training runs by TRL's ``GRPOTrainer``, by Tunix's ``GRPOLearner`` and, asynchronously, here.

Invariants:
* All sides start from the same checkpoint, saved by ``transformers``, in float32; they answer the same prompts, with the same limits and the same
  reward, and make one update a step of as many samples.
* The policy is new, so that every token ends a response with about the same probability: lengths are long-tailed, up to the limit.
* Samples a second are those of steps in a steady state: compilation, and the first steps, while the pipeline fills, are left out.
"""

from __future__ import annotations

import json
import os
import pathlib
import statistics
import subprocess
import sys
import tempfile
from typing import Any

import numpy as np

from areal_jax.benchmarks import flags
from areal_jax.benchmarks.asynchrony import PROGRAM
from areal_jax.benchmarks.peers import PEERS, Peer, python_of
from areal_jax.benchmarks.transformers_side import TransformersSide

VERIFIER = "areal_jax.benchmarks.peer_side.words:verify"
DEFAULTS = {
    "against": "all",
    "trl-python": "",
    "tunix-python": "",
    "random": "qwen2-small",
    "prompts": "32",
    "group": "8",
    "new-tokens": "256",
    "prompt": "8:24",
    "batch": "64",
    "rollout": "256",
    "threads": "2",
    "tunix-devices": "1",
    "peer-steps": "2",
    "steps": "20",
    "skip": "6",
    "staleness": "4",
    "slots": "256",
    "repeats": "1",
    "seed": "0",
    "out": "",
}


def main(argv: list[str]) -> int:
    """Measures, prints one table and writes JSON to ``--out``."""
    values = flags.parse(argv, DEFAULTS)
    prompts, group, limit, batch, rollout, steps, skip, repeats = (
        flags.whole(values, name) for name in ("prompts", "group", "new-tokens", "batch", "rollout", "steps", "skip", "repeats")
    )
    threads, devices, peer_steps = (flags.whole(values, name) for name in ("threads", "tunix-devices", "peer-steps"))
    against, span, seed, file = flags.chosen(values, "against", PEERS), flags.span(values, "prompt"), flags.whole(values, "seed", 0), flags.output(values)
    pythons = {name: python_of(name, values[f"{name}-python"]) for name in against}

    from areal_jax.benchmarks.policies import random_model
    from areal_jax.benchmarks.report import deliver

    samples = prompts * group
    seconds: dict[str, list[float]] = {}
    seen: dict[str, dict[str, Any]] = {}
    with tempfile.TemporaryDirectory() as made:
        directory = pathlib.Path(made)
        model = random_model(values["random"])
        with TransformersSide(str(directory / "policy")) as saving:
            saving.save_random(model, seed)
        write_task(directory, model.vocab_size, prompts * max(peer_steps + 1, steps), span, seed)
        for repeat in range(repeats):
            for name in against:
                with Peer(pythons[name], f"{name}_run", threads, devices if name == "tunix" else 1) as peer:
                    found = peer.ask(
                        checkpoint=str(directory / "policy"), rows=str(directory / "rows.jsonl"), batch=batch, rollout=rollout, threads=threads,
                        steps=peer_steps + 1, group=group, prompts=prompts, new_tokens=limit,
                    )  # fmt: skip
                seconds.setdefault(name, []).extend(found["seconds"][1:])
                seen[name] = {"reward": statistics.fmean(found["rewards"]), "versions": found["versions"]}
                if found["lengths"]:
                    seen[name]["mean_length"] = statistics.fmean(found["lengths"])
            rows = own_run(directory, directory / f"run-{repeat}", values, steps)
            seconds.setdefault("areal_jax", []).append(sum(row["time/step"] for row in rows[skip:]) / len(rows[skip:]))
            names = {"reward": "reward/mean", "mean_length": "response_length/mean", "staleness_mean": "staleness/mean"}
            seen["areal_jax"] = {name: statistics.fmean(row[key] for row in rows) for name, key in names.items()}
    rates = {name: samples / statistics.median(took) for name, took in seconds.items()}
    results: dict[str, Any] = {
        "load": {name: values[name] for name in ("random", "prompts", "group", "new-tokens", "prompt")},
        **{name: {**seen[name], "seconds_a_step": took, "samples_per_s": rates[name]} for name, took in seconds.items()},
        **{f"areal_jax_over_{name}": rates["areal_jax"] / rates[name] for name in against},
    }
    deliver("whole runs", results, file)
    return 0


def write_task(directory: pathlib.Path, vocabulary: int, rows: int, span: tuple[int, int], seed: int) -> None:
    """The checkpoint's tokenizer (a word a token) and ``rows.jsonl``: prompts of random words, and a word for an answer."""
    import tokenizers

    table = {"<pad>": 0, "<eos>": 1} | {f"w{i}": i for i in range(2, vocabulary)}
    backend = tokenizers.Tokenizer(tokenizers.models.WordLevel(table, unk_token="<pad>"))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    backend.add_special_tokens([tokenizers.AddedToken(text, special=True) for text in ("<pad>", "<eos>")])
    backend.save(str(directory / "policy" / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "pad_token": "<pad>", "eos_token": "<eos>", "clean_up_tokenization_spaces": False}
    (directory / "policy" / "tokenizer_config.json").write_text(json.dumps(settings))
    random = np.random.default_rng(seed)
    with (directory / "rows.jsonl").open("w") as file:
        for _ in range(rows):
            question = " ".join(f"w{i}" for i in random.integers(2, vocabulary, random.integers(span[0], span[1] + 1)))
            file.write(json.dumps({"question": question, "answer": f"w{random.integers(2, vocabulary)}"}) + "\n")


def own_run(directory: pathlib.Path, workdir: pathlib.Path, values: dict[str, str], steps: int) -> list[dict[str, Any]]:
    """The metrics of the steps of a run of ``launch/train.py``.

    Raises:
      RuntimeError: it failed, with what it said last.
    """
    settings = {
        "model.path": directory / "policy",
        "task.path": directory / "rows.jsonl",
        "task.chat": "off",
        "reward.verifier": VERIFIER,
        "rollout.max_staleness": values["staleness"],
        "rollout.group_size": values["group"],
        "rollout.max_new_tokens": values["new-tokens"],
        "rollout.slots": values["slots"],
        "trainer.groups_per_step": values["prompts"],
        "trainer.minibatches": 1,
        "trainer.steps": steps,
        "trainer.learning_rate": 1e-5,
        "algorithm.advantage": "grpo",
        "algorithm.skip_zero_advantage": False,
        "eval.every_steps": 0,
        "eval.problems": 8,
        "checkpoint.every_steps": 0,
        "telemetry.live": "off",
        "seed": values["seed"],
    }
    command = [
        sys.executable,
        str(PROGRAM),
        "--config=configs/math.py",
        f"--workdir={workdir}",
        *(f"--config.{key}={value}" for key, value in settings.items()),
    ]
    done = subprocess.run(command, capture_output=True, text=True, cwd=PROGRAM.parents[1], env=os.environ)
    if done.returncode:
        raise RuntimeError(f"the run ended with status {done.returncode}: {done.stderr[-2000:]}")
    return [json.loads(line) for line in (workdir / "metrics.jsonl").read_text().splitlines()]
