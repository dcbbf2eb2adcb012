"""launch/benchmark.py as a user runs it, on a tiny policy, and launch/gpu_check.sh in its setting for a CPU."""

import json
import os
import subprocess
import sys

import pytest
from launch_programs import LIMIT_S, ROOT, environment

from areal_jax.benchmarks.loads import make_load

TINY = ("--random=tiny", "--slots=8", "--requests=16", "--lengths=longtail:6:24", "--prompt=8", "--steps=2", "--prefill-chunk=32", "--page-size=8")


def benchmark(*arguments, code=0):
    command = [sys.executable, str(ROOT / "launch" / "benchmark.py"), *arguments]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=LIMIT_S)
    assert done.returncode == code, f"exit code {done.returncode}, not {code}\n{done.stdout}\n{done.stderr}"
    return done.stdout + done.stderr


def test_sampler_counts_exactly_and_its_numbers_are_sane(tmp_path):
    file = tmp_path / "sampler.json"
    parts = "load,steps,interruption,groups,memory"
    text = benchmark(
        "sampler", *TINY, "--positions=32", "--group-prompt=40", "--group-samples=8", "--seconds=1", "--update-every=0.4", "--repeats=1",
        "--limits=tiny", f"--parts={parts}", f"--out={file}",
    )  # fmt: skip
    found = json.loads(file.read_text())
    load = make_load(48, 16, "longtail:6:24", (8, 8))
    assert found["load"]["sampled_tokens"] == load.tokens and 0 < found["load"]["slots_in_use"] <= 1
    assert found["machine"]["platform"] == "cpu" and found["policy"]["name"] == "tiny"
    for case in found["steps"].values():
        assert 0 < case["roofline_share"] <= 1.5 and case["paged_ms"] > 0 and case["steps_measured"] >= 12
        assert case["paged_over_dense"] == pytest.approx(case["paged_ms"] / case["dense_ms"])
        assert case["decode_tokens_per_s"] == pytest.approx(8 / case["paged_ms"] * 1e3)
    groups = found["groups"]
    assert groups["not_shared"]["tokens_prefilled"] == 8 * 39 and 39 <= groups["shared"]["tokens_prefilled"] <= 40 + 8 * 8
    assert all(updates > 0 for updates in found["interruption"]["updates_taken"].values())
    memory = found["memory"]
    assert memory["paged_sequences_mean"] <= memory["paged_sequences_peak"] <= 8 and memory["paged_over_dense"] > 0
    assert "paged over dense" in text and "tokens per s" in text


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((), "sampler, transformers"),
        (("sample",), "got 'sample'"),
        (("sampler", "--slot=3"), "did you mean '--slots'"),
        (("sampler", "--slots=0"), "'--slots' must be a whole number from 1"),
        (("sampler", "--parts=speed"), "load, prefill"),
        (("sampler", "--random=huge"), "qwen2-small"),
        (("sampler", "--out=/no/such/directory/x.json"), "cannot"),
        (("trainer", "--row=10"), "'--row' must hold the longest sequence"),
        (("trainer", "--layouts=packed"), "algorithm1, balanced, fixed"),
        (("trainer", "--mesh=rows=2"), "unknown mesh axis"),
        (("peers", "--trl-python=/no/python"), "pip install trl"),
        (("peers", "--against=verl"), "trl, tunix"),
    ],
    ids=lambda value: " ".join(value)[:40] if isinstance(value, tuple) else "",
)
def test_mistakes_are_one_line(arguments, words):
    text = benchmark(*arguments, code=2)
    assert words in text and len(text.strip().splitlines()) == 1


def test_transformers_are_beaten_or_not_but_measured_alike(tmp_path):
    for name in ("torch", "transformers", "safetensors"):
        pytest.importorskip(name)
    file = tmp_path / "transformers.json"
    benchmark("transformers", *TINY, "--batches=8,16", "--threads=1", "--repeats=1", f"--out={file}")
    found = json.loads(file.read_text())
    tokens = found["load"]["sampled_tokens"]
    assert found["transformers"]["batch"] in (8, 16)
    assert found["transformers"]["tokens_per_s"] == pytest.approx(tokens / found["transformers"]["seconds"][0])
    assert found["sampler_over_transformers"] == pytest.approx(found["sampler"]["tokens_per_s"] / found["transformers"]["tokens_per_s"])


