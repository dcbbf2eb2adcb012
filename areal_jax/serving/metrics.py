"""The server's state in Prometheus' text format.

Invariant: names and units follow Prometheus' conventions; counters end in ``_total`` and never fall.
"""

from __future__ import annotations

from collections.abc import Iterator

from areal_jax.serving.service import Service


def _values(service: Service) -> Iterator[tuple[str, str, str, float]]:
    """(name, type, meaning, value)."""
    totals = service.totals
    running = min(service.unfinished, service.slots)
    yield "slots", "gauge", "samples that can be decoded together", service.slots
    yield "samples_unfinished", "gauge", "samples waiting or running", service.unfinished
    yield "samples_waiting", "gauge", "samples beyond the slots", service.unfinished - running
    if service.pages is not None:
        used, every = service.pages
        yield "kv_pages_used", "gauge", "pages of the KV cache that are held", used
        yield "kv_pages_free", "gauge", "pages of the KV cache that are free", every - used
    yield "draining", "gauge", "1 while the server refuses new requests and finishes the running ones", service.draining
    yield "requests_total", "counter", "requests taken", totals.requests
    yield "requests_refused_total", "counter", "requests refused because too many were waiting", totals.refused
    yield "samples_total", "counter", "samples taken", totals.samples
    yield "samples_cancelled_total", "counter", "samples ended by a stop text, a disconnect or the time limit", totals.cancelled
    yield "prompt_tokens_total", "counter", "tokens of prompts taken", totals.prompt_tokens
    yield "generated_tokens_total", "counter", "tokens generated", totals.generated_tokens


def exposition(service: Service) -> str:
    """The text of /metrics."""
    lines = []
    for name, kind, meaning, value in _values(service):
        full = f"areal_jax_{name}"
        lines += [f"# HELP {full} {meaning}", f"# TYPE {full} {kind}", f"{full} {float(value):g}"]
    return "\n".join(lines) + "\n"
