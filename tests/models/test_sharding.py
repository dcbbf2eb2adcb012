"""The table of shardings: complete, exact and legal on every mesh."""

import math

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from areal_jax.cluster.meshes import build_mesh
from areal_jax.config_fields import LORA_TARGETS
from areal_jax.models import sharding
from areal_jax.models.architecture import Lora, ModelConfig
from areal_jax.models.policy import packed_logits, param_shapes
from areal_jax.models.sharding import LOGICAL_AXES, logical_to_mesh, named_shardings, param_specs

LORA = Lora(3, 6.0, LORA_TARGETS)


def model_of(family, **changes):
    sizes = {"vocab_size": 32, "layers": 2, "hidden_size": 24, "heads": 4, "kv_heads": 2, "head_dim": 6, "mlp_size": 40}
    mixture = {"experts": 4, "experts_per_token": 2, "expert_mlp_size": 16} if family == "qwen3_moe" else {}
    return ModelConfig(family, **(sizes | mixture | changes))


def names(tree):
    leaves = jax.tree_util.tree_leaves_with_path(tree, is_leaf=lambda x: isinstance(x, P))
    return {jax.tree_util.keystr(path, simple=True, separator="/"): leaf for path, leaf in leaves}


@pytest.mark.parametrize("family", ["qwen2", "qwen3", "llama", "qwen3_moe"])
@pytest.mark.parametrize("changes", [{}, {"tie_embeddings": True}, {"lora": LORA}])
def test_every_parameter_has_one_line_of_its_rank(family, changes):
    model = model_of(family, **changes)
    specs, shapes = names(param_specs(model)), names(param_shapes(model))
    assert specs.keys() == shapes.keys()
    for name, shape in shapes.items():
        lines = [axes for suffix, axes in LOGICAL_AXES.items() if name == suffix or name.endswith("/" + suffix)]
        assert len(lines) == 1, name
        assert len(lines[0]) == len(shape.shape), name
        assert specs[name] == logical_to_mesh(*lines[0])


def test_no_line_of_the_table_is_idle():
    used = {
        suffix
        for family in ("qwen2", "qwen3", "llama", "qwen3_moe")
        for name in names(param_shapes(model_of(family, lora=LORA)))
        for suffix in LOGICAL_AXES
        if name == suffix or name.endswith("/" + suffix)
    }
    assert used == set(LOGICAL_AXES)


def test_tensor_parallel_splits_outputs_of_the_first_and_inputs_of_the_second_product():
    specs = names(param_specs(model_of("qwen2")))
    layer = "layers/layer_0"
    assert specs[f"{layer}/attention/query/kernel"] == P("fsdp", "tensor") and specs[f"{layer}/attention/output/kernel"] == P("tensor", "fsdp")
    assert specs[f"{layer}/mlp/up/kernel"] == P("fsdp", "tensor") and specs[f"{layer}/mlp/down/kernel"] == P("tensor", "fsdp")
    assert specs[f"{layer}/attention/key/bias"] == P("tensor") and specs[f"{layer}/mlp_norm/scale"] == P(None)


def test_a_parameter_without_a_line_is_named(monkeypatch):
    monkeypatch.delitem(sharding.LOGICAL_AXES, "mlp/gate/kernel")
    with pytest.raises(KeyError, match=r"layers/layer_0/mlp/gate/kernel.*LOGICAL_AXES"):
        param_specs(model_of("llama"))


def test_an_axis_that_does_not_divide_is_replicated():
    model = model_of("qwen2", vocab_size=31, kv_heads=1, hidden_size=18)
    mesh = build_mesh(jax.devices(), fsdp=4, tensor=2)
    placed = names(named_shardings(mesh, param_specs(model), param_shapes(model)))
    assert placed["embedding"].spec == P(None, None)
    assert placed["layers/layer_0/attention/query/kernel"].spec == P(None, "tensor")
    assert placed["layers/layer_0/attention/key/kernel"].spec == P(None, "tensor")
    whole = names(named_shardings(build_mesh(jax.devices()[:4], fsdp=2, tensor=2), param_specs(model), param_shapes(model)))
    assert whole["embedding"].spec == P(None, "fsdp")
    jax.device_put(jax.tree.map(lambda s: np.zeros(s.shape, np.float32), param_shapes(model)), named_shardings(mesh, param_specs(model), param_shapes(model)))


@pytest.mark.parametrize("axes", [{"fsdp": 2}, {"data": 2, "fsdp": 2, "tensor": 2}, {"context": 2, "tensor": 4}], ids=str)
def test_logits_do_not_depend_on_the_mesh(axes):
    model = model_of("qwen2")
    random = np.random.default_rng(1)
    params = jax.tree.map(lambda s: (0.3 * random.standard_normal(s.shape)).astype(np.float32), param_shapes(model))
    mesh = build_mesh(jax.devices()[: math.prod(axes.values())], **axes)
    row = np.random.default_rng(0).integers(0, 32, (4, 8)).astype(np.int32)
    positions, segments = np.broadcast_to(np.arange(8), row.shape).astype(np.int32), np.ones_like(row)
    forward = jax.jit(packed_logits, static_argnums=0)
    alone = np.asarray(forward(model, params, row, positions, segments))
    placed = jax.device_put(params, named_shardings(mesh, param_specs(model), params))
    batch = [jax.device_put(x, jax.sharding.NamedSharding(mesh, logical_to_mesh("batch", "length"))) for x in (row, positions, segments)]
    np.testing.assert_allclose(np.asarray(forward(model, placed, *batch)), alone, atol=2e-5)
