"""Low-rank adapters: what they change, what they do not, and the policy that they merge to."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from areal_jax.cluster.meshes import build_mesh
from areal_jax.config import ConfigError, base_config
from areal_jax.config_fields import LORA_TARGETS
from areal_jax.models.adapters import add, fingerprint, join, merge, split
from areal_jax.models.architecture import Lora, ModelConfig, adapted
from areal_jax.models.checkpoint import load_policy
from areal_jax.models.export import export_policy
from areal_jax.models.policy import init_params, packed_logits, param_shapes
from areal_jax.models.sharding import named_shardings, param_specs
from areal_jax.models.tokenizer import embedded_tokenizer

PLAIN = ModelConfig("qwen2", 64, layers=2, hidden_size=24, heads=4, kv_heads=2, head_dim=6, mlp_size=40, tie_embeddings=True)
MODEL = dataclasses.replace(PLAIN, lora=Lora(3, 6.0, LORA_TARGETS))
ROW = (
    np.random.default_rng(0).integers(0, 64, (2, 10)).astype(np.int32),
    np.broadcast_to(np.arange(10, dtype=np.int32), (2, 10)),
    np.ones((2, 10), np.int32),
)
forward = jax.jit(packed_logits, static_argnums=0)


def names(tree):
    return {jax.tree_util.keystr(path, simple=True, separator="/"): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(tree)}


@functools.cache
def params_of(model, seed=0):
    random = np.random.default_rng(seed)
    return jax.tree.map(lambda s: (0.2 * random.standard_normal(s.shape) + (len(s.shape) == 1)).astype(np.float32), param_shapes(model))


def test_parts_are_the_adapters_and_the_rest():
    params = params_of(MODEL)
    trained, frozen = split(MODEL, params)
    assert names(trained).keys() == {
        f"layers/layer_{i}/{place}/{name}/{part}"
        for i in range(2)
        for place, inner in (("attention", ("query", "key", "value", "output")), ("mlp", ("gate", "up", "down")))
        for name in inner
        for part in ("lora_a", "lora_b")
    }
    assert names(frozen).keys() == names(param_shapes(PLAIN)).keys()
    jax.tree.map(np.testing.assert_array_equal, join(trained, frozen), params)
    assert split(PLAIN, frozen) == (frozen, {})
    with pytest.raises(ValueError, match="embedding"):
        join(frozen, {"embedding": 0})


def test_only_the_targets_have_adapters():
    model = dataclasses.replace(PLAIN, lora=Lora(2, 4.0, ("value", "down")))
    trained = names(split(model, param_shapes(model))[0])
    assert {name.split("/")[-2] for name in trained} == {"value", "down"}
    assert trained["layers/layer_1/mlp/down/lora_a"].shape == (40, 2) and trained["layers/layer_1/mlp/down/lora_b"].shape == (2, 24)


def test_fresh_adapters_leave_the_policy_as_it_is():
    base = params_of(PLAIN)
    params = add(MODEL, base, jax.random.key(1))
    np.testing.assert_array_equal(forward(MODEL, params, *ROW), forward(PLAIN, base, *ROW))
    a, b = (np.concatenate([np.ravel(x) for name, x in names(params).items() if name.endswith(part)]) for part in ("lora_a", "lora_b"))
    assert not b.any() and len(np.unique(a)) > 0.99 * len(a)
    other = add(MODEL, base, jax.random.key(2))
    assert not np.array_equal(names(other)["layers/layer_0/mlp/up/lora_a"], names(params)["layers/layer_0/mlp/up/lora_a"])


def test_the_rest_of_a_new_policy_does_not_depend_on_the_adapters():
    one, two = (jax.jit(init_params, static_argnums=0)(model, jax.random.key(3)) for model in (PLAIN, MODEL))
    jax.tree.map(np.testing.assert_array_equal, split(MODEL, two)[1], one)


def test_merged_policy_has_the_same_logits(tmp_path):
    params = params_of(MODEL)
    ours = np.asarray(forward(MODEL, params, *ROW))
    assert np.abs(ours - np.asarray(forward(PLAIN, split(MODEL, params)[1], *ROW))).max() > 0.05, "these adapters matter"
    model, merged = merge(MODEL, params)
    assert model == PLAIN
    np.testing.assert_allclose(forward(model, merged, *ROW), ours, atol=1e-5)
    kernel, linear = names(merged)["layers/layer_1/mlp/up/kernel"], params["layers"]["layer_1"]["mlp"]["up"]
    np.testing.assert_allclose(kernel, linear["kernel"] + 2.0 * linear["lora_a"].astype(np.float64) @ linear["lora_b"], atol=1e-6)


def test_exported_policy_is_the_merged_one(tmp_path):
    tokenizer = embedded_tokenizer()
    model = dataclasses.replace(MODEL, vocab_size=max(64, tokenizer.vocab_size), eos_ids=tokenizer.eos_ids, pad_id=tokenizer.pad_id)
    params = jax.tree.map(jnp.asarray, params_of(model))
    export_policy(tmp_path / "policy", model, params, tokenizer)
    loaded, back = load_policy(tmp_path / "policy")
    assert loaded.lora is None
    np.testing.assert_allclose(forward(loaded, back, *ROW), forward(model, params, *ROW), atol=1e-5)


def test_merge_keeps_the_type_of_the_kernel():
    trained, frozen = split(MODEL, params_of(MODEL))
    _, merged = merge(MODEL, join(trained, jax.tree.map(lambda x: jnp.asarray(x, jnp.bfloat16), frozen)))
    assert {leaf.dtype for leaf in jax.tree.leaves(merged)} == {jnp.dtype("bfloat16")}


def test_gradients_follow_from_those_of_the_merged_kernel():
    """∂A = s · G Bᵀ and ∂B = s · Aᵀ G with G the gradient of the whole kernel."""
    trained, frozen = split(MODEL, params_of(MODEL))
    weight = np.random.default_rng(1).standard_normal((2, 10, 64)).astype(np.float32)
    slopes = jax.jit(jax.grad(lambda p: jnp.sum(packed_logits(MODEL, join(p, frozen), *ROW) * weight)))(trained)
    _, merged = merge(MODEL, join(trained, frozen))
    whole = jax.jit(jax.grad(lambda p: jnp.sum(packed_logits(PLAIN, p, *ROW) * weight)))(merged)
    ours, kernels, adapters = names(slopes), names(whole), names(trained)
    for name in kernels:
        if f"{name.removesuffix('kernel')}lora_a" in ours:
            at = name.removesuffix("kernel")
            g, a, b = (np.asarray(x, np.float64) for x in (kernels[name], adapters[at + "lora_a"], adapters[at + "lora_b"]))
            for got, want in ((ours[at + "lora_a"], 2.0 * g @ b.T), (ours[at + "lora_b"], 2.0 * a.T @ g)):
                np.testing.assert_allclose(got, want, atol=1e-4 * np.abs(want).max(), err_msg=name)


def test_checksum_knows_every_bit_and_no_mesh():
    frozen = split(MODEL, params_of(MODEL))[1]
    whole = fingerprint(frozen)
    mesh = build_mesh(jax.devices()[:4], fsdp=2, tensor=2)
    assert fingerprint(jax.device_put(frozen, named_shardings(mesh, param_specs(PLAIN), frozen))) == whole
    kernel = frozen["layers"]["layer_1"]["mlp"]["up"]["kernel"]
    changed, turned = kernel.copy(), kernel.copy()
    changed[3, 5] = np.nextafter(changed[3, 5], 9.0)
    turned[[3, 4]] = turned[[4, 3]]
    for other in (changed, turned):
        tree = jax.tree.map(lambda leaf, other=other: other if leaf is kernel else leaf, frozen)
        assert fingerprint(tree) != whole
    assert fingerprint({}) == ""


def test_experts_have_no_adapters():
    section = base_config().model
    section.lora_rank = 4
    mixture = dataclasses.replace(PLAIN, family="qwen3_moe", experts=4, experts_per_token=2, expert_mlp_size=8)
    with pytest.raises(ConfigError, match=r"'model\.lora_targets'.*got gate, up, down; set"):
        adapted(mixture, section)
    section.lora_targets = ("query", "value")
    assert adapted(mixture, section).lora == Lora(4, 16.0, ("query", "value"))
    section.lora_rank = 0
    assert adapted(mixture, section) is mixture
