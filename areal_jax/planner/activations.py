"""Working memory of the program that accumulates a micro-batch's gradient: what the forward pass keeps, and the fullest moment of the backward pass.

Invariants:
* Everything is a whole number of named arrays of one device: hidden [tokens, hidden], wide [tokens, mlp / tensor], query [tokens, heads / tensor · head_dim],
  key [tokens, kv_heads / tensor · head_dim], where tokens are the rows · positions of a device.
* The numbers of arrays are read off XLA's buffer assignment for scanned blocks with blockwise attention, those with adapters fitted to compiled
  programs; tests compare the sum with the compiled program's on several meshes. An unrolled program keeps no stacks, and the compiler may order it
  so that it holds more, or less: its plan was seen 14 % off.

Two moments compete. When the head's gradient is computed the kept activations and the stacked weights lie there, the logits of a chunk, the whole
head and its gradient. When the last block goes backward the head's gradient is divided already; there are the stack, its gradient and one block at work.
"""

from __future__ import annotations

import dataclasses

from areal_jax.models.architecture import ModelConfig
from areal_jax.models.attention import PLAIN_LENGTH
from areal_jax.models.forward import SCAN_FROM
from areal_jax.models.work import matrices
from areal_jax.planner.counts import item, trained_elements
from areal_jax.planner.setup import Setup


@dataclasses.dataclass(frozen=True)
class Arrays:
    """Numbers of arrays of each shape."""

    wide: int
    hidden: int
    query: int
    key: int

    def elements(self, sizes: Arrays) -> int:
        """Their elements, for the elements of one of each shape."""
        return self.wide * sizes.wide + self.hidden * sizes.hidden + self.query * sizes.query + self.key * sizes.key


KEPT = {
    # The block's input alone.
    "full": Arrays(wide=0, hidden=1, query=0, key=0),
    # Also the results of its products (gate and up; q, k, v; the attention's and the MLP's output) and the attention's result.
    "dots": Arrays(wide=2, hidden=2, query=2, key=2),
    # Also both norms' inner values, SiLU's and its derivative's factors, rotated and folded q and k.
    "none": Arrays(wide=6, hidden=7, query=4, key=3),
}
AT_WORK = {
    # Gate, up, SiLU's value and factor, their product, and the three gradients; both norms' values and the residual's gradient; q, k, v and theirs.
    "full": Arrays(wide=8, hidden=9, query=4, key=4),
    "dots": Arrays(wide=7, hidden=6, query=5, key=4),
    "none": Arrays(wide=5, hidden=11, query=1, key=1),
}
WIDENED_AT_WORK = {"full": Arrays(wide=6, hidden=9, query=4, key=4)}
"""Where products are widened to float32: half of 'full's eight wide arrays stay in bfloat16."""
ADAPTED_WIDENED = -2
"""Wide arrays less that a block with adapters holds there; fitted to one compiled program, not derived."""
LAYERS = {"wide": ("gate", "up"), "hidden": ("output", "down"), "query": ("query",), "key": ("key", "value")}
"""Layers of a block by the shape of their results."""
SCORES = 4
"""Float32 arrays of attention scores that its backward pass holds instead of the wide ones: weights, their gradients, and what a product transposes
(3 to 5, as the CPU's compiler lays the products out; small beside the wide arrays in all but tiny policies)."""
BLOCK = 512
"""Queries and keys whose scores blockwise attention holds at once."""
REDUCED = 3
"""Hidden arrays more with a tensor axis: the partial sums of the two divided products and of their inputs' gradient."""
LOGITS = 3
"""Float32 arrays [chunk, vocab / tensor]: logits, their exponentials, the gradient."""
FINAL = 5
"""Hidden arrays at the head: the last block's output, its norm, both their gradients, and the chunks."""


def adapted_products(model: ModelConfig) -> Arrays:
    """Results of adapters' products in a block, which 'dots' keeps beside those of the kernels."""
    names = model.lora.targets if model.lora else ()
    count = {size: sum(name in names for name in layers) for size, layers in LAYERS.items()}
    return Arrays(**count)


