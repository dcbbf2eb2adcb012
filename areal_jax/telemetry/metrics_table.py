"""Every metric by name, once: what it counts or measures, and in which unit.

Invariants:
* A name that is not here and belongs to no open family does not exist.
* ``COUNT``: 0 when nothing happened. ``MEASURE``: null when it could not be measured. ``NAME``: text, or a number that every row must have.
* Counts are of the one step (since the row before), except those since the start: ``ledger/*`` and ``drop/*`` of the run, ``compile/*`` of the
  process; and except the levels ``buffer/depth`` and ``groups/in_flight``, which are of the moment.
"""

from __future__ import annotations

import dataclasses

COUNT, MEASURE, NAME = "count", "measure", "name"


@dataclasses.dataclass(frozen=True)
class Metric:
    """One metric: ``kind`` says what its absence means, ``unit`` and ``doc`` what its value means."""

    kind: str
    unit: str
    doc: str


def _measures(unit: str, **docs: str) -> dict[str, Metric]:
    return {name: Metric(MEASURE, unit, doc) for name, doc in docs.items()}


def _under(group: str, metrics: dict[str, Metric]) -> dict[str, Metric]:
    return {f"{group}/{name}": metric for name, metric in metrics.items()}


def _count(unit: str, doc: str) -> Metric:
    return Metric(COUNT, unit, doc)


def _measure(unit: str, doc: str) -> Metric:
    return Metric(MEASURE, unit, doc)


_IDENTITY = {
    "step": Metric(NAME, "step", "number of the training step (or of the step that was last done)"),
    "time": Metric(NAME, "s", "seconds since 1970"),
    "stage": Metric(NAME, "", "what the run was doing"),
}