def test_trainer_counts_real_tokens_in_every_layout(tmp_path):
    file = tmp_path / "trainer.json"
    benchmark(
        "trainer", "--random=tiny", "--sequences=16", "--lengths=longtail:6:24", "--prompt=4:8", "--rows=2", "--row=32", "--micro-batches=2,4",
        "--mesh=data=2", "--repeats=1", "--limits=tiny", f"--out={file}",
    )  # fmt: skip
    found = json.loads(file.read_text())
    load = make_load(48, 16, "longtail:6:24", (4, 8), group=8)
    assert found["load"]["tokens"] == sum(len(prompt) + length for prompt, length in zip(load.prompts, load.lengths, strict=True))
    for layout in ("algorithm1", "balanced", "fixed"):
        one = found[layout]
        assert one["tokens_per_s"] == pytest.approx(found["load"]["tokens"] / one["step_s"])
        assert one["efficiency"] == pytest.approx((found["load"]["tokens"] - 16) / one["positions_computed"])
        assert one["share_of_matmul_peak"] == pytest.approx(
            found["load"]["flops_a_step"] / one["step_s"] / found["machine"]["matmul_float32_GFLOP_per_s"] / 1e9
        )
    assert found["fixed"]["positions_a_row"] == load.longest - 1 and set(found["fixed"]["tokens_per_s_by_micro_batches"]) == {"2", "4"}
    assert found["algorithm1"]["positions_computed"] < found["fixed"]["positions_computed"]
    assert found["balanced_over_fixed"] == pytest.approx(found["balanced"]["tokens_per_s"] / found["fixed"]["tokens_per_s"])


STAND_IN = """#!{python}
import json, sys
import numpy as np
for line in sys.stdin:
    asked = json.loads(line)
    arrays = np.load(asked["samples"])
    assert arrays["prompts"].shape[0] % asked["batch"] == 0 and (arrays["completions"] > 0).sum() == arrays["lengths"].sum()
    assert json.load(open(asked["checkpoint"] + "/config.json"))["model_type"] == "qwen2"
    took = 2.0 if asked["batch"] == 8 else 4.0
    print(json.dumps({{"seconds": [took] * asked["repeats"], "loss": 0.0, "logprob": {logprob}, "versions": {{}}}}), flush=True)
"""


def test_peers_take_turns_in_the_setting_that_suits_them_and_hold_the_same_policy(tmp_path):
    for name in ("torch", "transformers", "safetensors"):
        pytest.importorskip(name)
    python, file = tmp_path / "python", tmp_path / "peers.json"
    arguments = ("peers", "--against=trl", f"--trl-python={python}", "--random=tiny", "--sequences=16", "--lengths=longtail:6:24", "--prompt=4:8",
                 "--batches=8,16,3", "--threads=1", "--rows=2", "--row=32", "--repeats=2", f"--out={file}")  # fmt: skip

    def stand_in(logprob):
        python.write_text(STAND_IN.format(python=sys.executable, logprob=logprob))
        python.chmod(0o755)

    stand_in(0.0)
    refused = benchmark(*arguments, code=1)
    words = "mean log-prob 0.0, here "
    assert words in refused and not file.exists()
    stand_in(float(refused.split(words)[1].split()[0]))
    benchmark(*arguments)
    found = json.loads(file.read_text())
    assert (found["trl"]["batch"], found["trl"]["seconds"]) == (8, [2.0, 2.0])
    assert found["trl"]["tokens_per_s"] == pytest.approx(found["load"]["tokens"] / 2.0)
    assert found["areal_jax_over_trl"] == pytest.approx(found["areal_jax"]["tokens_per_s"] / found["trl"]["tokens_per_s"])


def test_the_device_script_works_here_in_its_tiny_setting(tmp_path):
    script = ROOT / "launch" / "gpu_check.sh"
    done = subprocess.run([str(script), str(tmp_path)], env={**environment(), "PYTHON": sys.executable}, capture_output=True, text=True, timeout=LIMIT_S)
    logs = "".join(file.read_text() for file in tmp_path.glob("*.log"))
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}\n{logs}"
    assert os.access(script, os.X_OK)
    found = {name: json.loads((tmp_path / f"{name}.json").read_text()) for name in ("kernels", "sampler", "trainer")}
    checks = {**found["kernels"]["packed"], **{f"paged {name}": row for name, row in found["kernels"]["paged"].items()}}
    assert {"plain", "blockwise", "splash", "paged plain", "paged kernel"} <= {name for name, row in checks.items() if row.get("within")}
    assert "gpu" in checks["tokamax"]["skipped"]
    assert all(0 < found["trainer"][layout]["share_of_matmul_peak"] <= 1.5 for layout in ("algorithm1", "balanced", "fixed"))
    last = done.stdout[done.stdout.rindex("results\n") :] if "results\n" in done.stdout else done.stdout
    for words in ("kernels / packed / splash / backward error", "sampler / steps", "trainer / algorithm1 / tokens per s"):
        assert words in last
