"""TRL's side of whole runs: ``GRPOTrainer.train`` with its own generation (``transformers``), float32, no reference model, no gradient checkpointing.

Requests: {checkpoint, rows, batch, threads, steps, group, prompts, new_tokens}; answers: {seconds: of every step, rewards, lengths, versions}.
"""

# pyright: reportMissingImports=false

from __future__ import annotations

import importlib.metadata
import tempfile
import time
from typing import Any

import datasets
import torch
import transformers
import trl
from serving import serve
from words import verify


class Clock(transformers.TrainerCallback):
    """Seconds of every step, from the first request for completions to the end of the update."""

    def __init__(self) -> None:
        self.seconds: list[float] = []

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        self.began = time.perf_counter()

    def on_step_end(self, *_: Any, **__: Any) -> None:
        self.seconds.append(time.perf_counter() - self.began)


def answer(request: dict[str, Any]) -> dict[str, Any]:
    torch.set_num_threads(request["threads"])
    policy = transformers.AutoModelForCausalLM.from_pretrained(request["checkpoint"], dtype=torch.float32, attn_implementation="sdpa")
    tokenizer = transformers.PreTrainedTokenizerFast.from_pretrained(request["checkpoint"])  # by the name of the policy it would be Qwen2's own
    samples, rewards, lengths = request["prompts"] * request["group"], [], []
    args = trl.GRPOConfig(
        output_dir=tempfile.mkdtemp(),
        per_device_train_batch_size=request["batch"],
        gradient_accumulation_steps=samples // request["batch"],
        num_generations=request["group"],
        max_completion_length=request["new_tokens"],
        max_steps=request["steps"],
        beta=0.0,
        learning_rate=1e-5,
        temperature=1.0,
        top_p=1.0,
        top_k=0,
        bf16=False,
        use_cpu=True,
        gradient_checkpointing=False,
        report_to="none",
        save_strategy="no",
        logging_steps=1,
        disable_tqdm=True,
    )

    def reward(completions: list[str], answer: list[str], completion_ids: list[list[int]], **_: Any) -> list[float]:
        found = [verify(text, right, {})["correct"] for text, right in zip(completions, answer, strict=True)]
        rewards.append(sum(found) / len(found))
        lengths.append(sum(map(len, completion_ids)) / len(completion_ids))
        return found

    clock = Clock()
    rows = datasets.Dataset.from_json(request["rows"])
    rows = rows.rename_column("question", "prompt")
    trl.GRPOTrainer(policy, reward, args=args, train_dataset=rows, processing_class=tokenizer, callbacks=[clock]).train()
    versions = {name: importlib.metadata.version(name) for name in ("trl", "transformers", "torch")}
    return {"seconds": clock.seconds, "rewards": rewards, "lengths": lengths, "versions": versions}


if __name__ == "__main__":
    serve(answer)
