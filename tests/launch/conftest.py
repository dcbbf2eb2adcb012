"""One warm-up, and one asynchronous run on it, shared by all tests of the programs."""

import os

import pytest
from launch_programs import run

VERIFIER = "reward.verifier=launch_verifiers:parity"


@pytest.fixture(scope="session")
def cache(tmp_path_factory):
    """Override: one compilation cache for all programs of all test processes, so that each but the first starts quickly."""
    base = tmp_path_factory.getbasetemp()
    shared = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base
    return f"cluster.compilation_cache={shared / 'compiled'}"


@pytest.fixture(scope="session")
def warm(tmp_path_factory, cache):
    """Directory of a finished launch/sft.py."""
    workdir = tmp_path_factory.mktemp("run") / "warm"
    (workdir.parent / "sft.txt").write_text(run("sft", workdir, cache, VERIFIER)[0])
    return workdir


@pytest.fixture(scope="session")
def quick(cache, warm):
    """Overrides of further runs: the cache, the verifier, and the warm-up that is there."""
    return cache, VERIFIER, f"sft.path={warm / 'warmup'}"


@pytest.fixture(scope="session")
def finished(warm, cache):
    """Directory of a finished asynchronous run, begun where launch/sft.py ended."""
    (warm.parent / "train.txt").write_text(run("train", warm, cache, VERIFIER, "trainer.steps=8")[0])
    return warm
