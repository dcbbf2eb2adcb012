"""A run of adapters over an exported policy: they alone travel, are kept and change; stopped, it goes on. And a run of a mixture of experts."""

import json
import signal

import numpy as np
import orbax.checkpoint as ocp
import pytest
from launch_programs import Started, check_history, rows, run, saved
from safetensors.numpy import load_file, save_file

VERIFIER = "reward.verifier=launch_verifiers:parity"
RANK, HIDDEN, KV, MLP = 4, 32, 16, 64
ADAPTERS = RANK * (2 * (HIDDEN + HIDDEN) + 2 * (HIDDEN + KV) + 3 * (HIDDEN + MLP))
"""Numbers in the adapters of the tiny policy's one block."""


@pytest.fixture(scope="module")
def settings(warm, cache):
    return (cache, VERIFIER, f"model.path={warm / 'policy'}", f"model.lora_rank={RANK}", "trainer.steps=6", "trainer.learning_rate=0.01", "eval.every_steps=0")


@pytest.fixture(scope="module")
def adapted(tmp_path_factory, settings):
    """Stopped in training, then run to its end."""
    workdir = tmp_path_factory.mktemp("adapters") / "run"
    program = Started("train", workdir, *settings)
    program.until(lambda: len(rows(workdir / "metrics.jsonl")) >= 2)
    program.send(signal.SIGTERM)
    assert program.end(30.0) == 128 + signal.SIGTERM
    assert 2 <= saved(workdir / "checkpoints")[-1] < 6
    run("train", workdir, *settings)
    return workdir


def test_only_adapters_travel_and_the_engines_agree(adapted):
    _, metrics = check_history(adapted, 6)
    assert {row["weight_sync/bytes"] for row in metrics if row["weight_sync/bytes"]} == {4 * ADAPTERS}
    assert all(row["engine_gap/max"] is None or row["engine_gap/max"] <= 1e-4 for row in metrics)
    assert any(row["engine_gap/max"] is not None for row in metrics) and all(row["grad_norm"] > 0 for row in metrics)


def test_only_adapters_are_kept(adapted):
    newest = adapted / "checkpoints" / str(saved(adapted / "checkpoints")[-1])
    with ocp.StandardCheckpointer() as checkpointer:
        stored = checkpointer.metadata(newest / "state").item_metadata.tree
    assert sum(int(np.prod(leaf.shape)) for leaf in _leaves(stored["params"])) == ADAPTERS
    assert len(json.loads((newest / "meta" / "metadata").read_text())["base"]) == 8


def test_export_differs_from_the_base_in_the_adapted_kernels_alone(adapted, warm):
    base, now = (load_file(folder / "policy" / "model.safetensors") for folder in (warm, adapted))
    assert base.keys() == now.keys()
    for name, tensor in base.items():
        adapts = name.endswith("_proj.weight")
        assert (np.abs(now[name] - tensor).max() > 1e-4) if adapts else np.array_equal(now[name], tensor), name
        if adapts:
            assert np.linalg.matrix_rank((now[name] - tensor).astype(np.float64), tol=1e-5) <= RANK, name


def test_other_weights_under_the_adapters_are_refused(adapted, settings, warm, tmp_path):
    """The same path with one number changed."""
    file = warm / "policy" / "model.safetensors"
    before = file.read_bytes()
    tensors = load_file(file)
    tensors["model.norm.weight"][0] += 1e-3
    save_file(tensors, file, metadata={"format": "pt"})
    try:
        _, errors = run("train", adapted, *settings[:-3], "trainer.steps=6", *settings[-2:], code=2)
    finally:
        file.write_bytes(before)
    assert "weights they were trained on" in errors


def test_adapters_from_warm_up_to_training(settings, warm, tmp_path):
    """launch/sft.py learns adapters, and launch/train.py in the same directory goes on from them."""
    workdir = tmp_path / "run"
    run("sft", workdir, *settings, "sft.steps=4")
    base, learnt = (load_file(folder / "policy" / "model.safetensors") for folder in (warm, workdir))
    run("train", workdir, *settings, "sft.steps=4", "trainer.steps=2")
    _, metrics = check_history(workdir, 2)
    assert all(row["engine_gap/max"] is None or row["engine_gap/max"] <= 1e-4 for row in metrics)
    trained = load_file(workdir / "policy" / "model.safetensors")
    name = "model.layers.0.mlp.up_proj.weight"
    for earlier, later in ((base, learnt), (learnt, trained)):
        assert np.abs(later[name] - earlier[name]).max() > 1e-4 and np.array_equal(later["model.norm.weight"], base["model.norm.weight"])
    assert np.linalg.matrix_rank((trained[name] - base[name]).astype(np.float64), tol=1e-5) <= RANK


def test_mixture_of_experts_trains(tmp_path, cache):
    sizes = ("model.family=qwen3_moe", "model.experts=4", "model.experts_per_token=2", "model.expert_mlp_size=16")
    run("train", tmp_path / "mixture", cache, VERIFIER, *sizes, "trainer.steps=2", "eval.every_steps=0")
    _, metrics = check_history(tmp_path / "mixture", 2)
    assert all(row["grad_norm"] > 0 for row in metrics)
    assert all(row["engine_gap/max"] is None or row["engine_gap/max"] <= 1e-4 for row in metrics)
    assert json.loads((tmp_path / "mixture" / "policy" / "config.json").read_text())["num_experts"] == 4


def _leaves(tree):
    return [leaf for value in tree.values() for leaf in _leaves(value)] if isinstance(tree, dict) else [tree]
