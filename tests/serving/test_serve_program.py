"""launch/serve.py as a user starts it: from an exported policy to the answer, and its end."""

import http.client
import json
import os
import pathlib
import re
import signal
import subprocess
import sys

import jax
import pytest
from random_policy import params_of

from areal_jax.models.architecture import ModelConfig
from areal_jax.models.export import export_policy
from areal_jax.models.tokenizer import embedded_tokenizer

ROOT = pathlib.Path(__file__).resolve().parents[2]
LIMIT_S = 120.0


@pytest.fixture(scope="module")
def start(tmp_path_factory):
    """start(overrides) → a running server of a policy that never ends by itself when it is greedy, as its end token's logit is 0."""
    for package in ("starlette", "uvicorn", "grpc"):
        pytest.importorskip(package, reason="serving needs the extra 'serve'")
    folder, tokenizer = tmp_path_factory.mktemp("served"), embedded_tokenizer()
    model = ModelConfig("qwen2", tokenizer.vocab_size, layers=1, hidden_size=32, heads=2, kv_heads=1, head_dim=16, mlp_size=48, eos_ids=(1,))
    params = params_of(model)
    params["lm_head"]["kernel"][:, 1] = 0.0
    export_policy(folder / "policy", model, jax.tree.map(jax.numpy.asarray, params), tokenizer)
    processes = []

    def run(*overrides):
        settings = (f"model.path={folder / 'policy'}", f"cluster.compilation_cache={folder / 'cache'}", "cluster.host_devices=1", "rollout.slots=8")
        settings += ("rollout.steps_per_dispatch=2", "rollout.prefill_chunk=64", "serve.port=0", "serve.grpc_port=0", *overrides)
        command = [sys.executable, str(ROOT / "launch" / "serve.py"), f"--config={ROOT / 'configs' / 'math.py'}", *(f"--config.{s}" for s in settings)]
        environment = {**os.environ, "JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT)}
        process = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        processes.append(process)
        for line in process.stdout:
            if found := re.search(r"serving 'policy' at http://127\.0\.0\.1:(\d+)/v1 and grpc at 127\.0\.0\.1:\d+", line):
                return process, int(found[1])
        raise AssertionError(process.communicate()[1])

    yield run
    for process in processes:
        process.kill()
        process.communicate()


def begin(port, **body):
    """The answer of a stream that has begun."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=LIMIT_S)
    connection.request("POST", "/v1/completions", json.dumps({"model": "policy", "prompt": "1+2", "stream": True, "temperature": 0, **body}))
    answer = connection.getresponse()
    assert answer.status == 200 and answer.readline().startswith(b"data: ")
    return answer


def status_of(port):
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=LIMIT_S)
    connection.request("POST", "/v1/completions", json.dumps({"model": "policy", "prompt": "1+2", "max_tokens": 1}))
    return connection.getresponse().status


def test_sigterm_finishes_what_runs_and_refuses_what_comes(start):
    process, port = start()
    assert status_of(port) == 200
    running = [begin(port, max_tokens=2000) for _ in range(3)]
    process.send_signal(signal.SIGTERM)
    assert "finishing the running requests" in process.stderr.readline() + process.stderr.readline()
    while (status := status_of(port)) == 200:  # the signal is on its way
        pass
    assert status == 503
    for answer in running:
        events = answer.read().decode().split("\n\n")
        assert events[-2] == "data: [DONE]" and '"finish_reason":"length"' in events[-3]
    out, err = process.communicate(timeout=LIMIT_S)
    assert process.returncode == 0, err
    assert re.search(r"served \d+ requests, 6\d\d\d tokens\n", out)


def test_deadline_of_the_drain_and_a_second_signal_end_at_once(start):
    process, port = start("serve.drain_s=0.05", "cluster.host_devices=3", "cluster.sampler_devices=2")  # two replicas
    running = begin(port, max_tokens=2000)
    process.send_signal(signal.SIGTERM)
    assert b'"server_shutting_down"' in running.read()
    out, err = process.communicate(timeout=LIMIT_S)
    assert process.returncode == 1 and "cut off" in out, err

    process, port = start()
    running = [begin(port, max_tokens=2000) for _ in range(8)]
    process.send_signal(signal.SIGTERM)
    assert "once more ends at once" in process.stderr.readline() + process.stderr.readline()
    process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=10) == 128 + signal.SIGTERM
    assert len(running) == 8


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        ((), "'model.path' must name the policy to serve"),
        (("model.path=/nowhere",), "/nowhere"),
        (("serve.port=70000",), "'serve.port' must be at most 65535"),
    ],
)
def test_refusals_are_one_line(overrides, says):
    command = [sys.executable, str(ROOT / "launch" / "serve.py"), f"--config={ROOT / 'configs' / 'math.py'}", *(f"--config.{o}" for o in overrides)]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT)}, timeout=LIMIT_S)
    assert done.returncode == 2 and says in done.stderr and "Traceback" not in done.stderr


def test_missing_packages_are_named_with_the_remedy(monkeypatch):
    import importlib.util

    from areal_jax.config import ConfigError
    from areal_jax.serving.server import require_packages

    there = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "uvicorn" else there(name))
    with pytest.raises(ConfigError, match=r"missing: uvicorn; install them by: pip install -e '.\[serve\]'"):
        require_packages()
