"""The one table between a parameter's name and the tensors that hold it in a Hugging Face checkpoint.

Invariants:
* Loading and export both go by this table; a parameter without a line has no place in a checkpoint.
* Linear kernels are stored [out, in]; here they are [in, out]. A stack of experts [experts, in, out] is one stored tensor an expert.
"""

from __future__ import annotations

import dataclasses

STORED_NAMES = {
    "embedding": "model.embed_tokens.weight",
    "final_norm/scale": "model.norm.weight",
    "lm_head/kernel": "lm_head.weight",
    "attention_norm/scale": "input_layernorm.weight",
    "attention/query/kernel": "self_attn.q_proj.weight",
    "attention/query/bias": "self_attn.q_proj.bias",
    "attention/key/kernel": "self_attn.k_proj.weight",
    "attention/key/bias": "self_attn.k_proj.bias",
    "attention/value/kernel": "self_attn.v_proj.weight",
    "attention/value/bias": "self_attn.v_proj.bias",
    "attention/output/kernel": "self_attn.o_proj.weight",
    "attention/query_norm/scale": "self_attn.q_norm.weight",
    "attention/key_norm/scale": "self_attn.k_norm.weight",
    "mlp_norm/scale": "post_attention_layernorm.weight",
    "mlp/gate/kernel": "mlp.gate_proj.weight",
    "mlp/up/kernel": "mlp.up_proj.weight",
    "mlp/down/kernel": "mlp.down_proj.weight",
    "mlp/router/kernel": "mlp.gate.weight",
    "mlp/experts/gate/kernel": "mlp.experts.{expert}.gate_proj.weight",
    "mlp/experts/up/kernel": "mlp.experts.{expert}.up_proj.weight",
    "mlp/experts/down/kernel": "mlp.experts.{expert}.down_proj.weight",
}
"""Names here (inside a block, or at the top) to names there."""


@dataclasses.dataclass(frozen=True)
class Stored:
    """How a parameter is stored.

    Attributes:
      names: of its tensors: one, or one for each entry of the parameter's first axis.
      shape: of each of them.
      stacked: the parameter's first axis counts the tensors.
      transposed: [out, in] there, [in, out] here.
    """

    names: tuple[str, ...]
    shape: tuple[int, ...]
    stacked: bool
    transposed: bool


def stored(path: str, shape: tuple[int, ...]) -> Stored:
    """'layers/layer_3/mlp/up/kernel' [in, out] → 'model.layers.3.mlp.up_proj.weight' [out, in].

    Raises:
      KeyError: the parameter has no line in ``STORED_NAMES``.
    """
    prefix, inner = "", path
    if path.startswith("layers/layer_"):
        layer, inner = path.removeprefix("layers/layer_").split("/", 1)
        prefix = f"model.layers.{layer}."
    if inner not in STORED_NAMES:
        raise KeyError(f"no stored name for the parameter '{path}'; add a line to STORED_NAMES")
    name = prefix + STORED_NAMES[inner]
    stacked, transposed = "{expert}" in name, path.endswith("/kernel")
    names = tuple(name.replace("{expert}", str(expert)) for expert in range(shape[0])) if stacked else (name,)
    own = shape[1:] if stacked else shape
    return Stored(names, own[::-1] if transposed else own, stacked, transposed)