TRAINING: dict[str, Metric] = {
    **_IDENTITY,
    "version": Metric(NAME, "version", "the trainer's policy version after the step"),
    **_under(
        "reward",
        {
            **_measures("", mean="mean raw reward of the batch", std="its standard deviation over samples"),
            "correct_fraction": _measure("fraction", "samples whose answer is correct"),
            "zero_std_groups": _count("groups", "groups whose samples all have one reward: they teach nothing"),
            "latency_p50_s": _measure("s", "median time of a check in its worker"),
            "latency_p99_s": _measure("s", "99th percentile of it"),
            "timeouts": _count("checks", "checks killed at the time limit"),
            "errors": _count("checks", "checks that raised or whose worker died"),
        },
    ),
    **_under(
        "staleness",
        _measures(
            "versions",
            mean="trainer version − token's version, over tokens",
            p95="its 95th percentile over tokens",
            max="that of the oldest token",
            generating_mean="versions that passed while the trajectory was generated",
            buffered_mean="versions that passed while it waited to be trained",
        ),
    ),
    "staleness/coverage": _measure("fraction", "tokens whose version is known; must be 1"),
    "trajectory_spans/mean": _measure("versions", "policy versions in one trajectory"),
    "trajectory_spans/max": _measure("versions", "most policy versions in one trajectory"),
    **_under(
        "importance_weight",
        _measures(
            "",
            mean="π_prox/π_behav over tokens",
            max="its largest",
            ess="effective sample size over tokens, as a fraction",
            capped_fraction="tokens that a bound, or M2PO's filter, touched",
        ),
    ),
    "engine_gap/mean": _measure("nats", "|Δ log-prob| between trainer and sampler on tokens of the trainer's own version"),
    "engine_gap/max": _measure("nats", "its largest"),
    "engine_gap/rescored_mean": _measure("nats", "|Δ log-prob| between the sampler's and the rescored, over tokens; null without rollout.exact_logprobs"),
    "engine_gap/rescored_max": _measure("nats", "its largest"),
    "staleness_gap/mean": _measure("nats", "|Δ log-prob| on tokens of older versions"),
    "mismatch_kl/engine": _measure("nats", "KL(behaviour ‖ proximal) estimated on tokens of the trainer's own version"),
    "mismatch_kl/staleness": _measure("nats", "the same on tokens of older versions"),
    **_under("loss", _measures("", policy="policy loss", kl="KL loss, null without one", value="value loss, null without a critic")),
    "reference_kl": _measure("nats", "KL to the reference policy by algorithm.kl_estimator, mean over tokens; null without a reference"),
    "entropy": _measure("nats", "mean entropy of the policy over tokens"),
    "approx_kl": _measure("nats", "KL between the proximal and the updated policy, estimated"),
    "clip_ratio/low": _measure("fraction", "tokens whose ratio is clipped from below"),
    "clip_ratio/high": _measure("fraction", "tokens whose ratio is clipped from above"),
    "grad_norm": _measure("", "global norm before clipping, mean over minibatches"),
    "learning_rate": _measure("", "of the last update of the step"),
    "update/skipped_nonfinite": _count("updates", "updates left out because a gradient was not finite"),
    "advantage/mean": _measure("", "over tokens, after normalisation"),
    "advantage/std": _measure("", "over tokens, after normalisation"),
    **_under("response_length", _measures("tokens", mean="mean", p50="median", p90="90th percentile", max="longest")),
    "truncated_ratio": _measure("fraction", "responses ended by the length limit"),
    "prompt_length/mean": _measure("tokens", "mean length of the prompts"),
    **_under(
        "tokens_per_second",
        _measures(
            "tokens/s",
            generated="sampled",
            trained="consumed by PPO ÷ time of the step: the effective throughput",
            prefill="prefilled, re-computation after an update included",
        ),
    ),
    **_under(
        "time",
        _measures(
            "s",
            step="wall time of the step",
            train="of that, computing",
            rescore="of that, for rollout.exact_logprobs: scoring older tokens anew and keeping the version; null without",
            wait_for_batch="of that, the trainer waited for trajectories",
            wait_for_due="of the waiting, for groups about to pass η",
        ),
    ),
    "sampler/idle_fraction": _measure("fraction", "time without a dispatched program"),
    "sampler/slot_occupancy": _measure("fraction", "slots that hold a sequence, over time"),
    "sampler/kv_pages_used": _measure("pages", "pages of the KV cache that are held at the end of the step, over all replicas"),
    "sampler/preemptions": _count("sequences", "sequences put back for want of memory"),
    "sampler/version": _measure("version", "the policy version the sampler runs"),
    "sampler/interrupts": _count("sequences", "generations into which new weights came"),
    "mfu": _measure("fraction", "model FLOP/s ÷ peak of the trainer's devices; null where the peak is unknown"),
    "weight_sync/transfer_s": _measure("s", "resharding and copy of the weights, device to device"),
    "weight_sync/pause_s": _measure("s", "time the sampler did not decode for it"),
    "weight_sync/rebuild_s": _measure("s", "of that, rebuilding the KV cache"),
    "weight_sync/bytes": _count("bytes", "bytes that arrived on the sampler's devices"),
    "buffer/depth": _count("groups", "finished groups that wait to be trained"),
    "buffer/capacity": _measure("groups", "groups that may be admitted and not yet trained; null when unbounded"),
    "groups/in_flight": _count("groups", "groups admitted and not yet complete"),
    "groups/due": _count("groups", "groups of the batch that had to be in it to keep η"),
    "retries": _count("requests", "requests given out again"),
    **_under(
        "drop",
        {
            "stale": _count("groups", "would have passed η"),
            "reward_error": _count("groups", "a check failed and reward.on_failure is drop"),
            "zero_std": _count("groups", "all samples of one reward, with algorithm.dynamic_sampling"),
            "empty": _count("groups", "no token was generated"),
            "overlong_prompt": _count("prompts", "longer than task.max_prompt_tokens"),
            "worker_lost": _count("groups", "its sampler went away"),
            "lost_on_resume": _count("samples", "the checkpoint did not hold its tokens"),
        },
    ),
    **_under(
        "ledger",
        {
            "generated": _count("tokens", "sampled since the start of the run"),
            "trained": _count("tokens", "trained"),
            "dropped": _count("tokens", "dropped, by whatever reason"),
            "buffered": _count("tokens", "of finished samples that wait"),
            "in_flight": _count("tokens", "of unfinished samples"),
            "residual": _count("tokens", "generated − trained − dropped − buffered − in flight; must be 0"),
        },
    ),
    "packing/efficiency": _measure("fraction", "real ÷ computed positions"),
    "packing/balance": _measure("fraction", "work of the mean data-parallel shard ÷ of the one with most, attention counted"),
    "packing/micro_batches": _count("micro-batches", "micro-batches of the step"),
    "compile/count": _count("programs", "compilations since the start of the process"),
    "compile/steady_state": _count("programs", "compilations after the warm-up; 0 in a steady run"),
    **_under(
        "memory",
        _measures("bytes", trainer_bytes="peak on a trainer device", sampler_bytes="peak on a sampler device", host_rss_bytes="resident memory of the process"),
    ),
    "metrics/nonfinite": _count("values", "values of this row that were NaN or infinite and stand as null"),
}

