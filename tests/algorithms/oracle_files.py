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


def evaluated(name, inputs, settings, proximal=None, behaviour=None):
    """What an oracle of a policy loss holds, from our functions; each row is one sequence."""
    mask, current = rows(inputs["mask"]), rows(inputs["current_logprobs"])
    behaviour = rows(inputs["behaviour_logprobs"]) if behaviour is None else behaviour
    proximal = behaviour if proximal is None else proximal

    def loss(logprobs):
        tokens = Tokens(logprobs, proximal, behaviour, rows(inputs["advantages"]), mask, jnp.ones(mask.shape, jnp.int32))
        result = policy_loss(name, tokens, settings)
        return token_mean(result.loss, mask), result

    (value, tokens), gradient = jax.value_and_grad(loss, has_aux=True)(current)
    kept = (tokens.weight > 0).astype(jnp.float32) * mask
    return {
        "loss": value,
        "per_token_loss": tokens.loss,
        "grad_current_logprobs": gradient,
        "importance_weight_mean": token_mean(tokens.ratio, mask),
        "clip_fraction": token_mean(tokens.clipped, mask),
        "dual_clip_fraction": token_mean(tokens.dual_clipped, mask),
        "behaviour_weight_mean": masked_sum(tokens.weight, kept) / jnp.maximum(1.0, kept.sum()),
        "filtered_fraction": token_mean(tokens.capped, mask),
    }
