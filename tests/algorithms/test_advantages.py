"""Advantages against the original's numbers and the properties that the paper's setting has."""

import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from areal_jax.algorithms import advantages as adv
from areal_jax.config_fields import FIELDS


def check(file, case, got):
    for key, want in case["outputs"].items():
        want = np.asarray(want, float)
        tolerance = case.get("tolerance")
        relative = (tolerance or file["tolerance"])["rtol"]
        absolute = tolerance["atol"] if tolerance else file["tolerance"]["atol_of_largest"] * np.abs(want).max(initial=0.0)
        np.testing.assert_allclose(np.asarray(got[key], float), want, rtol=relative, atol=absolute, err_msg=f"{case['name']}/{key}")


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
    file = json.loads((oracles / "advantage_normalisation.json").read_text())
    kinds = set()
    for case in file["cases"]:
        kinds.add(case["kind"])
        check(file, case, normalisation(case))
    assert kinds == {"batch_token", "group_token", "group_sequence", "group_then_broadcast", "pipeline"}


def test_every_gae_case_of_the_original(oracles):
    file = json.loads((oracles / "gae.json").read_text())
    kinds = set()
    for case in file["cases"]:
        kinds.add(case["kind"])
        p, x = case["params"], arrays_of(case)
        if case["kind"] == "token_gae":
            advantages, returns = adv.gae(x["rewards"], x["mask"], p["gamma"], p["lam"], x["values"], x["bootstrap_value"])
            check(file, case, {"advantages": advantages, "returns": returns})
        else:
            scaled = adv.scale_rewards(x["reward"], p["reward_scale"], p["reward_bias"], p["reward_clip"])
            rewards = adv.outcome_rewards(scaled, x["mask"], x["behaviour_logprobs"], x["reference_logprobs"], p["kl_coefficient"])
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