EVALUATION: dict[str, Metric] = {
    **_IDENTITY,
    "eval/accuracy": _measure("fraction", "correct answers among held-out samples"),
    "eval/n": _count("problems", "held-out problems"),
    "eval/k": _count("samples", "samples a problem"),
    "eval/version": _measure("version", "the policy version that was evaluated"),
    "eval/lag_steps": _measure("steps", "trainer version at the end of the evaluation − version evaluated"),
    "eval/truncated_ratio": _measure("fraction", "responses ended by the length limit"),
    "eval/confidence95": _measure("fraction", "half width of the 95 % interval of the accuracy"),
    "eval/response_length": _measure("tokens", "mean length of a response"),
    "eval/time_s": _measure("s", "wall time of the evaluation"),
    "metrics/nonfinite": _count("values", "values of this row that were NaN or infinite and stand as null"),
}

WARMUP: dict[str, Metric] = {
    **_IDENTITY,
    "loss/supervised": _measure("nats", "cross-entropy a token"),
    "learning_rate": _measure("", "of the update"),
    "grad_norm": _measure("", "global norm before clipping"),
    "tokens_per_second/trained": _measure("tokens/s", "demonstration tokens"),
    "time/step": _measure("s", "wall time of the step"),
    "metrics/nonfinite": _count("values", "values of this row that were NaN or infinite and stand as null"),
}

_TUNING = {
    **_IDENTITY,
    "epoch": _measure("epochs", "passes over the data so far"),
    "learning_rate": _measure("", "of the update"),
    "grad_norm": _measure("", "global norm before clipping"),
    "update/skipped_nonfinite": _count("updates", "left out because their gradient was not finite"),
    "tokens_per_second/trained": _measure("tokens/s", "learnt tokens ÷ time of the step"),
    "time/step": _measure("s", "wall time of the step"),
    "metrics/nonfinite": _count("values", "values of this row that were NaN or infinite and stand as null"),
}
_PREFERENCE = {
    **_measures("nats", loss="−log σ(margin) a pair, labels smoothed", margin="β·Δ log-ratio to the reference, chosen − rejected"),
    "correct": _measure("fraction", "pairs with a margin above 0"),
    **_measures("nats", chosen_reward="β·log-ratio of the chosen answer", rejected_reward="β·log-ratio of the rejected answer"),
    **_measures("nats", chosen_logprob="log-prob of the chosen answer, summed over its tokens", rejected_logprob="of the rejected one"),
}

TUNING: dict[str, dict[str, Metric]] = {
    "sft": {**_TUNING, "loss/supervised": _measure("nats", "cross-entropy a learnt token")},
    "dpo": {**_TUNING, **_under("preference", _PREFERENCE)},
}
"""Rows of metrics.jsonl of a fine-tuning run, by its objective."""

_TUNING_EVALUATION = {
    **_IDENTITY,
    "eval/n": _count("examples", "held-out rows, or pairs"),
    "eval/tokens": _count("tokens", "held-out tokens that are learnt"),
    "eval/time_s": _measure("s", "wall time of the evaluation"),
    "metrics/nonfinite": _count("values", "values of this row that were NaN or infinite and stand as null"),
}

TUNING_EVALUATION: dict[str, dict[str, Metric]] = {
    "sft": {
        **_TUNING_EVALUATION,
        "eval/loss": _measure("nats", "cross-entropy a token, over all held-out tokens, each once"),
        "eval/perplexity": _measure("", "exp of it"),
    },
    "dpo": {**_TUNING_EVALUATION, **_under("eval", _PREFERENCE)},
}
"""Rows of eval.jsonl of a fine-tuning run, by its objective."""

FAMILIES: dict[str, Metric] = {
    "reward/": _measure("", "mean of one component of the reward"),
    "drop/": _count("groups", "dropped for this reason"),
    "eval/accuracy/": _measure("fraction", "accuracy on one kind of problem"),
}
"""Open families by prefix: any single word may follow. Their members stand in every row after the first that has them."""
