"""The least time of a step, by counting; and what the machine is measured to do."""

import pytest

from areal_jax.benchmarks.machine import Machine, decode_floor_s, measure_machine, prefill_floor_s
from areal_jax.models.architecture import ModelConfig

MODEL = ModelConfig("llama", 10, layers=3, hidden_size=8, heads=2, kv_heads=1, head_dim=4, mlp_size=16)
MATRICES = 3 * (8 * 8 + 2 * 8 * 4 + 8 * 8 + 3 * 8 * 16)  # query, key and value, output, SwiGLU
HEAD = 8 * 10


def machine(read, peak):
    return Machine("cpu", "cpu", 1, "float32", read, peak)


def test_floor_of_a_decode_step_is_counted_by_hand():
    held = [5, 11]
    size = 4 * (MATRICES + HEAD) + 4 * 2 * 3 * 1 * 4 * sum(held)
    flops = 2 * 2 * (MATRICES + HEAD) + sum(2 * 2 * 3 * 2 * 4 * n for n in held)
    assert decode_floor_s(machine(100.0, 1e30), MODEL, held) == pytest.approx(size / 100.0)
    assert decode_floor_s(machine(1e30, 100.0), MODEL, held) == pytest.approx(flops / 100.0)


def test_floor_of_a_prefill_is_counted_by_hand():
    flops = 5 * 2 * MATRICES + 2 * 2 * 3 * 2 * 4 * (1 + 2 + 1 + 2 + 3)
    assert prefill_floor_s(machine(1e30, 100.0), MODEL, [2, 3]) == pytest.approx(flops / 100.0)
    assert prefill_floor_s(machine(100.0, 1e30), MODEL, [2, 3], programs=2) == pytest.approx((2 * 4 * MATRICES + 5 * 4 * 2 * 3 * 4) / 100.0)


def test_the_machines_limits_are_positive_and_of_this_device():
    found = measure_machine("float32", tiny=True)
    assert found.platform == "cpu" and found.threads >= 1 and found.read_bytes_per_s > 1e6 and found.matmul_flops > 1e6
