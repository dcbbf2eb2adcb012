"""Advantages against the original's numbers and the properties that the paper's setting has."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from oracle_files import check, load

from areal_jax.algorithms import advantages as adv
from areal_jax.algorithms.kl import reference_kl
from areal_jax.config_fields import FIELDS


def arrays_of(case):
    return {name: None if value is None else np.asarray(value, float) for name, value in case["inputs"].items()}


def normalisation(case):
    kind, p, x = case["kind"], case["params"], arrays_of(case)
    if kind == "batch_token":
        return {"normalised": adv.normalise(x["values"], x["mask"], None, "group", p["unbiased"], p["eps"])}
    if kind == "group_token":
        return {"normalised": adv.normalise(x["values"], x["mask"], x["group_ids"], p["std_level"], p["unbiased"], p["eps"])}
    if kind == "group_sequence":
        if not p["unbiased"]:
            column = x["rewards"][:, None]
            return {"advantages": adv.normalise(column, np.ones_like(column), x["group_ids"], "group", False, p["eps"])[:, 0]}
        return {"advantages": getattr(adv, p["method"])(x["rewards"], x["group_ids"])}
    if kind == "group_then_broadcast":
        return {"advantages": adv.ADVANTAGES[p["method"]](x["rewards"], x["group_ids"], x["mask"])}
    assert kind == "pipeline"
    scaled = adv.scale_rewards(x["rewards"], p["reward_scale"], p["reward_bias"], 20.0)
    return {"advantages": adv.normalise(adv.ADVANTAGES[p["method"]](scaled, x["group_ids"], x["mask"], p["gamma"], p["lam"]), x["mask"])}


def test_every_normalisation_case_of_the_original(oracles):
    file = load(oracles, "advantage_normalisation")
    kinds = set()
    for case in file["cases"]:
        kinds.add(case["kind"])
        check(file, case, normalisation(case))
    assert kinds == {"batch_token", "group_token", "group_sequence", "group_then_broadcast", "pipeline"}


def test_every_gae_case_of_the_original(oracles):
    file = load(oracles, "gae")
    kinds = set()
    for case in file["cases"]:
        kinds.add(case["kind"])
        p, x = case["params"], arrays_of(case)
        if case["kind"] == "token_gae":
            advantages, returns = adv.gae(x["rewards"], x["mask"], p["gamma"], p["lam"], x["values"], x["bootstrap_value"])
            check(file, case, {"advantages": advantages, "returns": returns})
        else:
            scaled = adv.scale_rewards(x["reward"], p["reward_scale"], p["reward_bias"], p["reward_clip"])
            penalties = None
            if x["reference_logprobs"] is not None:
                penalties = p["kl_coefficient"] * reference_kl("k1", x["behaviour_logprobs"], x["reference_logprobs"], x["mask"], np)
            rewards = adv.outcome_rewards(scaled, x["mask"], penalties)
            advantages, returns = adv.gae(rewards, x["mask"], p["gamma"], p["lam"], x["values"])
            check(file, case, {"token_rewards": rewards, "advantages": advantages, "returns": returns})
    assert kinds == {"token_gae", "outcome_reward"}


def test_the_table_has_exactly_the_configurable_names():
    assert set(adv.ADVANTAGES) == set(FIELDS["algorithm"]["advantage"].choices)


@pytest.mark.parametrize("name", sorted(adv.ADVANTAGES))
@given(data=st.data())
@settings(max_examples=25, deadline=None)
def test_order_of_samples_does_not_matter(name, data):
    n = data.draw(st.integers(2, 12))
    rewards = np.asarray(data.draw(st.lists(st.sampled_from([-5.0, 5.0]), min_size=n, max_size=n)))
    ids = np.asarray(data.draw(st.lists(st.integers(0, 3), min_size=n, max_size=n)))
    lengths = np.asarray(data.draw(st.lists(st.integers(1, 5), min_size=n, max_size=n)))
    order = np.asarray(data.draw(st.permutations(range(n))))
    mask = np.arange(5) < lengths[:, None]
    straight = adv.ADVANTAGES[name](rewards, ids, mask)
    shuffled = adv.ADVANTAGES[name](rewards[order], ids[order], mask[order])
    np.testing.assert_allclose(shuffled, straight[order], atol=1e-9)
    assert (straight[~mask] == 0).all()


def test_batch_advantages_have_mean_0_and_deviation_1_over_tokens():
    random = np.random.default_rng(0)
    mask = np.arange(30) < random.integers(1, 31, 64)[:, None]
    result = adv.ADVANTAGES["batch"](random.choice([-5.0, 5.0], 64), np.arange(64) // 8, mask)[mask]
    assert abs(result.mean()) < 1e-12 and abs(result.std(ddof=1) - 1) < 1e-5
    assert abs(adv.ADVANTAGES["grpo"](random.choice([-5.0, 5.0], 64), np.arange(64) // 8, mask)[mask].mean()) > 1e-4


def test_reinforce_pp_normalises_what_the_penalties_left_over_all_tokens():
    """Float64, by hand: A_t = r - Σ of the penalties from t on, then (A - mean)/(std + ε) over all tokens."""
    rewards, ids, lengths = np.asarray([5.0, -5.0, 5.0]), np.asarray([4, 4, 9]), (2, 3, 1)
    mask = np.arange(3) < np.asarray(lengths)[:, None]
    penalties = np.where(mask, [[0.5, 1.0, 9.0], [0.0, -0.5, 0.25], [2.0, 9.0, 9.0]], np.nan)
    raw = [[3.5, 4.0], [-4.75, -4.75, -5.25], [3.0]]
    flat = np.concatenate(raw)
    want = (flat - flat.mean()) / (flat.std(ddof=1) + adv.EPSILON)
    np.testing.assert_allclose(adv.ADVANTAGES["reinforce_pp"](rewards, ids, mask, 1.0, 1.0, penalties)[mask], want, rtol=1e-12)
    centred = [[0.0 + 5.0 - 1.5, 5.0 - 1.0], [-5.0 + 0.25, -5.0 + 0.25, -5.0 - 0.25], [0.0 - 2.0]]
    flat = np.concatenate(centred)
    want = (flat - flat.mean()) / (flat.std(ddof=1) + adv.EPSILON)
    np.testing.assert_allclose(adv.ADVANTAGES["reinforce_pp_baseline"](rewards, ids, mask, 1.0, 1.0, penalties)[mask], want, rtol=1e-12)


@pytest.mark.parametrize("name", sorted(adv.ADVANTAGES))
@given(data=st.data())
@settings(max_examples=30, deadline=None)
def test_groups_of_one_partial_groups_and_equal_rewards_are_defined(name, data):
    """Whatever the sizes, nothing exceeds what the count of tokens allows, though rewards may differ by less than float64 tells apart."""
    n = data.draw(st.integers(1, 10))
    ids = np.asarray(data.draw(st.lists(st.integers(0, 4), min_size=n, max_size=n)))
    rewards = np.asarray(data.draw(st.lists(st.sampled_from([0.1 + 0.2, 0.3, 0.3 + 1e-9, 5.0, -5.0]), min_size=n, max_size=n)))
    lengths = np.asarray(data.draw(st.lists(st.integers(0, 4), min_size=n, max_size=n)))
    mask = np.arange(4) < lengths[:, None]
    got = adv.ADVANTAGES[name](rewards, ids, mask)
    assert np.isfinite(got).all() and np.abs(got).max() <= max(20.0, np.sqrt(mask.sum()))
    equal = adv.ADVANTAGES[name](np.full(n, 0.1 + 0.2), ids, mask)
    assert np.abs(equal).max() < 1e-9
    if name in ("grpo", "dr_grpo", "rloo", "lite_ppo"):
        alone = np.asarray([np.sum(ids == i) == 1 for i in ids])
        assert not np.any(got[alone])
