"""TRL's and Tunix's own steps beside this project's, where their Pythons are named by AREAL_JAX_TRL_PYTHON and AREAL_JAX_TUNIX_PYTHON."""

import json
import os
import subprocess
import sys

import pytest
from launch_programs import LIMIT_S, ROOT, environment

TINY = ("--random=tiny", "--prompt=4:8", "--group=8")
PYTHONS = {name: os.environ.get(f"AREAL_JAX_{name.upper()}_PYTHON", "") for name in ("trl", "tunix")}


@pytest.fixture(params=PYTHONS)
def peer(request):
    for name in ("torch", "transformers", "safetensors"):
        pytest.importorskip(name)
    if not PYTHONS[request.param]:
        pytest.skip(f"AREAL_JAX_{request.param.upper()}_PYTHON names no Python that has {request.param}")
    return request.param


def measured(file, *arguments):
    command = [sys.executable, str(ROOT / "launch" / "benchmark.py"), *arguments, f"--out={file}"]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=LIMIT_S)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    return json.loads(file.read_text())


def test_a_peers_step_is_of_the_same_policy_and_samples(peer, tmp_path):
    arguments = ("--sequences=16", "--lengths=longtail:6:24", "--batches=8,16", "--threads=1", "--rows=2", "--row=32", "--repeats=1", "--tunix-devices=1")
    found = measured(tmp_path / "peers.json", "peers", f"--against={peer}", f"--{peer}-python={PYTHONS[peer]}", *TINY, *arguments)
    assert found[peer]["logprob"] == pytest.approx(found["policy"]["logprob"], abs=2e-3)
    assert found[peer]["seconds"][0] > 0 and found[peer]["batch"] in (8, 16) and found[peer]["versions"]


def test_a_peers_whole_run_is_timed_after_its_first_step(peer, tmp_path):
    arguments = ("--prompts=4", "--new-tokens=16", "--batch=16", "--rollout=32", "--threads=1", "--steps=4", "--skip=1", "--slots=16", "--peer-steps=1")
    found = measured(tmp_path / "runs.json", "endtoend", f"--against={peer}", f"--{peer}-python={PYTHONS[peer]}", *TINY, *arguments)
    assert len(found[peer]["seconds_a_step"]) == 1 and found[peer]["samples_per_s"] == pytest.approx(32 / found[peer]["seconds_a_step"][0])
    assert 0 <= found[peer]["reward"] <= 1 and 0 < found["areal_jax"]["mean_length"] <= 16
