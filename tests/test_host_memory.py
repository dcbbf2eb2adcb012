"""Freed memory stays the process's own: a second array of the same size brings no page fault."""

import subprocess
import sys

import pytest

PROGRAM = """
import resource, sys
import numpy as np
from areal_jax.host_memory import keep_freed_memory
if sys.argv[1] == "keep":
    print(int(keep_freed_memory()))
else:
    print(1)
def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    held = np.ones(64 << 20, np.uint8)
    del held
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
faults()
print(faults())
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="glibc's settings")
def test_the_second_array_takes_the_pages_of_the_first():
    def run(mode):
        done = subprocess.run([sys.executable, "-c", PROGRAM, mode], capture_output=True, text=True, timeout=60, check=True)
        return [int(line) for line in done.stdout.split()]

    taken, kept = run("keep")
    if not taken:
        pytest.skip("this system's allocator takes no such settings")
    _, fresh = run("as it is")
    assert kept < 100, "64 MiB are 16384 pages"
    assert fresh > kept, "numpy's own large pages may leave few faults, never fewer"
