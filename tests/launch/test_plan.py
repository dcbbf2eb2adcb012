"""launch/plan.py as a program: a plan of this host's devices, a range of sizes, and what it refuses."""

import json
import subprocess
import sys

import pytest
from launch_programs import HERE, ROOT, environment


def plan(*arguments, config=HERE / "tiny.py"):
    program = [sys.executable, str(ROOT / "launch" / "plan.py"), f"--config={config}", *arguments]
    return subprocess.run(program, env=environment(), capture_output=True, text=True, timeout=150)


def test_plan_of_this_host(tmp_path):
    file = tmp_path / "plan.json"
    done = plan("--topology=cpu:4", f"--json={file}", "--config.trainer.micro_batch_rows=2")
    assert done.returncode == 0, done.stderr
    assert all(said in done.stdout for said in ("\nFITS\n", "a step computes", "collectives of a step", "the trainer's meshes", "the sampler's meshes"))
    assert max(len(line) for line in done.stdout.splitlines()) <= 120
    found = json.loads(file.read_text())
    assert found["fits"] and found["bottleneck"] in ("trainer", "sampler")
    programs = {p["name"]: p for p in found["programs"]}
    assert set(programs) == {"accumulate", "apply", "decode", "prefill"}
    # What lies on a device between programs is exact: an update's arguments are parameters, moments and gradients.
    lying = sum(found["trainer"]["bytes"][name] for name in ("parameters", "optimizer", "gradients"))
    assert programs["apply"]["argument"] == pytest.approx(lying, rel=0.01)


def test_plan_of_a_policy_and_machines_that_are_not_here(tmp_path):
    file = tmp_path / "plan.json"
    done = plan("--topology=h800:48x8", "--compile=no", f"--json={file}", config=ROOT / "configs" / "math.py:qwen2.5-32b")
    assert done.returncode == 0, done.stderr
    found = json.loads(file.read_text())
    said = " ".join(done.stdout.split())
    assert "drives the devices of one host" in said and "XLA_PYTHON_CLIENT_MEM_FRACTION=0.92" in said and "EFLOP" in said
    assert set(found["sends"]) == {"trainer", "decoding", "prefill", "rebuild"} and found["sampler_flops"] > 0
    assert found["parameters"] == 32_763_876_352 and found["kv_bytes_per_token"] == 262144
    assert found["trainer"]["mesh"] == {"data": 3, "fsdp": 32, "context": 1, "tensor": 1}


def test_what_does_not_fit_says_by_how_much_and_what_to_change():
    more = ("--config.rollout.slots=3600", "--config.rollout.kv_pages=0", "--config.trainer.remat=none")
    done = plan("--topology=h800:48x8", "--compile=no", *more, config=ROOT / "configs" / "math.py:qwen2.5-32b")
    assert done.returncode == 1 and "DOES NOT FIT" in done.stdout
    said = " ".join(done.stdout.split())
    assert "GiB a device too much" in said and "trainer.remat=" in said and "rollout.slots=" in said and "rollout.kv_pages=" in said


def test_range_of_sizes():
    done = plan("--topology=h100:8..32", config=ROOT / "configs" / "math.py:qwen2.5-1.5b")
    assert done.returncode == 0, done.stderr
    assert all(name in done.stdout for name in ("h100:1x8", "h100:2x8", "h100:4x8"))


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        ((), ["--topology", "h800:48x8"]),
        (("--topology=h900:8",), ["unknown chip 'h900'", "h800"]),
        (("--topology=cpu:4", "--compile=maybe"), ["--compile", "maybe"]),
        (("--topology=cpu:4", "--response=many"), ["--response", "many"]),
        (("--topology=cpu:4", "--response=9999"), ["--response", "10"]),
        (("--topology=cpu:4", "--config.cluster.mesh.trainer=fsdp=3"), ["cluster.mesh.trainer", "fsdp=3"]),
        (("--topology=cpu:4", "--config.model.path=."), ["model.path", "config.json"]),
        (("--topology=cpu:4", f"--config.model.path={__file__}"), ["model.path", "is a file"]),
        (
            ("--topology=cpu:4", "--config.cluster.trainer_devices=2", "--config.cluster.mesh.trainer=context=2", "--config.trainer.micro_batch_tokens=193"),
            ["trainer.micro_batch_tokens", "context axis = 2", "193"],
        ),
        (("--topology=v5e:4", "--compile=libtpu"), ["--compile"]),
        (("--topology=cpu:4", "--json=/nonexistent/plan.json"), ["--json", "/nonexistent/plan.json"]),
        (("--topology=h100:8..32", "--compile=yes"), ["--compile=yes", "one topology"]),
    ],
)
def test_refusals(arguments, parts):
    done = plan(*arguments)
    assert done.returncode == 2 and done.stderr.startswith("error: ") and done.stderr.count("\n") == 1, done.stderr
    assert all(part in done.stderr for part in parts), done.stderr
