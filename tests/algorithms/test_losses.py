"""Policy losses against the original's numbers, float64 references written here, and finite differences of these."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from oracle_files import check, evaluated, load, rows

from areal_jax.algorithms.losses import POLICY_LOSSES, LossSettings, Tokens, masked_sum, policy_loss, settings_of
from areal_jax.config import base_config
from areal_jax.config_fields import FIELDS


def test_the_table_has_exactly_the_configurable_names():
    assert set(POLICY_LOSSES) == set(FIELDS["algorithm"]["loss"].choices)


def test_every_ppo_case_of_the_original(oracles):
    file = load(oracles, "decoupled_ppo")
    assert len(file["cases"]) >= 15
    for case in file["cases"]:
        check(file, case, ppo_case(case))


def ppo_case(case):
    p, proximal = case["params"], case["inputs"]["proximal_logprobs"]
    settings = LossSettings(
        p["eps_clip_low"],
        p["eps_clip_high"],
        p["dual_clip"],
        p["weight_cap"] if p["weight_mode"] != "full" else None,
        p["weight_floor"],
        "mask" if p["weight_mode"] == "mask" else "truncate",
        {"token": "token", "sequence": "geometric"}[p["weight_level"]],
    )
    got = evaluated("ppo" if proximal is None else "decoupled_ppo", case["inputs"], settings, rows(proximal))
    return got if proximal is not None else {**got, "behaviour_weight_mean": 0.0}


def test_the_weight_is_never_lost(oracles):
    """Without a cap the original's default leaves π_prox/π_behav out; ours must differ from that value."""
    case = next(c for c in load(oracles, "decoupled_ppo")["cases"] if c["name"] == "decoupled_without_any_cap")
    key = "loss" if "loss" in case["original"] else "per_token_loss"
    assert not np.allclose(ppo_case(case)[key], case["original"][key], rtol=1e-3)


def test_every_case_of_the_other_losses_of_the_original(oracles):
    """Without a weight the original's ratio is around what it calls proximal, so that stands in π_behav's place."""
    file, seen = load(oracles, "other_losses"), set()
    for case in file["cases"]:
        kind, p, inputs = case["kind"], case["params"], case["inputs"]
        if kind in ("gspo", "cispo"):
            full, proximal = p["weight_mode"] == "full", rows(inputs["proximal_logprobs"])
            settings = LossSettings(p["eps_clip_low"], p["eps_clip_high"], decoupled=full)
            got = evaluated(kind, inputs, settings, proximal if full else None, None if full else proximal)
            got["behaviour_weight_mean"] = got["behaviour_weight_mean"] if full else case["outputs"].get("behaviour_weight_mean")
        elif kind == "sapo":
            got = evaluated(kind, inputs, LossSettings(tau_positive=p["tau_positive"], tau_negative=p["tau_negative"]))
        else:
            continue
        seen.add(kind)
        check(file, case, got)
    assert seen == {"gspo", "cispo", "sapo"}


# One loss in float64, a sequence at a time: (current, proximal, behaviour, advantages) [n] each → [n].


def clipped(u, a, s):
    value = -np.minimum(u * a, np.clip(u, 1 - s.clip_low, 1 + s.clip_high) * a)
    return np.where((a < 0) & (value > -s.dual_clip * a), -s.dual_clip * a, value) if s.dual_clip is not None else value


def weight(prox, behav, s):
    log = prox - behav
    log = {"token": log, "sequence": np.full(len(log), log.sum()), "geometric": np.full(len(log), log.mean())}[s.weight_level]
    w, low, high = np.exp(log), 0.0 if s.weight_floor is None else s.weight_floor, np.inf if s.weight_cap is None else s.weight_cap
    return np.where((w < low) | (w > high), 0.0, w) if s.weight_mode == "mask" else np.clip(w, low, high)


