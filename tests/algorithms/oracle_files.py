"""Comparison with the original's numbers, by the oracles' own rule."""

import json

import jax
import jax.numpy as jnp
import numpy as np

from areal_jax.algorithms.losses import Tokens, masked_sum, policy_loss, token_mean


def load(oracles, name):
    return json.loads((oracles / f"{name}.json").read_text())


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


def rows(value):
    return None if value is None else jnp.asarray(value, jnp.float32)


SHAPE = (8, 16)
"""At least: so much is padded, so that all cases of one name share their operations' compilations."""


def widened(value, fill=np.nan):
    small = np.asarray(value, np.float32)
    wide = np.full([max(most, size) for most, size in zip(SHAPE, small.shape, strict=True)], fill, np.float32)
    wide[: small.shape[0], : small.shape[1]] = small
    return jnp.asarray(wide)


def evaluated(name, inputs, settings, proximal=None, behaviour=None):
    """What an oracle of a policy loss holds, from our functions; each row is one sequence, and NaN beside the case's own positions."""
    mask, current = widened(inputs["mask"], 0.0), widened(inputs["current_logprobs"])
    behaviour = widened(inputs["behaviour_logprobs"] if behaviour is None else behaviour)
    proximal = behaviour if proximal is None else widened(proximal)
    height, width = np.asarray(inputs["mask"]).shape

    def loss(logprobs):
        tokens = Tokens(logprobs, proximal, behaviour, widened(inputs["advantages"]), mask, jnp.ones(mask.shape, jnp.int32))
        result = policy_loss(name, tokens, settings)
        return token_mean(result.loss, mask), result

    (value, tokens), gradient = jax.value_and_grad(loss, has_aux=True)(current)
    kept = (tokens.weight > 0).astype(jnp.float32) * mask
    return {
        "loss": value,
        "per_token_loss": tokens.loss[:height, :width],
        "grad_current_logprobs": gradient[:height, :width],
        "importance_weight_mean": token_mean(tokens.ratio, mask),
        "clip_fraction": token_mean(tokens.clipped, mask),
        "dual_clip_fraction": token_mean(tokens.dual_clipped, mask),
        "behaviour_weight_mean": masked_sum(tokens.weight, kept) / jnp.maximum(1.0, kept.sum()),
        "filtered_fraction": token_mean(tokens.capped, mask),
    }
