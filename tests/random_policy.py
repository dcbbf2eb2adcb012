"""Policies whose every parameter is random, biases and norms too, so that none can be left out unseen."""

import jax
import numpy as np

from areal_jax.models.policy import param_shapes


def params_of(model, seed=0):
    """The parameter tree of an architecture, float32 on the host."""
    random = np.random.default_rng(seed)

    def leaf(shape):
        if len(shape.shape) == 1:
            return (1.0 + 0.5 * random.standard_normal(shape.shape)).astype(np.float32)
        return (shape.shape[-2] ** -0.5 * 1.5 * random.standard_normal(shape.shape)).astype(np.float32)

    return jax.tree.map(leaf, param_shapes(model))