def of(name, lp, prox, behav, a, s, start):
    """``start`` is the point at which a stopped gradient stands still."""
    centre = prox if s.decoupled else behav
    w = weight(prox, behav, s) if s.decoupled else 1.0
    if name == "decoupled_ppo":
        return weight(prox, behav, s) * clipped(np.exp(lp - prox), a, s)
    if name == "ppo":
        return clipped(np.exp(lp - behav), a, s)
    if name == "gspo":
        return w * clipped(np.full(len(lp), np.exp((lp - centre).mean())), np.full(len(a), a.mean()), s)
    if name == "cispo":
        return -w * np.clip(np.exp(start - centre), 1 - s.clip_low, 1 + s.clip_high) * a * lp
    if name == "sapo":
        tau = np.where(a > 0, s.tau_positive, s.tau_negative)
        return -w * a * 4 / tau / (1 + np.exp(-tau * (np.exp(lp - centre) - 1)))
    if name == "m2po":
        return -a * np.exp(lp - behav)
    return -w * a * lp


CASES = {
    "decoupled_ppo": ("decoupled_ppo", LossSettings()),
    "clip-higher": ("decoupled_ppo", LossSettings(0.1, 0.3)),
    "dual clip": ("decoupled_ppo", LossSettings(dual_clip=1.5)),
    "tis": ("decoupled_ppo", LossSettings(weight_cap=1.2)),
    "icepop": ("decoupled_ppo", LossSettings(weight_cap=1.3, weight_floor=0.7, weight_mode="mask")),
    "sequence tis": ("decoupled_ppo", LossSettings(weight_cap=1.2, weight_level="sequence")),
    "mis": ("decoupled_ppo", LossSettings(weight_cap=1.2, weight_mode="mask", weight_level="sequence")),
    "geometric mask": ("decoupled_ppo", LossSettings(weight_cap=1.05, weight_floor=0.8, weight_mode="mask", weight_level="geometric")),
    "ppo": ("ppo", LossSettings(0.1, 0.3, dual_clip=2.0)),
    "gspo": ("gspo", LossSettings(0.02, 0.03)),
    "gspo decoupled": ("gspo", LossSettings(0.02, 0.03, decoupled=True)),
    "cispo": ("cispo", LossSettings(1.0, 0.2)),
    "cispo decoupled": ("cispo", LossSettings(0.2, 0.28, decoupled=True, weight_cap=1.1)),
    "sapo": ("sapo", LossSettings()),
    "sapo decoupled": ("sapo", LossSettings(tau_negative=2.0, decoupled=True)),
    "m2po": ("m2po", LossSettings()),
    "reinforce": ("reinforce", LossSettings()),
    "reinforce decoupled": ("reinforce", LossSettings(decoupled=True, weight_cap=1.1, weight_mode="mask")),
}
LENGTHS = (7, 1, 12, 9)


def sequences(seed=5):
    """(current, proximal, behaviour, advantages), float64 [29] each, of sequences of ``LENGTHS``."""
    random, n = np.random.default_rng(seed), sum(LENGTHS)
    proximal = random.normal(-2, 0.5, n)
    return proximal + random.normal(0, 0.3, n), proximal, proximal + random.normal(0, 0.2, n), random.normal(0, 1, n)


def parts():
    ends = np.cumsum(LENGTHS)
    return [slice(end - length, end) for end, length in zip(ends, LENGTHS, strict=True)]


@pytest.mark.parametrize("label", CASES)
def test_value_and_gradient_against_float64_and_its_finite_differences(label):
    name, settings = CASES[label]
    current, *constants = sequences()
    segments = np.repeat(np.arange(len(LENGTHS)), LENGTHS)[None]

    def reference(x):
        return sum(of(name, x[part], *(c[part] for c in constants), settings, current[part]).sum() for part in parts())

    def ours(x):
        tokens = Tokens(x[None], *(jnp.asarray(c, jnp.float32)[None] for c in constants), jnp.ones((1, len(x))), segments)
        result = policy_loss(name, tokens, settings)
        return result.loss.sum(), result

    (value, result), gradient = jax.value_and_grad(ours, has_aux=True)(jnp.asarray(current, jnp.float32))
    assert value == pytest.approx(reference(current), rel=2e-5)
    step = 1e-6 * np.eye(len(current))
    numeric = [(reference(current + d) - reference(current - d)) / 2e-6 for d in step]
    np.testing.assert_allclose(gradient, numeric, rtol=2e-4, atol=2e-6)
    if settings.weight_cap is not None:
        assert 0 < np.sum(result.capped) < sum(LENGTHS), "the bound must act, and not everywhere"


