"""Verifiers of the tests' runs, named by ``reward.verifier``; a policy of one layer learns nothing true, but it can learn parity."""

import zlib


def parity(response, answer, metadata):
    """1 for an odd number of characters: about half of all samples, whatever the policy."""
    return {"correct": float(len(response) % 2)}


def fails_one_in_ten(response, answer, metadata):
    if zlib.crc32(response.encode()) % 10 == 0:
        raise ValueError("one in ten fails on purpose")
    return parity(response, answer, metadata)


def fails_always(response, answer, metadata):
    raise ValueError("broken on purpose")
