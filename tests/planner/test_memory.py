"""The plan's memory against the compiler's: the same programs, lowered for eight devices of this host."""

import pytest

from areal_jax.config import base_config, put, validate
from areal_jax.planner.compiled import compile_sampler, compile_trainer
from areal_jax.planner.memory import accumulate_bytes, decode_working, enter_working, rebuild_working, sampler_memory, trainer_memory
from areal_jax.planner.setup import make_setup
from areal_jax.planner.topology import parse_topologies

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


def setup(trainer, remat="full", dtype="float32", param_dtype="float32", sampler_devices=1, **more):
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
    return make_setup(validate(config, planned=True), parse_topologies(f"cpu:{8 + sampler_devices}")[0])


@pytest.mark.parametrize(("mesh", "remat", "dtype", "param_dtype"), CASES)
def test_accumulating_a_gradient(mesh, remat, dtype, param_dtype):
    planned = setup(mesh, remat, dtype, param_dtype)
    (program,) = compile_trainer(planned, ("accumulate",))
    assert program.axes == planned.trainer and not program.refusal
    assert accumulate_bytes(planned) == pytest.approx(program.total, rel=0.1)
    assert program.communication is not None and program.communication.open_loops == 0


def test_a_large_vocabulary():
    planned = setup("fsdp=8", **{"model.vocab_size": 24576, "model.layers": 2, "trainer.logprob_chunk": 512})
    (program,) = compile_trainer(planned, ("accumulate",))
    assert accumulate_bytes(planned) == pytest.approx(program.total, rel=0.1)
    assert "logits, head and its gradient" in trainer_memory(planned).working


SAMPLER = {"cluster.mesh.sampler": "data=4,tensor=2", "rollout.slots": 64, "rollout.max_new_tokens": 448}


def test_decoding():
    planned = setup("data=8", sampler_devices=8, **SAMPLER)
    (program,) = compile_sampler(planned, ("decode",))
    staying = sampler_memory(planned).staying
    assert staying["weights"] + staying["KV cache"] == pytest.approx(program.argument, rel=0.01)
    total = staying["weights"] + staying["KV cache"] + decode_working(planned, planned.sampler, planned.slots)
    assert total == pytest.approx(program.total, rel=0.1)


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
