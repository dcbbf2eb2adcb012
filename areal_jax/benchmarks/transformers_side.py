"""The same load through ``transformers``' generate, in a process of its own: what a user would otherwise run.

Invariants:
* Nothing of torch or ``transformers`` is imported before it is asked for, nor in the process that runs the sampler.
* Batches are taken in the order of arrival, padded on the left, and each runs to its longest request; only wanted tokens count.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import functools
import importlib.util
import multiprocessing
import time
from typing import Any

from areal_jax.benchmarks.loads import Load
from areal_jax.config import ConfigError
from areal_jax.models.architecture import ModelConfig
from areal_jax.models.config_json import config_json


def check_installed() -> None:
    """Refuses to go on without the packages.

    Raises:
      ConfigError: naming what is missing.
    """
    missing = [name for name in ("torch", "transformers", "safetensors") if importlib.util.find_spec(name) is None]
    if missing:
        raise ConfigError(f"a comparison with transformers needs {' and '.join(missing)}, not installed here; pip install torch transformers safetensors")


class TransformersSide:
    """A process that holds a checkpoint in float32 and generates with it; a context manager.

    Args:
      directory: of the checkpoint.
    """

    def __init__(self, directory: str):
        check_installed()
        self._directory = directory
        self._pool = concurrent.futures.ProcessPoolExecutor(1, multiprocessing.get_context("spawn"))

    def __enter__(self) -> TransformersSide:
        return self

    def __exit__(self, *_: Any) -> None:
        self._pool.shutdown()

    def save_random(self, model: ModelConfig, seed: int) -> None:
        """Puts a new Qwen2 policy of these sizes into the directory, by ``transformers`` itself.

        Raises:
          ConfigError: the architecture is another.
        """
        if model.family != "qwen2":
            raise ConfigError(f"a new policy for transformers must be of the family qwen2; got {model.family}; save one yourself and name it by --model")
        sizes = config_json(dataclasses.replace(model, eos_ids=(1,)), "float32", {})  # a checkpoint names an end token; neither side stops at it here
        if model.head_dim * model.heads != model.hidden_size:
            raise ConfigError(f"transformers' Qwen2 has heads · head_dim = hidden_size; got {model.heads} · {model.head_dim} and {model.hidden_size}")
        self._pool.submit(_save_random, self._directory, sizes, seed).result()

    def seconds(self, load: Load, batch: int, threads: int) -> float:
        """Of generating a load in batches of ``batch`` with so many threads."""
        return self._pool.submit(_generate, self._directory, load, batch, threads).result()


def _save_random(directory: str, sizes: dict[str, Any], seed: int) -> None:
    import torch  # pyright: ignore[reportMissingImports]
    from transformers import Qwen2Config, Qwen2ForCausalLM  # pyright: ignore[reportMissingImports]

    torch.manual_seed(seed)
    Qwen2ForCausalLM(Qwen2Config(**sizes)).save_pretrained(directory)


@functools.cache
def _policy(directory: str) -> Any:
    import torch  # pyright: ignore[reportMissingImports]
    from transformers import AutoModelForCausalLM  # pyright: ignore[reportMissingImports]

    policy = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32, attn_implementation="sdpa").eval()
    policy.generation_config.eos_token_id = None
    policy.generation_config.pad_token_id = 0
    return policy


def _generate(directory: str, load: Load, batch: int, threads: int) -> float:
    """Seconds of the whole load."""
    import torch  # pyright: ignore[reportMissingImports]

    torch.set_num_threads(threads)
    torch.manual_seed(0)
    policy = _policy(directory)
    began = time.perf_counter()
    with torch.inference_mode():
        for first in range(0, len(load.lengths), batch):
            prompts, lengths = load.prompts[first : first + batch], load.lengths[first : first + batch]
            width = max(len(prompt) for prompt in prompts)
            tokens, mask = (torch.zeros((len(prompts), width), dtype=torch.long) for _ in range(2))
            for row, prompt in enumerate(prompts):
                tokens[row, width - len(prompt) :] = torch.from_numpy(prompt.astype("int64"))
                mask[row, width - len(prompt) :] = 1
            out = policy.generate(
                input_ids=tokens,
                attention_mask=mask,
                do_sample=True,
                temperature=1.0,
                top_k=0,
                top_p=1.0,
                max_new_tokens=max(lengths),
                use_cache=True,
            )
            if out.shape[1] != width + max(lengths):
                raise RuntimeError(f"generate made {out.shape[1] - width} tokens of {max(lengths)}: an end token is set")
    return time.perf_counter() - began
