"""KL estimators, the approximated proximal policy, M2PO's filter and aggregation, against the original's numbers and definitions of their own."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from oracle_files import check, load, rows

from areal_jax.algorithms.advantages import overlong_penalty
from areal_jax.algorithms.aggregation import AGGREGATIONS, loss_weights
from areal_jax.algorithms.kl import BOUND, KL_ESTIMATORS, reference_kl
from areal_jax.algorithms.proximal import log_linear, second_moment_filter
from areal_jax.config_fields import FIELDS


def other(case):
    kind, p, x = case["kind"], case["params"], case["inputs"]
    if kind == "m2po_mask":
        mask = np.asarray(x["mask"]) > 0
        behaviour, proximal = (np.asarray(x[name], float)[mask] for name in ("behaviour_logprobs", "proximal_logprobs"))
        kept = second_moment_filter(behaviour, proximal, p["threshold"])
        dense = np.zeros(mask.shape)
        dense[mask] = kept
        moments = np.square(behaviour - proximal)[kept]
        return {"kept_mask": dense, "kept_count": kept.sum(), "kept_second_moment": moments.mean() if moments.size else 0.0}
    if kind == "proximal_log_linear":
        arrays = rows(x["behaviour_logprobs"]), rows(x["current_logprobs"]), jnp.asarray(x["token_versions"])
        return {"proximal_logprobs": log_linear(*arrays, p["current_version"], p["proximal_version"])}
    if kind == "kl_estimators":
        logprobs, base = rows(x["logprobs"]), rows(x["base_logprobs"])
        assert p["clamp"] in (None, BOUND)
        if p["clamp"] is None:
            return {name: KL_ESTIMATORS[name](logprobs - base) for name in ("k1", "k2", "k3")}
        return {name: reference_kl(name, logprobs, base, jnp.ones(logprobs.shape)) for name in ("k1", "k2", "k3")}
    if kind == "overlong_penalty":
        lengths, rewards = np.asarray(x["response_lengths"]), np.asarray(x["rewards"], float)
        return {"rewards": rewards + overlong_penalty(lengths, np.zeros(len(lengths)), p["max_length"], p["buffer"], p["factor"])}
    return None


def test_every_case_of_the_original(oracles):
    file, seen = load(oracles, "other_losses"), set()
    for case in file["cases"]:
        got = other(case)
        if got is not None:
            seen.add(case["kind"])
            check(file, case, got)
    assert seen == {"m2po_mask", "proximal_log_linear", "kl_estimators", "overlong_penalty"}


@pytest.mark.parametrize("name", sorted(KL_ESTIMATORS))
def test_kl_estimates_on_both_sides_of_the_bound_and_their_gradients(name):
    """float64 formulas and their finite differences, host and device; 0 with gradient 0 outside the mask, NaN or not."""
    formula = {"k1": lambda d: d, "k2": lambda d: d * d / 2, "k3": lambda d: np.exp(-d) - 1 + d}[name]
    d = np.asarray([-12.0, -3.0, -0.3, -0.04, -1e-4, 0.0, 1e-4, 0.04, 0.06, 2.0, 12.0, np.nan])
    mask = np.isfinite(d).astype(float)
    want = np.where(mask > 0, np.clip(formula(np.nan_to_num(d)), -BOUND, BOUND), 0.0)
    reference = np.full(len(d), -1.5)
    np.testing.assert_allclose(reference_kl(name, d + reference, reference, mask, np), want, rtol=1e-6, atol=1e-12)

    def total(logprobs):
        kl = reference_kl(name, logprobs, jnp.zeros(len(d)), jnp.asarray(mask))
        return kl.sum(), kl

    (_, kl), gradient = jax.value_and_grad(total, has_aux=True)(jnp.asarray(d, jnp.float32))
    np.testing.assert_allclose(kl, want, rtol=3e-5, atol=1e-12)
    inside = (mask > 0) & (np.abs(formula(np.nan_to_num(d))) < BOUND)
    slope = (formula(d[inside] + 1e-6) - formula(d[inside] - 1e-6)) / 2e-6
    np.testing.assert_allclose(np.asarray(gradient)[inside], slope, rtol=1e-4, atol=2e-6)
    assert not np.any(np.asarray(gradient)[~inside])


def test_log_linear_of_a_step_is_exact_for_new_tokens_and_halves_the_log_ratio_of_those_a_step_old():
    behaviour, current = jnp.asarray([-1.0, -1.0, -1.0, -1.0]), jnp.asarray([-2.0, -2.0, -2.0, -2.0])
    got = log_linear(behaviour, current, jnp.asarray([7, 6, 4, -1]), 8, 7)
    np.testing.assert_allclose(got, [-1.0, -1.5, -1.75, -1.0])


@given(data=st.data())
@settings(max_examples=60, deadline=None)
def test_the_second_moment_filter_is_the_largest_kept_set_below_the_threshold(data):
    gaps = np.asarray(data.draw(st.lists(st.floats(-2, 2, width=32), min_size=1, max_size=12)))
    threshold = data.draw(st.floats(0.01, 3.0))
    kept = second_moment_filter(gaps, np.zeros(len(gaps)), threshold)
    moments = np.sort(np.square(gaps))
    assert kept.sum() >= 1 and (kept.sum() == 1 or np.square(gaps)[kept].mean() < threshold)
    assert np.allclose(np.sort(np.square(gaps)[kept]), moments[: kept.sum()])
    if kept.sum() < len(gaps):
        assert moments[: kept.sum() + 1].mean() >= threshold


def test_the_filter_of_nothing_is_nothing():
    assert second_moment_filter(np.zeros(0), np.zeros(0), 0.1).shape == (0,)


def aggregated(name, values, lengths, ids, longest):
    """The definitions, sample by sample."""
    means = [v[:n].mean() for v, n in zip(values, lengths, strict=True) if n]
    if name == "token":
        return np.concatenate([v[:n] for v, n in zip(values, lengths, strict=True)]).mean()
    if name == "sequence":
        return np.mean(means)
    if name == "constant":
        return sum(v[:n].sum() for v, n in zip(values, lengths, strict=True)) / (len(lengths) * longest)
    groups = [np.concatenate([v[:n] for v, n, i in zip(values, lengths, ids, strict=True) if i == g]) for g in sorted(set(ids))]
    return np.mean([g.mean() for g in groups if len(g)])


@pytest.mark.parametrize("name", sorted(AGGREGATIONS))
@given(data=st.data())
@settings(max_examples=25, deadline=None)
def test_aggregation_is_its_definition_whatever_the_order_and_the_group_sizes(name, data):
    n = data.draw(st.integers(1, 9))
    lengths = np.asarray(data.draw(st.lists(st.integers(0, 6), min_size=n, max_size=n).filter(any)))
    ids = np.asarray(data.draw(st.lists(st.sampled_from([3, 11, 40]), min_size=n, max_size=n)))
    values = np.random.default_rng(n).normal(size=(n, 6))
    weights, shares = loss_weights(name, lengths, ids, 6)
    got = sum(w * v[:k].sum() for w, v, k in zip(weights, values, lengths, strict=True)) / shares.sum()
    assert got == pytest.approx(aggregated(name, values, lengths, list(ids), 6), rel=1e-9)


def test_the_tables_have_exactly_the_configurable_names():
    assert set(AGGREGATIONS) == set(FIELDS["algorithm"]["aggregation"].choices)
    assert set(KL_ESTIMATORS) == set(FIELDS["algorithm"]["kl_estimator"].choices)


def test_a_truncated_response_has_the_whole_penalty_and_a_long_one_that_ended_only_its_part():
    got = overlong_penalty(np.asarray([10, 10, 16, 20, 20]), np.asarray([False, True, False, False, True]), 20, 8, 0.5)
    np.testing.assert_allclose(got, [0.0, -0.5, -0.25, -0.5, -0.5])
    np.testing.assert_allclose(overlong_penalty(np.asarray([20, 19]), np.asarray([True, False]), 20, 0, 1.0), [-1.0, 0.0])
