"""The mixture of experts: against plain numpy, against transformers, and on several devices."""

import functools
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import numpy_policy
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from random_policy import params_of

from areal_jax.cluster.meshes import build_mesh
from areal_jax.models.architecture import ModelConfig
from areal_jax.models.moe import mixture, token_spec
from areal_jax.models.policy import bind, packed_logits, param_shapes
from areal_jax.models.sharding import logical_to_mesh, named_shardings, param_specs

HIDDEN = 24


def model_of(**changes):
    sizes = {"vocab_size": 29, "layers": 1, "hidden_size": HIDDEN, "heads": 4, "kv_heads": 2, "head_dim": 6, "mlp_size": 40}
    return ModelConfig("qwen3_moe", **(sizes | {"experts": 6, "experts_per_token": 2, "expert_mlp_size": 16} | changes))


def block_of(model, seed=0):
    """The mixture's own parameters, by name."""
    return params_of(model, seed)["layers"]["layer_0"]["mlp"]


def tokens_of(*shape, seed=1):
    return np.random.default_rng(seed).standard_normal((*shape, HIDDEN)).astype(np.float32)


def apply(model, block, x):
    experts = block["experts"]
    return mixture(model, x, block["router"]["kernel"], *(experts[name]["kernel"] for name in ("gate", "up", "down")))


def exact(model, block, x):
    block = numpy_policy.as_float64(block)
    return np.stack([numpy_policy.mixture(model, block, h) for h in np.asarray(x, np.float64).reshape(-1, HIDDEN)]).reshape(x.shape)


@pytest.mark.parametrize("shape", [(7,), (2, 5), (1,)])
@pytest.mark.parametrize("normalise", [True, False])
def test_mixture_is_the_sum_over_the_chosen_experts(shape, normalise):
    model = model_of(normalise_experts=normalise)
    block, x = block_of(model), tokens_of(*shape)
    np.testing.assert_allclose(apply(model, block, x), exact(model, block, x), rtol=1e-5, atol=1e-5)


def test_an_expert_with_all_tokens_and_experts_with_none():
    model = model_of(experts_per_token=1)
    block, x = block_of(model), tokens_of(9)
    block["router"]["kernel"] *= 0
    block["router"]["kernel"][:, 4] = 1.0
    x = np.abs(x)
    np.testing.assert_allclose(apply(model, block, x), exact(model, block, x), rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(
        apply(model, block, x), [numpy_policy.swiglu(*(block["experts"][n]["kernel"][4] for n in ("gate", "up", "down")), h) for h in x], atol=1e-4
    )


def test_gradients_are_the_slopes_of_the_numpy_mixture():
    """Along random directions of every leaf and of the tokens, by central differences in float64."""
    model = model_of()
    block, x = block_of(model), tokens_of(11)
    weight = np.random.default_rng(3).standard_normal(x.shape)
    gradients = jax.grad(lambda b, y: jnp.sum(apply(model, b, y) * weight), argnums=(0, 1))(block, x)
    values, structure = jax.tree.flatten((block, x))
    for place, gradient in enumerate(jax.tree.leaves(gradients)):
        direction = np.random.default_rng(place).standard_normal(gradient.shape)
        moved = []
        for step in (1e-6, -1e-6):
            changed = [v.astype(np.float64) + (step * direction if i == place else 0.0) for i, v in enumerate(values)]
            moved.append(np.sum(exact(model, *jax.tree.unflatten(structure, changed)) * weight))
        slope = (moved[0] - moved[1]) / 2e-6
        assert abs(np.sum(np.asarray(gradient) * direction) - slope) <= 1e-4 * max(1.0, abs(slope)), place


@functools.cache
def on_mesh(data, fsdp, tensor, context=1):
    sizes = {"data": data, "fsdp": fsdp, "context": context, "tensor": tensor}
    return build_mesh(jax.devices()[: math.prod(sizes.values())], **sizes)


def layer(model, block, x, mesh):
    """The block's module over these parameters."""
    params = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), param_shapes(model))
    params["layers"]["layer_0"]["mlp"] = block
    return bind(model, params).layers["layer_0"].mlp(x, mesh)


