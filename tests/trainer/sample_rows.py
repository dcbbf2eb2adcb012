"""Samples as plain arrays, one a row, for the tests' own implementations of a training step."""

import numpy as np

LENGTH = 20


def padded(samples):
    """(tokens, targets, segments, mask), int32 [16, LENGTH] each, of up to 16 samples."""
    tokens, targets, segments, mask = np.zeros((4, 16, LENGTH), np.int32)
    for row, t in enumerate(samples):
        whole = np.concatenate([t.prompt_tokens, t.tokens])
        n = len(whole) - 1
        tokens[row, :n], targets[row, :n], segments[row, :n] = whole[:-1], whole[1:], 1
        mask[row, n - t.length : n] = 1
    return tokens, targets, segments, mask
