"""TRL's side: forward, backward and update of ``GRPOTrainer`` on samples that were drawn before.

What runs is public: ``GRPOTrainer.compute_loss`` on the inputs that its own ``_generate_and_score_completions`` returns (the whole step's samples padded
to its longest prompt and completion, then cut into micro-batches), ``accelerator.backward``, ``accelerator.clip_grad_norm_``, the optimizer that
``Trainer.create_optimizer`` makes. No reference model (beta 0), no gradient checkpointing, float32.

Requests: {checkpoint, samples, batch, threads, repeats, group}; answers: {seconds, loss, logprob, versions}.
"""

# pyright: reportMissingImports=false

from __future__ import annotations

import functools
import importlib.metadata
import tempfile
import time
from typing import Any

import datasets
import numpy as np
import tokenizers
import torch
import transformers
import trl
from serving import masks, samples, serve


def words(vocabulary: int) -> Any:
    """A tokenizer of as many words, which the trainer asks for and nothing here uses."""
    table = {"<pad>": 0, "<eos>": 1} | {f"w{i}": i for i in range(2, vocabulary)}
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel(table, unk_token="<pad>"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    return transformers.PreTrainedTokenizerFast(tokenizer_object=made, pad_token="<pad>", eos_token="<eos>")


@functools.cache
def trainer(checkpoint: str, batch: int, total: int, group: int) -> Any:
    policy = transformers.AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32, attn_implementation="sdpa")
    args = trl.GRPOConfig(
        output_dir=tempfile.mkdtemp(),
        per_device_train_batch_size=batch,
        gradient_accumulation_steps=total // batch,
        num_generations=group,
        beta=0.0,
        learning_rate=1e-5,
        bf16=False,
        use_cpu=True,
        gradient_checkpointing=False,
        report_to="none",
        save_strategy="no",
    )
    rows = datasets.Dataset.from_list([{"prompt": "w2"}] * total)
    made = trl.GRPOTrainer(
        policy, lambda completions, **_: [0.0] * len(completions), args=args, train_dataset=rows, processing_class=words(policy.config.vocab_size)
    )
    made.create_optimizer()
    made.model_wrapped, made.optimizer = made.accelerator.prepare(made.model, made.optimizer)
    made.model_wrapped.train()
    made.current_gradient_accumulation_steps = total // batch
    return made


def logprob(policy: Any, arrays: dict[str, np.ndarray], prompt: np.ndarray, completion: np.ndarray, count: int = 16) -> float:
    """Mean log-prob of the first samples' completion tokens, to see that all sides hold the same policy and the same samples."""
    tokens = torch.from_numpy(np.concatenate([arrays["prompts"], arrays["completions"]], 1)[:count])
    mask = torch.from_numpy(np.concatenate([prompt, completion], 1)[:count].astype(np.int64))
    width = arrays["prompts"].shape[1]
    with torch.no_grad():
        positions = (mask.cumsum(1) - 1).clamp(min=0)
        scores = torch.log_softmax(policy(input_ids=tokens, attention_mask=mask, position_ids=positions).logits.float(), -1)
    chosen = scores[:, width - 1 : -1].gather(2, tokens[:, width:, None])[..., 0]
    return float((chosen * mask[:, width:]).sum() / mask[:, width:].sum())


def answer(request: dict[str, Any]) -> dict[str, Any]:
    torch.set_num_threads(request["threads"])
    arrays, batch = samples(request["samples"]), request["batch"]
    total = len(arrays["prompts"])
    made = trainer(request["checkpoint"], batch, total, request["group"])
    prompt, completion = masks(arrays)
    inputs = {
        "prompt_ids": arrays["prompts"],
        "prompt_mask": prompt.astype(np.int64),
        "completion_ids": arrays["completions"],
        "completion_mask": completion.astype(np.int64),
        "advantages": arrays["advantages"],
        "old_per_token_logps": arrays["old_logprobs"],
    }
    tensors = {name: torch.from_numpy(value) for name, value in inputs.items()}
    parts = [{name: value[first : first + batch] for name, value in tensors.items()} for first in range(0, total, batch)]
    for part in parts:
        part["num_items_in_batch"] = tensors["completion_mask"].sum()
    before = logprob(made.model, arrays, prompt, completion)
    seconds, loss = [], 0.0
    for _ in range(request["repeats"]):
        began, loss = time.perf_counter(), 0.0
        for part in parts:
            value = made.compute_loss(made.model_wrapped, part)
            made.accelerator.backward(value)
            loss += float(value.detach())
        made.accelerator.clip_grad_norm_(made.model_wrapped.parameters(), made.args.max_grad_norm)
        made.optimizer.step()
        made.optimizer.zero_grad()
        seconds.append(time.perf_counter() - began)
    versions = {name: importlib.metadata.version(name) for name in ("trl", "transformers", "torch")}
    return {"seconds": seconds, "loss": loss, "logprob": before, "versions": versions}


if __name__ == "__main__":
    serve(answer)
