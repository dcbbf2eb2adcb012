"""The rules that join keys of the ``algorithm`` section with one another and with the rest.

Invariant: nothing here imports JAX.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

OF_GROUPS = ("grpo", "dr_grpo", "rloo", "reinforce_pp_baseline", "lite_ppo")
"""Advantages that compare the samples of a prompt."""
EITHER = ("gspo", "cispo", "sapo", "reinforce")
"""Losses that are decoupled or not, as ``algorithm.decoupled`` says."""
CORRECTED = ("decoupled_ppo", "cispo", "m2po")
"""Losses that weigh each token by its policy over π_behav in any case."""


def weighted(section: Any) -> bool:
    """Whether π_prox/π_behav multiplies the loss."""
    return section.loss == "decoupled_ppo" or (section.decoupled and section.loss in EITHER)


def algorithm_rules(c: Any) -> Iterator[tuple[bool, str]]:
    """(broken, message) of every rule about the algorithm."""
    a, r = c.algorithm, c.rollout
    yield (
        a.advantage in OF_GROUPS and r.group_size < 2,
        f"'algorithm.advantage={a.advantage}' compares the samples of a group, so 'rollout.group_size' must be at least 2; got {r.group_size}; "
        "or set 'algorithm.advantage=batch'",
    )
    yield (
        r.max_staleness != 0 and not a.allow_uncorrected_staleness and not weighted(a) and a.loss not in CORRECTED,
        f"'algorithm.loss={a.loss}' does not correct for the policy that sampled a token, so 'rollout.max_staleness' must be 0; got {r.max_staleness}; set "
        + ("'algorithm.decoupled=True'" if a.loss in EITHER else "'algorithm.loss=decoupled_ppo'")
        + ", or 'algorithm.allow_uncorrected_staleness=True' to run it all the same",
    )
    yield (
        a.decoupled and a.loss not in (*EITHER, "decoupled_ppo"),
        f"'algorithm.decoupled=True' is for {', '.join(EITHER)}; got 'algorithm.loss={a.loss}'; "
        + ("set 'algorithm.loss=decoupled_ppo'" if a.loss == "ppo" else "leave it out"),
    )
    for key in ("importance_weight_cap", "importance_weight_floor"):
        yield (
            a[key] is not None and not weighted(a),
            f"'algorithm.{key}' bounds π_prox/π_behav, which 'algorithm.loss={a.loss}' does not have; got {a[key]}; set it to None or use "
            + ("'algorithm.decoupled=True'" if a.loss in EITHER else "'algorithm.loss=decoupled_ppo'"),
        )
    yield (
        a.importance_weight_floor is not None and a.importance_weight_cap is not None and a.importance_weight_floor > a.importance_weight_cap,
        f"'algorithm.importance_weight_floor' must be at most 'algorithm.importance_weight_cap'; got {a.importance_weight_floor} > {a.importance_weight_cap}",
    )
    yield (
        a.dual_clip is not None and a.loss not in ("decoupled_ppo", "ppo", "gspo"),
        f"'algorithm.dual_clip' bounds a clipped surrogate, which 'algorithm.loss={a.loss}' is not; got {a.dual_clip}; set it to None",
    )
    for broken, wanted in (
        (a.loss == "m2po", "recompute, as 'algorithm.loss=m2po' filters by π_prox of the whole batch"),
        (r.exact_logprobs, "recompute, as 'rollout.exact_logprobs' sets π_behav of the newest tokens to π_prox"),
    ):
        yield a.proximal == "log_linear" and broken, f"'algorithm.proximal' must be {wanted}; got log_linear"
    yield (
        a.overlong_penalty > 0 and a.overlong_buffer > r.max_new_tokens,
        f"'algorithm.overlong_buffer' must be at most 'rollout.max_new_tokens' = {r.max_new_tokens}; got {a.overlong_buffer}",
    )
    yield (
        a.overlong_buffer > 0 and not a.overlong_penalty,
        f"'algorithm.overlong_buffer' = {a.overlong_buffer} needs the penalty that rises over it; got 'algorithm.overlong_penalty' = 0; set it, as to 1",
    )
    yield (
        a.dynamic_sampling and r.group_size < 2,
        f"'algorithm.dynamic_sampling' drops groups of equal rewards, so 'rollout.group_size' must be at least 2; got {r.group_size}",
    )
