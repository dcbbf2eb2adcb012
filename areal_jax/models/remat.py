"""Names of intermediate results, by which the backward pass keeps them or computes them anew.

Invariant: what is gathered over fsdp has the name ``GATHERED`` wherever it is gathered, so that no policy keeps a block's whole parameters.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax

GATHERED = "gathered"
"""A block's parameters, whole over fsdp."""
SAVED = "saved"
"""What 'dots' keeps besides plain matrix products: the attention's result with the softmax's normaliser, and the experts' gate and up products."""


def rematerialised(block: Callable[..., Any], remat: str, *, gathers: bool, scanned: bool) -> Callable[..., Any]:
    """The block with a backward pass that computes anew what ``trainer.remat`` says.

    Args:
      block: (x, parameters) -> x.
      remat: 'none', 'dots' or 'full'.
      gathers: parameters are gathered inside the block.
      scanned: the block is the body of a scan.
    """
    policies = jax.checkpoint_policies
    if remat == "none":
        # Without a policy of its own the backward pass would keep every block's gathered parameters.
        return jax.checkpoint(block, policy=_all_but_gathered, prevent_cse=not scanned) if gathers else block
    dots = policies.save_from_both_policies(policies.dots_with_no_batch_dims_saveable, policies.save_only_these_names(SAVED))
    return jax.checkpoint(block, policy={"dots": dots, "full": policies.nothing_saveable}[remat], prevent_cse=not scanned)


def _all_but_gathered(primitive: Any, *_: Any, **parameters: Any) -> bool:
    """Keeps all but what ``GATHERED`` names, before and after it is named: a change of sharding is made anew, alone or (of frozen parameters) in its rule."""
    return primitive.name not in ("sharding_constraint", "custom_vjp_call") and parameters.get("name") != GATHERED
