"""The training forward pass: however it is computed and divided, the same log-probs, entropies and gradients; and the memory that it promises."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding

from areal_jax.cluster.meshes import build_mesh
from areal_jax.config import base_config
from areal_jax.models.architecture import Lora, ModelConfig
from areal_jax.models.forward import ForwardSettings, forward_settings, packed_logprobs
from areal_jax.models.policy import packed_logits, param_shapes
from areal_jax.models.sharding import logical_to_mesh, named_shardings, param_specs

VOCABULARY, LENGTH, ROWS = 32, 32, 8


@pytest.fixture(scope="module", autouse=True)
def quick_compilation():
    """Most of these tests' time is XLA's; what it optimises is not their subject."""
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)


def model_of(family="qwen2", **changes):
    sizes = {"vocab_size": VOCABULARY, "layers": 2, "hidden_size": 16, "heads": 8, "kv_heads": 2, "head_dim": 4, "mlp_size": 32}
    return ModelConfig(family, **(sizes | changes))


def params_of(model, seed=0):
    random = np.random.default_rng(seed)

    def leaf(shape):
        return ((len(shape.shape) == 1) + shape.shape[0] ** -0.5 * random.standard_normal(shape.shape)).astype(np.float32)

    return jax.tree.map(leaf, param_shapes(model))


def packed_rows(rows=ROWS, length=LENGTH, vocabulary=VOCABULARY, seed=0):
    """(tokens, positions, segment ids, targets, weights): segments of random lengths, padding at the end; weight 0 where no token follows."""
    random = np.random.default_rng(seed)
    tokens = random.integers(0, vocabulary, (rows, length)).astype(np.int32)
    positions, segments = np.zeros((rows, length), np.int32), np.zeros((rows, length), np.int32)
    for row in range(rows):
        at, number = 0, 1
        while (size := int(random.integers(2, length // 2))) + at <= length - 2:
            positions[row, at : at + size], segments[row, at : at + size] = np.arange(size), number
            at, number = at + size, number + 1
    follows = (segments > 0) & (np.roll(segments, -1, 1) == segments)
    weights = np.where(follows, random.standard_normal((rows, length)), 0.0).astype(np.float32)
    return tokens, positions, segments, np.roll(tokens, -1, 1), weights


def value_and_gradient(model, settings):
    """Jitted: a loss of log-probs and entropies with random weights, and its gradient."""

    def loss(params, tokens, positions, segments, targets, weights):
        logprobs, entropy = packed_logprobs(model, params, tokens, positions, segments, targets, 0.7, settings)
        used = weights != 0
        return jnp.sum(jnp.where(used, weights * logprobs + 0.3 * weights**2 * entropy, 0.0)), jnp.where(used, logprobs, 0.0)

    return jax.jit(jax.value_and_grad(loss, has_aux=True))


def reference(model, params, tokens, positions, segments, targets, weights):
    """The same from whole logits by plain differentiation."""

    def loss(params):
        normal = jax.nn.log_softmax(packed_logits(model, params, tokens, positions, segments) / 0.7)
        logprobs = jnp.take_along_axis(normal, targets[..., None], -1)[..., 0]
        entropy = -jnp.sum(jnp.exp(normal) * normal, -1)
        used = weights != 0
        return jnp.sum(jnp.where(used, weights * logprobs + 0.3 * weights**2 * entropy, 0.0)), jnp.where(used, logprobs, 0.0)

    return jax.jit(jax.value_and_grad(loss, has_aux=True))(params)


def assert_same(ours, theirs, tolerance=1e-5):
    """Values, log-probs, and each gradient within ``tolerance`` of its own largest element, or of a hundredth of all gradients' where it is smaller."""
    (value, logprobs), gradient = jax.device_get(ours)
    (wanted, wanted_logprobs), wanted_gradient = jax.device_get(theirs)
    assert value == pytest.approx(wanted, rel=tolerance, abs=tolerance)
    np.testing.assert_allclose(logprobs, wanted_logprobs, atol=tolerance * 3)
    size = max(np.abs(leaf).max() for leaf in jax.tree.leaves(wanted_gradient))
    for (path, leaf), want in zip(jax.tree_util.tree_leaves_with_path(gradient), jax.tree.leaves(wanted_gradient), strict=True):
        np.testing.assert_allclose(leaf, want, rtol=0, atol=tolerance * max(np.abs(want).max(), size / 100), err_msg=jax.tree_util.keystr(path))


MIXTURE = model_of("qwen3_moe", experts=4, experts_per_token=2, expert_mlp_size=16)
ADAPTED = model_of(lora=Lora(3, 6.0, ("query", "value", "output", "up", "down")))

