"""The plan's memory and traffic against the compiler's: the same programs, lowered for eight devices of this host."""

from collections import defaultdict
from typing import Any

import pytest

from areal_jax.config import base_config, put, validate
from areal_jax.config_devices import MESH_AXES
from areal_jax.planner.collectives import axes_of
from areal_jax.planner.compiled import SAMPLED_LAYERS, compile_sampler, compile_trainer
from areal_jax.planner.memory import accumulate_bytes, apply_bytes, decode_working, enter_working, rebuild_working, sampler_memory, trainer_memory
from areal_jax.planner.setup import make_setup
from areal_jax.planner.topology import parse_topologies
from areal_jax.planner.wires import accumulate_wires, decode_wires

# (mesh, remat, compute type, parameters' type)
CASES = [
    ("fsdp=8", "full", "float32", "float32"),
    ("data=8", "none", "float32", "float32"),
    ("data=2,fsdp=2,context=2", "dots", "float32", "float32"),
    ("fsdp=4,tensor=2", "full", "float32", "float32"),
    ("data=2,context=2,tensor=2", "none", "float32", "float32"),
    ("data=2,fsdp=2,tensor=2", "full", "bfloat16", "float32"),
    ("fsdp=8", "none", "bfloat16", "bfloat16"),
]


LORA: dict[str, Any] = {"model.lora_rank": 8, "model.path": "not/here"}


def setup(trainer: str, remat: str = "full", dtype: str = "float32", param_dtype: str = "float32", sampler_devices: int = 1, **more: Any):
    config = base_config()
    settings = {
        "model.layers": 4,
        "model.hidden_size": 192,
        "model.heads": 4,
        "model.kv_heads": 2,
        "model.head_dim": 32,
        "model.mlp_size": 1280,
        "model.vocab_size": 1536,
        "model.scan_layers": True,
        "model.attention": "blockwise",
        "model.dtype": dtype,
        "model.param_dtype": param_dtype,
        "trainer.remat": remat,
        "trainer.micro_batch_tokens": 2048,
        "trainer.micro_batch_rows": 8,
        "trainer.logprob_chunk": 256,
        "cluster.sampler_devices": sampler_devices,
        "cluster.trainer_devices": 8,
        "cluster.mesh.trainer": trainer,
        **more,
    }
    for key, value in settings.items():
        put(config, key, value)
    return make_setup(validate(config, planned=True), parse_topologies(f"cpu:{config.cluster.trainer_devices + sampler_devices}")[0])


@pytest.mark.parametrize(("mesh", "remat", "dtype", "param_dtype"), CASES)
def test_accumulating_a_gradient(mesh, remat, dtype, param_dtype):
    planned = setup(mesh, remat, dtype, param_dtype)
    (program,) = compile_trainer(planned, ("accumulate",))
    assert program.axes == planned.trainer and not program.refusal
    assert accumulate_bytes(planned) == pytest.approx(program.total, rel=0.1)
    assert program.communication is not None and program.communication.open_loops == 0


@pytest.mark.parametrize(("mesh", "remat", "dtype", "param_dtype"), CASES)
def test_accumulating_the_gradient_of_adapters(mesh, remat, dtype, param_dtype):
    planned = setup(mesh, remat, dtype, param_dtype, **LORA)
    (program,) = compile_trainer(planned, ("accumulate",))
    assert accumulate_bytes(planned) == pytest.approx(program.total, rel=0.1)


@pytest.mark.parametrize("more", [{}, LORA], ids=["whole", "adapters"])
@pytest.mark.parametrize(("mesh", "remat"), [("data=4,fsdp=2", "full"), ("data=2,fsdp=2,context=2", "dots"), ("fsdp=4,tensor=2", "full"), ("fsdp=8", "none")])
def test_what_is_sent(mesh, remat, more):
    planned = setup(mesh, remat, **{"model.vocab_size": 6144, **more})
    (program,) = compile_trainer(planned, ("accumulate",))
    expected = accumulate_wires(planned, host=True)
    if not more:
        assert_sent(program, expected)
        return
    # Adapters' gradients are few, and summed over the batch's axes one after another: all that is sent is compared.
    assert sum(expected.values()) == pytest.approx(sent_in_all(program), rel=0.15)


def sent_in_all(program):
    assert program.communication is not None
    return sum(c.sent for c in program.communication.collectives)