@pytest.mark.parametrize("mesh", [(2, 2, 2), (1, 2, 4), (8, 1, 1), (1, 2, 2, 2)])
@pytest.mark.parametrize("shape", [(8, 6), (16,), (3, 5)])
def test_values_and_gradients_do_not_depend_on_the_mesh(mesh, shape):
    model, mesh = model_of(), on_mesh(*mesh)
    block, x = block_of(model), tokens_of(*shape)
    weight = np.random.default_rng(3).standard_normal(x.shape).astype(np.float32)

    def both(b, y, mesh):
        def loss(b, y):
            out = layer(model, b, y, mesh)
            return jnp.sum(out * weight), out

        return jax.value_and_grad(loss, argnums=(0, 1), has_aux=True)(b, y)

    specs = param_specs(model)["layers"]["layer_0"]["mlp"]
    placed = jax.device_put(block, named_shardings(mesh, specs, block))
    rows = jax.device_put(x, NamedSharding(mesh, token_spec(mesh, x.shape)))
    (_, alone), slopes = jax.jit(both, static_argnums=2)(block, x, None)
    (_, together), shared = jax.jit(both, static_argnums=2)(placed, rows, mesh)
    np.testing.assert_allclose(together, alone, atol=1e-5)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5 * max(1.0, float(np.abs(b).max()))), shared, slopes)


def test_tokens_stay_where_they_are_and_only_kernels_are_gathered():
    model, mesh = model_of(), on_mesh(2, 2, 2)
    block, x = block_of(model), tokens_of(8, 50)
    placed = jax.device_put(block, named_shardings(mesh, param_specs(model)["layers"]["layer_0"]["mlp"], block))
    rows = jax.device_put(x, NamedSharding(mesh, token_spec(mesh, x.shape)))
    program = jax.jit(lambda b, y: layer(model, b, y, mesh)).lower(placed, rows).compile()
    text = program.as_text()
    gathered = [tuple(int(n) for n in dims.split(",")) for dims in re.findall(r"= f32\[([\d,]+)\]\S* all-gather\(", text)]
    kernels = [(HIDDEN, model.experts), (model.experts, HIDDEN, 8), (model.experts, HIDDEN, 8), (model.experts, 8, HIDDEN)]
    assert sorted(gathered) == sorted(kernels), gathered
    assert "all-to-all" not in text
    assert text.count(" all-reduce(") == 1, "one sum over tensor"
    assert program.output_shardings.is_equivalent_to(rows.sharding, 3)


