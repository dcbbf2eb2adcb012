"""Policy losses against the original's numbers, a float64 reference and finite differences."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from areal_jax.algorithms.losses import POLICY_LOSSES, LossSettings, masked_sum, settings_of, token_mean
from areal_jax.config import base_config


def load(oracles):
    return json.loads((oracles / "decoupled_ppo.json").read_text())


def evaluate(case):
    """The oracle's outputs from our functions."""
    params, arrays = case["params"], case["inputs"]
    mask = jnp.asarray(arrays["mask"], jnp.float32)
    current, behaviour, advantages = (jnp.asarray(arrays[n], jnp.float32) for n in ("current_logprobs", "behaviour_logprobs", "advantages"))
    decoupled = arrays["proximal_logprobs"] is not None
    proximal = jnp.asarray(arrays["proximal_logprobs"], jnp.float32) if decoupled else behaviour
    segments = jnp.ones_like(mask, jnp.int32)
    settings = LossSettings(
        params["eps_clip_low"],
        params["eps_clip_high"],
        params["dual_clip"],
        params["weight_cap"] if params["weight_mode"] != "full" else None,
        params["weight_floor"],
        "mask" if params["weight_mode"] == "mask" else "truncate",
        params["weight_level"],
    )
    function = POLICY_LOSSES["decoupled_ppo" if decoupled else "ppo"]

    def loss(logprobs):
        result = function(logprobs, proximal, behaviour, advantages, mask, segments, settings)
        return masked_sum(result.loss, mask) / jnp.maximum(1.0, mask.sum()), result

    (value, tokens), gradient = jax.value_and_grad(loss, has_aux=True)(current)
    kept = (tokens.weight > 0).astype(jnp.float32) * mask
    return {
        "loss": value,
        "per_token_loss": tokens.loss,
        "grad_current_logprobs": gradient,
        "importance_weight_mean": token_mean(tokens.ratio, mask),
        "clip_fraction": token_mean(tokens.clipped, mask),
        "dual_clip_fraction": token_mean(tokens.dual_clipped, mask),
        "behaviour_weight_mean": token_mean(tokens.weight, kept) if decoupled else 0.0,
        "filtered_fraction": token_mean(tokens.capped, mask),
    }


def check(file, case, got):
    for key, want in case["outputs"].items():
        if want is None:
            continue
        want, value = np.asarray(want, float), np.asarray(got[key], float)
        largest = np.abs(case["outputs"]["per_token_loss"] if key == "loss" else want).max(initial=0.0)
        own = case.get("tolerance")
        relative = (own or file["tolerance"])["rtol"]
        absolute = own["atol"] if own else file["tolerance"]["atol_of_largest"] * largest
        np.testing.assert_allclose(value, want, rtol=relative, atol=absolute, err_msg=f"{case['name']}/{key}")


def test_every_case_of_the_original(oracles):
    file = load(oracles)
    assert len(file["cases"]) >= 15
    for case in file["cases"]:
        check(file, case, evaluate(case))


def test_the_weight_is_never_lost(oracles):
    """Without a cap the original's default leaves π_prox/π_behav out; ours must differ from that value."""
    case = next(c for c in load(oracles)["cases"] if c["name"] == "decoupled_without_any_cap")
    original = case["original"].get("loss", case["original"].get("per_token_loss"))
    got = evaluate(case)
    value = got["loss"] if "loss" in case["original"] else got["per_token_loss"]
    assert not np.allclose(value, original, rtol=1e-3)


def reference(logprobs, proximal, behaviour, advantages, s):
    """Equation 5 in float64 numpy, one token at a time."""
    total = 0.0
    for lp, prox, behav, a in zip(logprobs, proximal, behaviour, advantages, strict=True):
        u, w = np.exp(lp - prox), np.exp(prox - behav)
        value = -min(u * a, min(max(u, 1 - s.clip_low), 1 + s.clip_high) * a)
        if s.dual_clip is not None and a < 0:
            value = min(value, -s.dual_clip * a)
        if s.weight_cap is not None and w > s.weight_cap:
            w = 0.0 if s.weight_mode == "mask" else s.weight_cap
        total += w * value
    return total / len(logprobs)


