"""The policy once more, in float64 numpy with plain loops over positions and heads; shares no code with areal_jax.

A ``Decoder`` takes one token at a time and keeps its keys and values, so that a test may change the weights in between.
"""

import numpy as np


def norm(x, scale, epsilon):
    return x / np.sqrt(np.mean(x * x) + epsilon) * scale


def rotate(head, position, theta):
    """Rotary position: pairs (i, i + d/2) are complex numbers turned by position · theta^(−2i/d)."""
    half = len(head) // 2
    turned = (head[:half] + 1j * head[half:]) * np.exp(1j * position * theta ** (-2.0 * np.arange(half) / len(head)))
    return np.concatenate([turned.real, turned.imag])


def swiglu(gate, up, down, h):
    opened = h @ gate
    return (opened / (1 + np.exp(-opened)) * (h @ up)) @ down


def mixture(model, p, h):
    """The chosen experts of one token, one after another."""
    scores = h @ p["router"]["kernel"]
    probabilities = np.exp(scores - scores.max())
    probabilities /= probabilities.sum()
    chosen = np.argsort(-probabilities)[: model.experts_per_token]
    whole = probabilities[chosen].sum() if model.normalise_experts else 1.0
    experts = p["experts"]
    return sum(probabilities[e] / whole * swiglu(*(experts[name]["kernel"][e] for name in ("gate", "up", "down")), h) for e in chosen)


def as_float64(params):
    return {k: as_float64(v) for k, v in params.items()} if isinstance(params, dict) else np.asarray(params, np.float64)


class Decoder:
    """One sequence; ``step`` returns the logits [vocab] after a token."""

    def __init__(self, model):
        self.model = model
        self.keys = [[] for _ in range(model.layers)]
        self.values = [[] for _ in range(model.layers)]

    def step(self, params, token, position=None):
        m = self.model
        position = len(self.keys[0]) if position is None else position
        x = params["embedding"][token]
        for i in range(m.layers):
            p = params["layers"][f"layer_{i}"]
            x = x + self._attention(p["attention"], i, norm(x, p["attention_norm"]["scale"], m.norm_epsilon), position)
            h = norm(x, p["mlp_norm"]["scale"], m.norm_epsilon)
            x = x + (mixture(m, p["mlp"], h) if m.experts else swiglu(*(p["mlp"][name]["kernel"] for name in ("gate", "up", "down")), h))
        x = norm(x, params["final_norm"]["scale"], m.norm_epsilon)
        return x @ (params["embedding"].T if m.tie_embeddings else params["lm_head"]["kernel"])

    def _attention(self, p, layer, x, position):
        m = self.model

        def project(name, count):
            y = x @ p[name]["kernel"] + (p[name]["bias"] if m.family == "qwen2" else 0.0)
            return y.reshape(count, m.head_dim)

        query, key, value = project("query", m.heads), project("key", m.kv_heads), project("value", m.kv_heads)
        if m.family in ("qwen3", "qwen3_moe"):
            query = np.stack([norm(h, p["query_norm"]["scale"], m.norm_epsilon) for h in query])
            key = np.stack([norm(h, p["key_norm"]["scale"], m.norm_epsilon) for h in key])
        self.keys[layer].append(np.stack([rotate(h, position, m.rope_theta) for h in key]))
        self.values[layer].append(value)
        mixed = []
        for h in range(m.heads):
            shared = h // (m.heads // m.kv_heads)
            turned = rotate(query[h], position, m.rope_theta)
            scores = np.array([turned @ k[shared] for k in self.keys[layer]]) / np.sqrt(m.head_dim)
            weights = np.exp(scores - scores.max())
            weights /= weights.sum()
            mixed.append(sum(w * v[shared] for w, v in zip(weights, self.values[layer], strict=True)))
        return np.concatenate(mixed) @ p["output"]["kernel"]


def logits(model, params, tokens, positions=None):
    """Logits float64 [length, vocab] of one sequence."""
    decoder = Decoder(model)
    positions = range(len(tokens)) if positions is None else positions
    return np.stack([decoder.step(params, int(t), int(p)) for t, p in zip(tokens, positions, strict=True)])