def assert_sent(program, expected, least=0.01):
    """Within 15 %, but for what is less than a ``least`` share of all."""
    sent, sizes = defaultdict(float), [getattr(program.axes, axis) for axis in MESH_AXES]
    for c in program.communication.collectives:
        sent[c.kind, axes_of(c.group, MESH_AXES, sizes)] += c.sent
    small = least * sum(sent.values())
    for key in sent.keys() | expected.keys():
        assert expected.get(key, 0.0) == pytest.approx(sent[key], rel=0.15, abs=small), key


LARGE: dict[str, Any] = {"model.vocab_size": 24576, "model.layers": 2, "trainer.logprob_chunk": 512}


def test_a_large_vocabulary():
    planned = setup("fsdp=8", **LARGE)
    (program,) = compile_trainer(planned, ("accumulate",))
    assert accumulate_bytes(planned) == pytest.approx(program.total, rel=0.1)
    assert "logits, head and its gradient" in trainer_memory(planned).working


SAMPLER: dict[str, Any] = {"cluster.mesh.sampler": "data=4,tensor=2", "rollout.slots": 64, "rollout.max_new_tokens": 448}


def test_decoding():
    planned = setup("data=8", sampler_devices=8, **SAMPLER)
    (program,) = compile_sampler(planned, ("decode",))
    staying = sampler_memory(planned).staying
    assert staying["weights"] + staying["KV cache"] == pytest.approx(program.argument, rel=0.01)
    total = staying["weights"] + staying["KV cache"] + decode_working(planned, planned.sampler, planned.slots)
    assert total == pytest.approx(program.total, rel=0.1)


def test_what_a_decode_step_sends():
    planned = setup("data=8", sampler_devices=8, **SAMPLER)
    (program,) = compile_sampler(planned, ("decode",))
    assert_sent(program, decode_wires(planned, planned.sampler, planned.slots), least=0.03)


def test_deep_samplers_are_extrapolated():
    planned = setup("data=8", sampler_devices=8, **{**SAMPLER, "model.layers": 10})
    programs = compile_sampler(planned)
    assert [p.layers for p in programs] == [SAMPLED_LAYERS] * 3
    for program in programs:
        (whole,) = compile_sampler(planned, (program.name,), unrolled=10)
        assert not whole.layers
        assert program.argument == whole.argument and program.total == pytest.approx(whole.total, rel=0.05)
        assert sent_in_all(program) == pytest.approx(sent_in_all(whole), rel=0.05)


def test_the_update():
    planned = setup("fsdp=4,data=2")
    (program,) = compile_trainer(planned, ("apply",))
    assert apply_bytes(trainer_memory(planned)) == pytest.approx(program.total, rel=0.1)


def test_kernels_are_planned_and_compiled_blockwise():
    planned = setup("data=8", dtype="bfloat16", **{"model.attention": "kernel", "model.layers": 2})
    (program,) = compile_trainer(planned, ("accumulate",))
    assert not program.refusal


@pytest.mark.parametrize(("longest", "groups"), [(512, 8), (2048, 32), (2048, 3)])
def test_prefilling(longest, groups):
    """All prompts and copies in one program; fewer, in parts; so few that they do not divide among the shards."""
    more = SAMPLER | {"rollout.max_new_tokens": longest - 64, "rollout.prefill_groups": groups, "rollout.prefill_buckets": (), "model.attention": "blockwise"}
    planned = setup("data=8", sampler_devices=8, **more)
    (program,) = compile_sampler(planned, ("enter",))
    staying = sampler_memory(planned).staying
    assert planned.longest == longest
    assert program.total - staying["weights"] - staying["KV cache"] == pytest.approx(enter_working(planned, planned.sampler), rel=0.35)


def test_rebuilding_caches_stays_within_a_shard():
    planned = setup("data=8", sampler_devices=8, **SAMPLER)
    (program,) = compile_sampler(planned, ("rebuild",))
    assert program.communication is not None
    groups = {c.group for c in program.communication.collectives if c.sent > 1e3}
    assert groups <= {(0, 1)}, "only the two devices of a tensor axis talk"
    staying = sampler_memory(planned).staying
    assert program.total - staying["weights"] - staying["KV cache"] == pytest.approx(rebuild_working(planned, planned.sampler, planned.slots), rel=0.5)