def test_gradients_of_kernels_are_scattered_before_they_are_summed():
    """Over fsdp, so that a device sends the sums of its own part alone over data."""
    model, mesh = model_of(), on_mesh(2, 2, 2)
    block, x = block_of(model), tokens_of(8, 50)
    shardings = named_shardings(mesh, param_specs(model)["layers"]["layer_0"]["mlp"], block)
    rows = jax.device_put(x, NamedSharding(mesh, token_spec(mesh, x.shape)))
    program = jax.jit(jax.grad(lambda b, y: jnp.sum(jnp.square(layer(model, b, y, mesh)))), out_shardings=shardings)
    text = program.lower(jax.device_put(block, shardings), rows).compile().as_text()

    def shapes(operation):
        results = re.findall(rf"= (.*?) {operation}\(", text)
        return [tuple(int(n) for n in dims.split(",")) for result in results for dims in re.findall(r"f32\[([\d,]+)\]", result)]

    whole, part = sorted([(6, HIDDEN, 8)] * 2 + [(6, 8, HIDDEN)]), sorted([(6, HIDDEN // 2, 8)] * 2 + [(6, 8, HIDDEN // 2)])
    kernels = {*whole, *part}
    assert sorted(shape for shape in shapes("reduce-scatter") if shape in kernels) == part
    assert sorted(shape for shape in shapes("all-reduce") if shape in kernels) == part


def test_whole_policy_on_a_mesh_has_the_logits_of_one_device():
    model, mesh = model_of(layers=2), on_mesh(2, 2, 2)
    params = params_of(model)
    tokens = np.random.default_rng(0).integers(0, 29, (4, 12)).astype(np.int32)
    positions, segments = np.broadcast_to(np.arange(12, dtype=np.int32), tokens.shape), np.ones_like(tokens)
    forward = jax.jit(packed_logits, static_argnums=0)
    alone = np.asarray(forward(model, params, tokens, positions, segments))
    placed = jax.device_put(params, named_shardings(mesh, param_specs(model), params))
    batch = [jax.device_put(a, NamedSharding(mesh, logical_to_mesh("batch", None))) for a in (tokens, positions, segments)]
    np.testing.assert_allclose(np.asarray(forward(model, placed, *batch)), alone, atol=3e-5)


def test_token_spec_leaves_out_what_does_not_divide():
    mesh = on_mesh(2, 2, 2)
    assert token_spec(mesh, (8, 5, HIDDEN)) == P(("data", "fsdp"), "context", None)
    assert token_spec(mesh, (6, HIDDEN)) == P(None, None)
    assert token_spec(on_mesh(1, 2, 1, context=2), (8, 5, HIDDEN)) == P(("data", "fsdp"), None, None)


@pytest.mark.parametrize("normalise", [True, False])
def test_logits_are_those_of_transformers(normalise):
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    model = model_of(layers=2, normalise_experts=normalise, rope_theta=1000.0)
    params = params_of(model)
    config = transformers.Qwen3MoeConfig(
        vocab_size=model.vocab_size,
        hidden_size=HIDDEN,
        intermediate_size=model.mlp_size,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=6,
        num_experts=model.experts,
        num_experts_per_tok=model.experts_per_token,
        moe_intermediate_size=model.expert_mlp_size,
        norm_topk_prob=normalise,
        rms_norm_eps=model.norm_epsilon,
        rope_theta=model.rope_theta,
        rope_parameters={"rope_type": "default", "rope_theta": model.rope_theta},
        tie_word_embeddings=False,
        attn_implementation="eager",
    )
    theirs = transformers.Qwen3MoeForCausalLM(config).eval()
    state = {
        "model.embed_tokens.weight": params["embedding"],
        "model.norm.weight": params["final_norm"]["scale"],
        "lm_head.weight": params["lm_head"]["kernel"].T,
    }
    for i in range(2):
        p, at = params["layers"][f"layer_{i}"], f"model.layers.{i}."
        for ours, stored in (("query", "q"), ("key", "k"), ("value", "v"), ("output", "o")):
            state[f"{at}self_attn.{stored}_proj.weight"] = p["attention"][ours]["kernel"].T
        for ours, stored in (("query_norm", "q_norm"), ("key_norm", "k_norm")):
            state[f"{at}self_attn.{stored}.weight"] = p["attention"][ours]["scale"]
        experts = p["mlp"]["experts"]
        state[f"{at}mlp.gate.weight"] = p["mlp"]["router"]["kernel"].T
        state[f"{at}mlp.experts.gate_up_proj"] = np.concatenate([experts["gate"]["kernel"], experts["up"]["kernel"]], 2).transpose(0, 2, 1)
        state[f"{at}mlp.experts.down_proj"] = experts["down"]["kernel"].transpose(0, 2, 1)
        state[f"{at}input_layernorm.weight"], state[f"{at}post_attention_layernorm.weight"] = p["attention_norm"]["scale"], p["mlp_norm"]["scale"]
    theirs.load_state_dict({name: torch.tensor(np.ascontiguousarray(value)) for name, value in state.items()})
    tokens = np.random.default_rng(5).integers(0, model.vocab_size, (2, 17)).astype(np.int32)
    positions, segments = np.broadcast_to(np.arange(17, dtype=np.int32), tokens.shape), np.ones_like(tokens)
    ours = np.asarray(jax.jit(packed_logits, static_argnums=0)(model, params, tokens, positions, segments))
    with torch.no_grad():
        wanted = theirs(torch.tensor(tokens, dtype=torch.long)).logits.numpy()
    assert np.std(wanted) > 0.3
    np.testing.assert_allclose(ours, wanted, atol=1e-4)