@pytest.mark.parametrize("label", CASES)
def test_neither_masked_contents_nor_the_layout_of_segments_matter(label):
    """Sequences packed into one row with rubbish between them, in another order and with other numbers, against a row each."""
    name, settings = CASES[label]
    arrays = [a.astype(np.float32) for a in sequences(1)]
    alone, packed = (np.full((4, *shape), np.nan, np.float32) for shape in ((4, 15), (2, 20)))
    masks, segments = [np.zeros(a.shape[1:], np.float32) for a in (alone, packed)], [np.ones(a.shape[1:], np.int32) for a in (alone, packed)]
    places = [(1, slice(2, 9)), (0, slice(3, 4)), (0, slice(6, 18)), (1, slice(10, 19))]
    for number, (part, (row, place)) in enumerate(zip(parts(), places, strict=True)):
        for which, (r, p) in enumerate(((number, slice(0, LENGTHS[number])), (row, place))):
            (alone, packed)[which][:, r, p] = [a[part] for a in arrays]
            masks[which][r, p], segments[which][r, p] = 1.0, 5 - number

    def run(values, mask, segment):
        def total(lp):
            result = policy_loss(name, Tokens(lp, *values[1:], mask, segment), settings)
            return masked_sum(result.loss, mask), result.loss

        (value, tokens), gradient = jax.value_and_grad(total, has_aux=True)(jnp.asarray(values[0]))
        assert np.isfinite(gradient).all() and not np.any(np.asarray(gradient)[mask == 0]) and not np.any(np.asarray(tokens)[mask == 0])
        return value, np.asarray(gradient)

    (one, by_row), (other, together) = run(alone, masks[0], segments[0]), run(packed, masks[1], segments[1])
    assert float(one) == pytest.approx(float(other), rel=1e-5)
    for number, (row, place) in enumerate(places):
        np.testing.assert_allclose(together[row, place], by_row[number, : LENGTHS[number]], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", sorted(POLICY_LOSSES))
def test_only_the_policy_carries_a_gradient(name):
    shape = (1, 6)
    values = [jnp.full(shape, v) for v in (-1.0, -1.1, -1.15, 0.7)]

    def total(*arrays):
        return policy_loss(name, Tokens(*arrays, jnp.ones(shape), jnp.ones(shape, jnp.int32)), LossSettings(decoupled=True)).loss.sum()

    policy, *constants = jax.grad(total, argnums=(0, 1, 2, 3))(*values)
    assert np.abs(policy).min() > 0
    for gradient in constants:
        np.testing.assert_array_equal(gradient, 0.0)


@pytest.mark.parametrize("name", sorted(POLICY_LOSSES))
def test_an_empty_mask_gives_nothing(name):
    shape = (2, 3)
    tokens = Tokens(*(jnp.full(shape, jnp.nan) for _ in range(4)), jnp.zeros(shape), jnp.zeros(shape, jnp.int32))
    result = policy_loss(name, tokens, LossSettings(decoupled=True, weight_level="sequence", weight_cap=2.0))
    assert not any(np.any(leaf) for leaf in jax.tree.leaves(result))


def test_a_long_sequences_weight_stays_finite():
    shape = (1, 400)
    tokens = Tokens(*(jnp.full(shape, v) for v in (-1.0, -1.0, -2.0, 1.0)), jnp.ones(shape), jnp.ones(shape, jnp.int32))
    result = policy_loss("decoupled_ppo", tokens, LossSettings(weight_level="sequence"))
    assert np.isfinite(result.loss).all() and np.isfinite(result.weight).all()


def test_settings_read_the_configuration():
    section = base_config().algorithm
    section.clip_epsilon = 0.1
    assert settings_of(section) == LossSettings(0.1, 0.1)
    section.clip_epsilon_high, section.importance_weight_cap, section.decoupled = 0.3, 5.0, True
    section.importance_weight_mode, section.importance_weight_level, section.sapo_tau_negative = "mask", "sequence", 3.0
    assert settings_of(section) == LossSettings(0.1, 0.3, None, 5.0, None, "mask", "sequence", True, 1.0, 3.0)
