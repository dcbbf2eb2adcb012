"""Comparing what drivers made."""

import numpy as np


def same(one, two, atol=1e-5):
    assert one.keys() == two.keys()
    for key, trajectory in one.items():
        np.testing.assert_array_equal(trajectory.tokens, two[key].tokens, err_msg=str(key))
        np.testing.assert_allclose(trajectory.behaviour_logprobs, two[key].behaviour_logprobs, atol=atol, rtol=atol)
        assert trajectory.truncated == two[key].truncated