def adapted_at_work(model: ModelConfig) -> dict[str, int]:
    """Wide arrays more that a block with adapters holds at once: the results of theirs where they are computed anew, less the kernels' gradients."""
    wide = sum(name in model.lora.targets for name in ("gate", "up", "down")) if model.lora else 0
    return {"full": wide, "dots": -1 if model.lora else 0, "none": 0}


def scanned(setup: Setup) -> bool:
    """Whether the blocks run under a scan."""
    scan = setup.config.model.scan_layers
    return setup.model.layers >= SCAN_FROM if scan is None else scan


def score_elements(setup: Setup) -> int:
    """Attention scores of a device that exist at once."""
    m, axes, attention, length = setup.model, setup.trainer, setup.config.model.attention, setup.config.trainer.micro_batch_tokens
    plain = attention == "plain" or (attention == "auto" and length <= PLAIN_LENGTH)
    queries, keys = (length // axes.context, length) if plain else (min(BLOCK, length), min(BLOCK, length))
    return setup.rows * m.heads // axes.tensor * queries * keys


def activation_parts(setup: Setup, widened: bool | None = None) -> dict[str, int]:
    """Bytes of a device at the fullest moment, by part.

    Args:
      setup: what is planned.
      widened: for a compiler that computes bfloat16 products in float32; None: where the topology's does.
    """
    m, axes, t, w = setup.model, setup.trainer, setup.config.trainer, matrices(setup.model)
    c = item(m.dtype)
    widened = c < 4 and (setup.topology.chip.name == "cpu" if widened is None else widened)
    a = 4 if widened else c
    tokens, parts = setup.local_tokens, axes.fsdp * axes.tensor
    kept_keys = m.kv_heads // (axes.tensor if m.kv_heads % axes.tensor == 0 else 1) * m.head_dim * tokens
    sizes = Arrays(
        wide=tokens * (m.expert_mlp_size * m.experts_per_token if m.experts else m.mlp_size) // axes.tensor,
        hidden=tokens * m.hidden_size,
        query=tokens * m.heads // axes.tensor * m.head_dim,
        key=kept_keys * axes.context,
    )
    at_work = WIDENED_AT_WORK.get(t.remat, AT_WORK[t.remat]) if widened else AT_WORK[t.remat]
    adapted = ADAPTED_WIDENED if m.lora and widened and t.remat == "full" else adapted_at_work(m)[t.remat]
    at_work = dataclasses.replace(at_work, wide=at_work.wide + adapted)
    stack = m.layers * (w.block + w.adapters) // parts if scanned(setup) else 0
    trained = int(trained_elements(m, axes)) if m.lora else stack
    kept = m.layers * (KEPT[t.remat].elements(sizes) + (adapted_products(m).elements(sizes) if t.remat == "dots" else 0)) * a
    whole = w.block // axes.tensor if axes.fsdp > 1 else 2 * m.hidden_size * m.mlp_size // axes.tensor
    wide = at_work.wide * sizes.wide * a
    narrow = dataclasses.replace(at_work, wide=0).elements(sizes) * a
    one = max(wide, SCORES * score_elements(setup) * 4) + narrow + whole * a + (REDUCED * sizes.hidden * a if axes.tensor > 1 else 0)
    head = w.head // axes.tensor
    chunk = min(tokens, t.logprob_chunk) * m.vocab_size // axes.tensor * 4
    scores = LOGITS * chunk + head * (a + (0 if m.lora else 4 + (4 if axes.fsdp == 1 else 0))) + FINAL * sizes.hidden * a
    divided = 0 if m.lora else 2 * head // axes.fsdp * 4
    backward = {"gradient of the copy": trained * a if scanned(setup) else 0, "one block's backward pass": one, "gradients of head and embedding": divided}
    forward = {"logits, head and its gradient": scores}
    fullest = max((backward, forward), key=lambda moment: sum(moment.values()))
    return {"compute copy of the blocks": stack * c, "kept activations": kept, **fullest}
