"""The policy against a float64 forward in plain numpy, for every family."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import numpy_policy
import pytest
from random_policy import params_of

from areal_jax.models.architecture import ModelConfig, RopeScaling
from areal_jax.models.forward import packed_logprobs
from areal_jax.models.layers import rotary_frequencies, rotary_tables, rotate
from areal_jax.models.policy import bind, init_params, packed_logits, param_shapes

VOCABULARY, LENGTH = 29, 20


def model_of(family="qwen2", **changes):
    return ModelConfig(family, VOCABULARY, layers=2, hidden_size=24, heads=4, kv_heads=2, head_dim=6, mlp_size=40, **changes)


def packed(sequences, length=LENGTH, start=0):
    """One row: sequences one after another as segments 1, 2, ..., padding of random tokens behind and ``start`` before."""
    random = np.random.default_rng(7)
    tokens = random.integers(0, VOCABULARY, (1, length)).astype(np.int32)
    positions, segments = np.zeros((1, length), np.int32), np.zeros((1, length), np.int32)
    at = start
    for i, sequence in enumerate(sequences):
        here = slice(at, at + len(sequence))
        tokens[0, here], positions[0, here], segments[0, here] = sequence, np.arange(len(sequence)), i + 1
        at += len(sequence)
    return tokens, positions, segments


def sequence_of(length, seed=0):
    return np.random.default_rng(seed).integers(0, VOCABULARY, length).astype(np.int32)


forward = jax.jit(packed_logits, static_argnums=0)
scores = jax.jit(packed_logprobs, static_argnums=0)
initialise = jax.jit(init_params, static_argnums=0)
MODELS = {
    "qwen2": model_of(),
    "qwen2 tied": model_of(tie_embeddings=True),
    "qwen3": model_of("qwen3", rope_theta=500.0),
    "llama": model_of("llama", norm_epsilon=1e-2),
    "qwen3_moe": model_of("qwen3_moe", experts=5, experts_per_token=2, expert_mlp_size=16),
    "qwen3_moe not normalised": model_of("qwen3_moe", experts=4, experts_per_token=3, expert_mlp_size=16, normalise_experts=False),
    "one kv head": dataclasses.replace(model_of(), kv_heads=1),
    "no grouping": dataclasses.replace(model_of("llama"), kv_heads=4),
}


@pytest.mark.parametrize("name", MODELS)
def test_logits_are_those_of_the_numpy_policy(name):
    model = MODELS[name]
    params, first, second = params_of(model), sequence_of(9, 1), sequence_of(7, 2)
    tokens, positions, segments = packed([first, second])
    ours = np.asarray(forward(model, params, tokens, positions, segments))
    assert ours.dtype == np.float32
    exact = numpy_policy.as_float64(params)
    for sequence, at in ((first, 0), (second, 9)):
        theirs = numpy_policy.logits(model, exact, sequence)
        assert np.std(theirs) > 0.3
        np.testing.assert_allclose(ours[0, at : at + len(sequence)], theirs, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", ["qwen2", "qwen3", "qwen3_moe"])
def test_every_parameter_matters(name):
    model = MODELS[name]
    params, row = params_of(model), packed([sequence_of(12)])
    before = np.asarray(forward(model, params, *row))[0, :12]
    for path, leaf in jax.tree_util.tree_leaves_with_path(params):
        changed = jax.tree_util.tree_map_with_path(lambda p, x, path=path: x + (0.1 * np.cos(np.arange(x.size)).reshape(x.shape) if p == path else 0), params)
        assert leaf.size and np.abs(np.asarray(forward(model, changed, *row))[0, :12] - before).max() > 1e-4, jax.tree_util.keystr(path)


def test_packed_segments_are_separate_sequences_and_padding_does_not_matter():
    model = MODELS["qwen2"]
    params, first, second = params_of(model), sequence_of(5, 1), sequence_of(8, 2)
    together = np.asarray(forward(model, params, *packed([first, second], start=3)))[0]
    for sequence, at in ((first, 3), (second, 8)):
        alone = np.asarray(forward(model, params, *packed([sequence])))[0]
        np.testing.assert_allclose(together[at : at + len(sequence)], alone[: len(sequence)], atol=2e-5)
    tokens, positions, segments = packed([first, second], start=3)
    other = tokens.copy()
    other[segments == 0] = (other[segments == 0] + 11) % VOCABULARY
    with_other_padding = np.asarray(forward(model, params, other, positions, segments))[0]
    np.testing.assert_array_equal(with_other_padding[3:16], together[3:16])
    assert np.all(np.isfinite(with_other_padding))


def test_positions_count_from_the_segments_start_and_only_differences_matter():
    model = MODELS["qwen2"]
    params, sequence = params_of(model), sequence_of(10)
    tokens, positions, segments = packed([sequence])
    plain = np.asarray(forward(model, params, tokens, positions, segments))[0, :10]
    shifted = np.asarray(forward(model, params, tokens, positions + 5, segments))[0, :10]
    np.testing.assert_allclose(shifted, plain, atol=1e-4)
    stretched = np.asarray(forward(model, params, tokens, positions * 2, segments))[0, :10]
    np.testing.assert_allclose(stretched, numpy_policy.logits(model, numpy_policy.as_float64(params), sequence, 2 * np.arange(10)), rtol=1e-4, atol=1e-4)
    assert np.abs(stretched - plain).max() > 1e-2


def test_a_token_does_not_see_later_ones():
    model = MODELS["qwen2"]
    params, sequence = params_of(model), sequence_of(10)
    other = sequence.copy()
    other[6] = (other[6] + 1) % VOCABULARY
    one, two = (np.asarray(forward(model, params, *packed([s])))[0, :10] for s in (sequence, other))
    np.testing.assert_array_equal(one[:6], two[:6])
    assert np.abs(one[6:] - two[6:]).max(-1).min() > 1e-4


def test_rotary_positions_turn_pairs_of_the_two_halves():
    x = np.random.default_rng(0).standard_normal((5, 3, 8)).astype(np.float32)
    positions = np.array([0, 1, 7, 100, 3000])
    ours = np.asarray(rotate(jnp.asarray(x), rotary_tables(jnp.asarray(positions), 8, 1000.0)))
    theirs = np.stack([[numpy_policy.rotate(head, p, 1000.0) for head in row] for row, p in zip(x.astype(np.float64), positions, strict=True)])
    np.testing.assert_allclose(ours, theirs, atol=2e-3)
    np.testing.assert_allclose(ours[:3], theirs[:3], atol=1e-5)
    np.testing.assert_array_equal(ours[0], x[0])


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_logprobs_and_entropy_are_those_of_numpy(temperature):
    model = MODELS["qwen2"]
    params, sequence = params_of(model), sequence_of(12)
    tokens, positions, segments = packed([sequence])
    targets = np.roll(tokens, -1, 1)
    logprobs, entropy = scores(model, params, tokens, positions, segments, targets, temperature)
    logits = numpy_policy.logits(model, numpy_policy.as_float64(params), sequence) / temperature
    normal = logits - np.log(np.sum(np.exp(logits), -1, keepdims=True))
    np.testing.assert_allclose(np.asarray(logprobs)[0, :12], normal[np.arange(12), targets[0, :12]], rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(np.asarray(entropy)[0, :12], -np.sum(np.exp(normal) * normal, -1), rtol=1e-4, atol=1e-4)
    assert logprobs.dtype == entropy.dtype == jnp.float32


def test_bfloat16_blocks_keep_float32_logits():
    model = MODELS["qwen2"]
    half = dataclasses.replace(model, dtype="bfloat16")
    params, row = params_of(model), packed([sequence_of(12)])
    exact, rough = (np.asarray(forward(m, params, *row))[0, :12] for m in (model, half))
    assert rough.dtype == np.float32
    assert np.any(rough != rough.astype(jnp.bfloat16).astype(np.float32))
    difference = np.abs(rough - exact)
    assert 1e-3 < difference.max() < 0.3, difference.max()
    logprobs, entropy = jax.eval_shape(lambda: packed_logprobs(half, params, *row, row[0], 1.0))
    assert logprobs.dtype == entropy.dtype == jnp.float32


def test_initial_parameters_depend_on_the_key_alone_and_have_variance_one_over_fan_in():
    model = ModelConfig("qwen3", VOCABULARY, layers=2, hidden_size=64, heads=4, kv_heads=2, head_dim=16, mlp_size=128)
    one, again, other = (initialise(model, jax.random.key(k)) for k in (3, 3, 4))
    jax.tree.map(np.testing.assert_array_equal, one, again)
    assert not np.array_equal(one["embedding"], other["embedding"])
    kernels = [np.asarray(x) for x in jax.tree.leaves(one) if x.ndim == 2]
    assert len({k.tobytes() for k in kernels}) == len(kernels), "two kernels were drawn from the same key"
    assert jax.tree.structure(one) == jax.tree.structure(param_shapes(model))
    assert jax.tree.map(lambda x: x.shape, one) == jax.tree.map(lambda x: x.shape, param_shapes(model))
    assert {x.dtype for x in jax.tree.leaves(one)} == {jnp.dtype("float32")}
    layer = one["layers"]["layer_1"]
    assert np.std(layer["mlp"]["gate"]["kernel"]) == pytest.approx(64**-0.5, rel=0.06)
    assert np.std(layer["mlp"]["down"]["kernel"]) == pytest.approx(128**-0.5 * 4**-0.5, rel=0.06)
    assert np.std(layer["attention"]["output"]["kernel"]) == pytest.approx(64**-0.5 * 4**-0.5, rel=0.06)


def test_bind_carries_the_given_parameters_and_keeps_none():
    model = MODELS["qwen2"]
    one, two = params_of(model, 1), params_of(model, 2)
    first, second = bind(model, one), bind(model, two)
    for policy, params in ((first, one), (second, two)):
        np.testing.assert_array_equal(policy.embedding[...], params["embedding"])
        np.testing.assert_array_equal(policy.layers["layer_1"].mlp.down.kernel[...], params["layers"]["layer_1"]["mlp"]["down"]["kernel"])


def test_trees_differ_by_family_as_declared():
    names = {
        name: {jax.tree_util.keystr(path, simple=True, separator="/") for path, _ in jax.tree_util.tree_leaves_with_path(param_shapes(model))}
        for name, model in MODELS.items()
    }
    assert "lm_head/kernel" in names["qwen2"] and "lm_head/kernel" not in names["qwen2 tied"]
    assert "layers/layer_1/attention/query/bias" in names["qwen2"] and not any(n.endswith("bias") for n in names["llama"] | names["qwen3"])
    assert "layers/layer_0/attention/key_norm/scale" in names["qwen3"] and not any("key_norm" in n for n in names["qwen2"] | names["llama"])


def test_rotary_frequencies_of_llama3_are_stretched_by_their_wavelength():
    """Word by word as Meta's reference code (llama-models, ``apply_scaling``) has it, at Llama 3.2's numbers."""
    factor, low, high, old = 32.0, 1.0, 4.0, 8192
    kinds = set()
    plain, scaled = rotary_frequencies(64, 500000.0, None), rotary_frequencies(64, 500000.0, RopeScaling(factor, low, high, old))
    for index, got in enumerate(scaled):
        frequency = 1.0 / 500000.0 ** (2 * index / 64)
        np.testing.assert_allclose(plain[index], frequency, rtol=1e-6)
        wavelength = 2 * np.pi / frequency
        if wavelength < old / high:
            kinds.add("kept")
            wanted = frequency
        elif wavelength > old / low:
            kinds.add("stretched")
            wanted = frequency / factor
        else:
            kinds.add("between")
            smooth = (old / wavelength - low) / (high - low)
            wanted = (1 - smooth) * frequency / factor + smooth * frequency
        np.testing.assert_allclose(got, wanted, rtol=1e-6)
    assert kinds == {"kept", "stretched", "between"}