VARIANTS = {
    "scan": (model_of(), ForwardSettings(scan=True)),
    "scan remat": (model_of("qwen3", tie_embeddings=True), ForwardSettings(scan=True, remat="full")),
    "scan dots blockwise": (model_of("llama"), ForwardSettings("blockwise", scan=True, remat="dots")),
    "unrolled dots": (model_of(), ForwardSettings(remat="dots")),
    "unrolled remat": (model_of(), ForwardSettings(remat="full")),
    "chunks": (model_of(), ForwardSettings(chunk=7)),
    "mixture": (MIXTURE, ForwardSettings(scan=True, remat="dots", chunk=50)),
    "adapters": (ADAPTED, ForwardSettings(scan=True, remat="dots")),
}


@pytest.mark.parametrize("name", VARIANTS)
def test_how_it_is_computed_does_not_matter(name):
    model, settings = VARIANTS[name]
    params, rows = params_of(model), packed_rows()
    assert_same(value_and_gradient(model, settings)(params, *rows), reference(model, params, *rows))


def operations(jaxpr, primitive):
    """How many of them are in a program, calls followed."""
    inner = (sub for equation in jaxpr.eqns for sub in jax.tree.leaves(tuple(equation.params.values())))
    inner = (getattr(sub, "jaxpr", sub) for sub in inner)
    return sum(equation.primitive.name == primitive for equation in jaxpr.eqns) + sum(operations(sub, primitive) for sub in inner if hasattr(sub, "eqns"))


def recomputed(model, remat, primitive, mesh=None):
    """How many operations of a kind the gradient has more than without rematerialisation."""

    def count(remat):
        settings = ForwardSettings("plain", remat=remat, mesh=mesh)

        def loss(params, tokens, positions, segments, targets, weights):
            logprobs, _ = packed_logprobs(model, params, tokens, positions, segments, targets, 1.0, settings)
            return jnp.sum(logprobs * weights)

        return operations(jax.make_jaxpr(jax.grad(loss))(param_shapes(model), *packed_rows()).jaxpr, primitive)

    return count(remat) - count("none")


def test_what_is_kept_is_not_computed_again():
    """By layer: 'dots' computes the scores again; of a mixture also the down products. 'full': all but the block's last product, whose result none needs."""
    dense = model_of()
    assert recomputed(dense, "dots", "dot_general") == dense.layers
    assert recomputed(dense, "full", "dot_general") == dense.layers * (2 + 6)
    assert recomputed(MIXTURE, "dots", "ragged_dot_general") == MIXTURE.layers
    assert recomputed(MIXTURE, "full", "ragged_dot_general") == MIXTURE.layers * 3


def test_many_blocks_are_scanned():
    made = [forward_settings(base_config(), model_of(layers=layers), build_mesh(jax.devices()[:1])).scan for layers in (7, 8)]
    assert made == [False, True]


MESHES = {
    "data": ({"data": 8}, {}),
    "fsdp": ({"fsdp": 8}, {"scan": True}),
    "context": ({"context": 8}, {"attention": "blockwise"}),
    "tensor": ({"tensor": 8}, {"chunk": 100}),
    "data fsdp tensor": ({"data": 2, "fsdp": 2, "tensor": 2}, {"scan": True, "remat": "dots", "chunk": 11}),
    "fsdp context tensor": ({"fsdp": 2, "context": 2, "tensor": 2}, {"scan": True, "remat": "full", "chunk": 11, "attention": "blockwise"}),
    "data context": ({"data": 2, "context": 4}, {"remat": "dots", "attention": "blockwise"}),
    "context tensor": ({"context": 2, "tensor": 4}, {"scan": True}),
}


def placed(mesh, model, params, rows):
    where = NamedSharding(mesh, logical_to_mesh("batch", "length"))
    return jax.device_put(params, named_shardings(mesh, param_specs(model), params)), *(jax.device_put(x, where) for x in rows)


@pytest.mark.parametrize("name", MESHES)
def test_how_it_is_divided_does_not_matter(name):
    axes, options = MESHES[name]
    model, rows = model_of(), packed_rows()
    params = params_of(model)
    mesh = build_mesh(jax.devices()[: math.prod(axes.values())], **axes)
    ours = value_and_gradient(model, ForwardSettings(**options, mesh=mesh))(*placed(mesh, model, params, rows))
    assert_same(ours, reference(model, params, *rows))


@pytest.mark.parametrize("remat", ["none", "dots"])
@pytest.mark.parametrize("model", [MIXTURE, ADAPTED], ids=["mixture", "adapters"])
def test_mixture_and_adapters_are_divided_too(model, remat):
    params, rows = params_of(model), packed_rows()
    mesh = build_mesh(jax.devices(), fsdp=2, context=2, tensor=2)
    ours = value_and_gradient(model, ForwardSettings(scan=remat == "dots", remat=remat, mesh=mesh))(*placed(mesh, model, params, rows))
    assert_same(ours, reference(model, params, *rows))
