"""The engine's arguments that a configuration says: for the engine of a run, and for one that is only planned."""

from __future__ import annotations

from typing import Any


def engine_settings(config: Any, temperature: float | None = None) -> dict[str, Any]:
    """Keyword arguments of ``SamplerEngine``, all but its slots, longest sequence, seed and tokenizer.

    Args:
      config: a validated configuration; reads ``rollout`` and ``model``.
      temperature: of an evaluation, which samples from the whole distribution; None: the rollout's distribution.
    """
    r = config.rollout
    rollout = temperature is None
    return {
        "page_size": r.page_size,
        "pages": r.kv_pages,
        "prefill_chunk": r.prefill_chunk,
        "steps": r.steps_per_dispatch,
        "temperature": r.temperature if rollout else temperature,
        "top_k": r.top_k if rollout else 0,
        "top_p": r.top_p if rollout else 1.0,
        "dtype": config.model.sampler_dtype,
        "attention": config.model.attention,
    }