@pytest.mark.parametrize(
    "settings",
    [LossSettings(), LossSettings(0.1, 0.3), LossSettings(dual_clip=1.5), LossSettings(weight_cap=1.2), LossSettings(weight_cap=1.2, weight_mode="mask")],
    ids=["plain", "asymmetric", "dual", "truncate", "mask"],
)
def test_value_and_gradient_against_float64_finite_differences(settings):
    random = np.random.default_rng(5)
    n = 40
    proximal = random.normal(-2, 0.5, n)
    logprobs, behaviour = proximal + random.normal(0, 0.3, n), proximal + random.normal(0, 0.3, n)
    advantages = random.normal(0, 1, n)

    def ours(x):
        rows = [jnp.asarray(v, jnp.float32)[None] for v in (proximal, behaviour, advantages, np.ones(n))]
        result = POLICY_LOSSES["decoupled_ppo"](x[None], *rows, jnp.ones((1, n), jnp.int32), settings)
        return masked_sum(result.loss, rows[3]) / n

    value, gradient = jax.value_and_grad(ours)(jnp.asarray(logprobs, jnp.float32))
    np.testing.assert_allclose(value, reference(logprobs, proximal, behaviour, advantages, settings), rtol=1e-5)
    step, numeric = 1e-6, np.zeros(n)
    for i in range(n):
        up, down = logprobs.copy(), logprobs.copy()
        up[i] += step
        down[i] -= step
        numeric[i] = (reference(up, proximal, behaviour, advantages, settings) - reference(down, proximal, behaviour, advantages, settings)) / (2 * step)
    np.testing.assert_allclose(gradient, numeric, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("name", sorted(POLICY_LOSSES))
def test_masked_positions_do_not_matter_even_as_nan(name):
    random = np.random.default_rng(1)
    mask = jnp.asarray(random.integers(0, 2, (2, 9)), jnp.float32)
    arrays = [jnp.asarray(random.normal(-1, 0.3, (2, 9)), jnp.float32) for _ in range(4)]
    segments = jnp.ones((2, 9), jnp.int32)

    def run(values):
        def total(lp):
            return masked_sum(POLICY_LOSSES[name](lp, *values[1:], mask, segments, LossSettings(weight_level="sequence", weight_cap=2.0)).loss, mask)

        return jax.value_and_grad(total)(values[0])

    clean, dirty = run(arrays), run([jnp.where(mask > 0, a, jnp.nan) for a in arrays])
    np.testing.assert_array_equal(clean[0], dirty[0])
    np.testing.assert_array_equal(clean[1], dirty[1])
    assert np.isfinite(dirty[1]).all() and np.abs(dirty[1]).max() > 0


def test_constants_carry_no_gradient():
    shape = (1, 6)
    values = [jnp.full(shape, v) for v in (-1.0, -1.1, -1.3, 0.7)]

    def total(proximal, behaviour, advantages):
        ones = jnp.ones(shape)
        return POLICY_LOSSES["decoupled_ppo"](values[0], proximal, behaviour, advantages, ones, ones.astype(int), LossSettings()).loss.sum()

    for gradient in jax.grad(total, argnums=(0, 1, 2))(*values[1:]):
        np.testing.assert_array_equal(gradient, 0.0)


def test_sequence_weights_keep_packed_sequences_apart():
    """Two sequences in one row weigh as they do in rows of their own."""
    random = np.random.default_rng(2)
    arrays = [random.normal(-1, 0.4, 10).astype(np.float32) for _ in range(4)]
    settings = LossSettings(weight_level="sequence")
    packed = POLICY_LOSSES["decoupled_ppo"](*(a[None] for a in arrays), np.ones((1, 10)), np.asarray([[1] * 4 + [2] * 6]), settings)
    for part in (slice(0, 4), slice(4, 10)):
        alone = POLICY_LOSSES["decoupled_ppo"](*(a[None, part] for a in arrays), np.ones((1, 1)), np.ones((1, len(arrays[0][part])), int), settings)
        np.testing.assert_allclose(packed.weight[0, part], alone.weight[0], rtol=1e-6)


def test_settings_read_the_configuration():
    section = base_config().algorithm
    section.clip_epsilon = 0.1
    assert settings_of(section) == LossSettings(0.1, 0.1)
    section.clip_epsilon_high, section.importance_weight_cap = 0.3, 5.0
    section.importance_weight_mode, section.importance_weight_level = "mask", "sequence"
    assert settings_of(section) == LossSettings(0.1, 0.3, None, 5.0, None, "mask", "sequence")
