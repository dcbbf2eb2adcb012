"""The plan's memory and traffic against the compiler's: the same programs, lowered for eight devices of this host."""

from collections import defaultdict
from typing import Any

import pytest

from areal_jax.config import base_config, put, validate
from areal_jax.config_devices import MESH_AXES
from areal_jax.planner.collectives import axes_of
from areal_jax.planner.compiled import SAMPLED_LAYERS, compile_sampler, compile_trainer
from areal_jax.planner.memory import accumulate_bytes, apply_bytes, decode_working, prefill_working, sampler_memory, trainer_memory
from areal_jax.planner.setup import make_setup
from areal_jax.planner.topology import parse_topologies
from areal_jax.planner.wires import accumulate_wires, decode_wires, prefill_wires

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


SAMPLER: dict[str, Any] = {"rollout.slots": 256, "rollout.max_new_tokens": 448, "rollout.kv_pages": 1025, "rollout.prefill_chunk": 2048}
SAMPLER_MESHES = ["data=8", "data=4,tensor=2", "data=4,fsdp=2", "data=2,fsdp=2,tensor=2"]


def sampler(mesh: str, **more: Any):
    return setup("data=8", sampler_devices=8, **{"cluster.mesh.sampler": mesh, **SAMPLER, **more})


@pytest.mark.parametrize("mesh", SAMPLER_MESHES)
def test_a_replicas_programs(mesh):
    planned = sampler(mesh)
    decode, prefill = compile_sampler(planned)
    assert decode.axes == prefill.axes == planned.replica
    staying = sampler_memory(planned).staying
    lying = staying["weights"] + staying["KV cache"]
    assert lying == pytest.approx(decode.argument, rel=0.01)
    assert lying + decode_working(planned) == pytest.approx(decode.total, rel=0.03)
    assert decode_working(planned) == pytest.approx(decode.temporary, rel=0.15)
    # The head and most of the last block lie there as well, but are no arguments of a prefill.
    assert 0.9 * lying < prefill.argument < lying
    assert prefill_working(planned) == pytest.approx(prefill.temporary, rel=0.1)


@pytest.mark.parametrize("more", [{}, {"rollout.top_k": 50, "rollout.top_p": 0.9}], ids=["whole", "filtered"])
def test_decoding_with_a_large_vocabulary(more):
    planned = sampler("data=4,tensor=2", **{"model.vocab_size": 12288, **more})
    (program,) = compile_sampler(planned, ("decode",))
    assert decode_working(planned) == pytest.approx(program.temporary, rel=0.1)


@pytest.mark.parametrize("mesh", ["data=8", "data=4,tensor=2"])
def test_copies_that_the_hosts_compiler_makes_of_bfloat16(mesh):
    planned = sampler(mesh, dtype="bfloat16")
    decode, prefill = compile_sampler(planned)
    assert decode_working(planned) == decode_working(planned, widened=True) > 3 * decode_working(planned, widened=False)
    assert decode_working(planned) == pytest.approx(decode.temporary, rel=0.1)
    assert prefill_working(planned) == pytest.approx(prefill.temporary, rel=0.15)


@pytest.mark.parametrize("mesh", SAMPLER_MESHES)
def test_what_a_replica_sends(mesh):
    planned = sampler(mesh)
    decode, prefill = compile_sampler(planned)
    assert_sent(decode, decode_wires(planned, planned.replica, planned.slots), least=0.03)
    tokens = planned.config.rollout.prefill_chunk
    assert_sent(prefill, prefill_wires(planned.model, planned.replica, tokens, programs=1))


def test_deep_samplers_are_extrapolated():
    planned = sampler("data=4,tensor=2", **{"model.layers": 10})
    programs = compile_sampler(planned)
    assert [p.layers for p in programs] == [SAMPLED_LAYERS] * 2
    for program, whole in zip(programs, compile_sampler(planned, unrolled=10), strict=True):
        assert not whole.layers
        assert program.argument == whole.argument and program.total == pytest.approx(whole.total, rel=0.05)
        assert sent_in_all(program) == pytest.approx(sent_in_all(whole), rel=0.05)


def test_a_reference_policy_is_a_second_copy_of_the_parameters_unless_adapters_lie_on_it():
    reference: dict[str, Any] = {"algorithm.kl_coefficient": 0.1}
    plain, with_reference, adapted = (trainer_memory(setup("fsdp=8", **more)).staying for more in ({}, reference, {**reference, **LORA}))
    assert with_reference["reference policy"] == plain["parameters"] > 0 and "reference policy" not in {*plain, *adapted}
    assert with_reference["batch"] > plain["batch"], "its log-probs lie there too"


def test_the_update():
    planned = setup("fsdp=4,data=2")
    (program,) = compile_trainer(planned, ("apply",))
    assert apply_bytes(trainer_memory(planned)) == pytest.approx(program.total, rel=0.1)


def test_kernels_are_planned_and_compiled_blockwise():
    planned = setup("data=8", dtype="bfloat16", **{"model.attention": "kernel", "model.layers": 2})
    (program,) = compile_trainer(planned, ("accumulate",))
    assert not program.refusal
