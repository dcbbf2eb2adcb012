"""Runs a program that compiles for a TPU which is not here: needs libtpu, installed or in the folder AREAL_JAX_LIBTPU."""

import importlib.util
import os
import subprocess
import sys

import pytest


def run_with_libtpu(program: str) -> str:
    """What the program prints, in a process of its own; skips the test where libtpu is not here."""
    folder = os.environ.get("AREAL_JAX_LIBTPU", "")
    if not folder and importlib.util.find_spec("libtpu") is None:
        pytest.skip("libtpu is not here; install it or name its folder by AREAL_JAX_LIBTPU")
    path = os.pathsep.join(filter(None, (os.getcwd(), folder, os.environ.get("PYTHONPATH", ""))))
    environment = os.environ | {"PYTHONPATH": path, "TPU_SKIP_MDS_QUERY": "1", "ALLOW_MULTIPLE_LIBTPU_LOAD": "1"}
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=300, env=environment, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout
