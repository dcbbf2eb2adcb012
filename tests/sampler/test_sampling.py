"""Draws and their log-probs against float64 numpy."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from areal_jax.sampler.sampling import BLOCK, LEADERS, _first_beyond, inverse_cdf, raw_logprobs, request_keys, sample, sample_rows, uniforms

DRAWS = 20_000
LARGE = 49_152
draw = jax.jit(sample, static_argnums=(2, 3, 4))
draw_rows = jax.jit(sample_rows)
score = jax.jit(raw_logprobs, static_argnums=2)
LAST = np.float32(1.0 - 2.0**-24)


def reference(logits, temperature=1.0, top_k=0, top_p=1.0):
    """Probabilities float64 [vocab]: temperature, then top-k, then top-p on what is left; ties with the last one stay."""
    scaled = np.asarray(logits, np.float64) / temperature
    weights = np.exp(scaled - scaled.max())
    if top_k:
        weights[weights < np.sort(weights)[::-1][top_k - 1]] = 0.0
    weights /= weights.sum()
    if top_p < 1.0:
        mass, last = 0.0, 1.0
        for p in np.sort(weights)[::-1]:
            if mass >= top_p:
                break
            mass, last = mass + p, p
        weights[weights < last] = 0.0
    return weights / weights.sum()


def tokens_of(logits, count=DRAWS, seed=0, **options):
    rows = jnp.broadcast_to(jnp.asarray(logits, jnp.float32), (count, len(logits)))
    numbers = jax.random.uniform(jax.random.key(seed), (count,))
    token, logprob = draw(rows, numbers, options.get("temperature", 1.0), options.get("top_k", 0), options.get("top_p", 1.0))
    return np.asarray(token), np.asarray(logprob)


def chi_square(counts, probabilities):
    """Standardised χ² over cells with at least 5 expected draws, the rest pooled; about N(0, 1) when the draws are right."""
    expected = counts.sum() * probabilities
    big = expected >= 5
    observed, wanted = np.append(counts[big], counts[~big].sum()), np.append(expected[big], expected[~big].sum())
    observed, wanted = observed[wanted > 0], wanted[wanted > 0]
    freedom = len(wanted) - 1
    return (np.sum((observed - wanted) ** 2 / wanted) - freedom) / np.sqrt(2 * freedom)


OPTIONS = [{}, {"temperature": 0.6}, {"temperature": 1.7}, {"top_k": 5}, {"top_p": 0.8}, {"temperature": 1.3, "top_k": 12, "top_p": 0.7}]


@pytest.mark.parametrize(("vocabulary", "options"), [*((40, options) for options in OPTIONS), (700, OPTIONS[0]), (700, OPTIONS[-1])], ids=str)
def test_draws_follow_the_distribution_and_carry_its_logprob(vocabulary, options):
    logits = 1.5 * np.random.default_rng(vocabulary).standard_normal(vocabulary).astype(np.float32)
    wanted = reference(logits, **options)
    tokens, logprobs = tokens_of(logits, 10_000 if vocabulary > 256 else DRAWS, **options)
    assert np.all(wanted[tokens] > 0)
    assert abs(chi_square(np.bincount(tokens, minlength=vocabulary), wanted)) < 4.5
    np.testing.assert_allclose(logprobs, np.log(wanted[tokens]), atol=2e-6, rtol=2e-6)


def test_chi_square_tells_a_wrong_temperature():
    logits = 1.5 * np.random.default_rng(40).standard_normal(40).astype(np.float32)
    tokens, _ = tokens_of(logits, temperature=1.1)
    assert chi_square(np.bincount(tokens, minlength=40), reference(logits)) > 4.5


def test_top_p_works_on_what_top_k_left():
    logits = np.log([0.4, 0.2, 0.1, 0.1, 0.1, 0.1])
    tokens, logprobs = tokens_of(logits, 2000, top_k=2, top_p=0.65)  # of the two kept, the first has 2/3 of the mass
    assert set(tokens) == {0} and np.all(np.abs(logprobs) < 1e-6)
    assert set(tokens_of(logits, 2000, top_p=0.65)[0]) == set(range(6))  # alone: 0.4 + 0.2 < 0.65, and the tied rest stays together


def test_ties_with_the_last_kept_token_are_kept():
    logits = np.array([2.0, 1.0, 1.0, 1.0, 0.0], np.float32)
    tokens, logprobs = tokens_of(logits, 4000, top_k=2)
    wanted = reference(logits, top_k=2)
    assert set(tokens) == {0, 1, 2, 3}
    np.testing.assert_allclose(logprobs, np.log(wanted[tokens]), atol=1e-6)


@pytest.mark.parametrize("vocabulary", [40, 256, 257, 700])
def test_draw_is_the_inverse_of_the_cumulated_weights(vocabulary):
    random = np.random.default_rng(vocabulary)
    weights = (random.random((3000, vocabulary)) ** 4).astype(np.float32)
    numbers = random.random(3000).astype(np.float32)
    tokens = np.asarray(jax.jit(inverse_cdf)(weights, numbers)[0])
    cumulated = np.cumsum(weights.astype(np.float64), -1)
    cumulated /= cumulated[:, -1:]
    rows = np.arange(3000)
    assert np.all(numbers <= cumulated[rows, tokens] + 1e-6)
    assert np.all(numbers >= np.where(tokens > 0, cumulated[rows, tokens - 1], 0.0) - 1e-6)


def test_a_token_without_probability_is_never_drawn():
    """Uniforms at, just below and just above every step of the cumulated sum, where rounding decides."""
    inverse = jax.jit(inverse_cdf)
    random = np.random.default_rng(0)
    for vocabulary in (40, 700):
        for _ in range(8):
            weights = (random.random(vocabulary) * (random.random(vocabulary) < 0.3)).astype(np.float32)
            weights[random.integers(vocabulary)] = 1.0
            steps = np.asarray(jnp.cumsum(weights))
            numbers = np.concatenate([steps / steps[-1] + np.float32(n * 2.0**-24) for n in range(-2, 3)] + [[0.0, 1.0 - 2.0**-24]])
            numbers = np.resize(numbers[(numbers >= 0) & (numbers < 1)], 4096).astype(np.float32)
            tokens = np.asarray(inverse(np.broadcast_to(weights, (4096, vocabulary)), numbers)[0])
            assert np.all(weights[tokens] > 0)
    edge = np.zeros((2, 600), np.float32)
    edge[:, [300, 511]] = 1.0
    np.testing.assert_array_equal(inverse(edge, np.array([0.0, 1.0 - 2.0**-24], np.float32))[0], [300, 511])


def test_a_prefix_sum_that_moves_where_no_weight_is_draws_nothing_there():
    weights = jnp.array([[0.5, 0.0, 0.25, 0.0, 0.25, 0.0]] * 4)
    cumulated = jnp.array([[0.5, 0.500001, 0.75, 0.749999, 1.0, 1.000001]] * 4)
    index = _first_beyond(cumulated, weights, jnp.array([0.49, 0.5000005, 0.7499995, 1.0000005]))
    np.testing.assert_array_equal(index, [0, 2, 2, 4])


def test_greedy_takes_the_likeliest_token_with_certainty():
    logits = np.random.default_rng(0).standard_normal((50, 33)).astype(np.float32)
    token, logprob = draw(logits, np.zeros(50, np.float32), 0.0, 0, 1.0)
    np.testing.assert_array_equal(token, logits.argmax(-1))
    np.testing.assert_array_equal(logprob, np.zeros(50))


def test_bfloat16_logits_are_scored_in_float32():
    logits = jnp.asarray(np.random.default_rng(0).standard_normal((50, 33)), jnp.bfloat16)
    token, logprob = draw(logits, np.linspace(0, 0.99, 50, dtype=np.float32), 0.7, 0, 1.0)
    assert logprob.dtype == jnp.float32
    wanted = [np.log(reference(row, 0.7)[t]) for row, t in zip(np.asarray(logits), np.asarray(token), strict=True)]
    np.testing.assert_allclose(logprob, wanted, atol=2e-6, rtol=2e-6)


def test_random_numbers_are_a_function_of_seed_group_sample_and_token():
    numbers = jax.jit(lambda seed, g, s, t: uniforms(request_keys(seed, g, s), t))

    @functools.cache
    def of(seed, g, s, t):
        key = jax.random.fold_in(jax.random.fold_in(jax.random.fold_in(jax.random.key(seed), g), s), t)
        return float(jax.random.uniform(key))

    groups, samples, counts = np.array([0, 0, 1, 1, 2]), np.array([0, 1, 0, 1, 7]), np.array([0, 0, 0, 3, 3])
    together = np.asarray(numbers(np.uint32(5), groups, samples, counts))
    np.testing.assert_array_equal(together, [of(5, *map(int, x)) for x in zip(groups, samples, counts, strict=True)])
    backwards = np.asarray(numbers(np.uint32(5), groups[::-1], samples[::-1], counts[::-1]))
    np.testing.assert_array_equal(backwards[::-1], together)
    g, s, t = (x.ravel() for x in np.meshgrid(np.arange(20), np.arange(20), np.arange(20)))
    grid = np.asarray(numbers(np.uint32(5), g, s, t))
    assert len(np.unique(grid)) > 0.999 * len(grid)
    assert grid.min() >= 0.0 and grid.max() < 1.0 and abs(grid.mean() - 0.5) < 0.02


def test_draws_from_a_large_vocabulary_follow_the_distribution():
    """Rare tokens are pooled in order of probability, so that every cell expects enough draws for its χ²."""
    logits = 2.0 * np.random.default_rng(1).standard_normal(LARGE).astype(np.float32)
    parameters = 1.2, 2000, 0.8
    wanted = reference(logits, *parameters)
    numbers = jax.random.uniform(jax.random.key(3), (DRAWS,))
    token, logprob = jax.jit(jax.vmap(lambda u: sample(jnp.asarray(logits)[None], u[None], *parameters)))(numbers)
    token, logprob = np.asarray(token)[:, 0], np.asarray(logprob)[:, 0]
    assert np.all(wanted[token] > 0)
    np.testing.assert_allclose(logprob, np.log(wanted[token]), atol=4e-6, rtol=2e-6)
    order = np.argsort(wanted, kind="stable")
    cell = np.empty(LARGE, np.int64)
    cell[order] = np.cumsum(wanted[order] * DRAWS) // 40
    assert cell.max() >= 20
    pooled = np.bincount(cell, wanted)
    counts = np.bincount(cell[token], minlength=len(pooled))
    assert abs(chi_square(counts, pooled)) < 4.5
    places = np.bincount(token // (LARGE // 16), minlength=16)  # where in the vocabulary, so that a block drawn wrongly shows
    assert abs(chi_square(places, wanted.reshape(16, -1).sum(-1))) < 4.5


MIXED = [(1.0, 0, 1.0), (0.7, 0, 1.0), (0.0, 0, 1.0), (1.3, 7, 1.0), (1.0, 0, 0.8), (0.9, 20, 0.6), (0.0, 3, 0.5), (1.0, 10**6, 1.0), (2.0, 1, 1e-6)]
ROWS = 2 * len(MIXED)
COLUMNS = [np.resize(np.array(x, t), ROWS) for x, t in zip(zip(*MIXED, strict=True), (np.float32, np.int32, np.float32), strict=True)]


def rows_of(vocabulary, rows, seed=0):
    random = np.random.default_rng(seed)
    return 2.5 * random.standard_normal((rows, vocabulary)).astype(np.float32), random.random(rows).astype(np.float32)


@pytest.mark.parametrize(("vocabulary", "compared"), [(48, [3, 4, 5]), (5000, [5])], ids=["short", "long"])
def test_every_row_has_its_own_parameters(vocabulary, compared):
    """Row by row what the program of these parameters alone returns."""
    logits, numbers = rows_of(vocabulary, ROWS)
    token, logprob = draw_rows(logits, numbers, *COLUMNS)
    for n in compared:
        picked = slice(n, ROWS, len(MIXED))
        alone = draw(logits[picked], numbers[picked], *MIXED[n])
        np.testing.assert_array_equal(np.asarray(token)[picked], alone[0])
        np.testing.assert_allclose(np.asarray(logprob)[picked], alone[1], atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize(("vocabulary", "parameters"), [(48, None), (5000, None), (700, (0.8, 0, 1.0))], ids=str)
def test_a_draw_does_not_know_its_batch(vocabulary, parameters):
    """The same rows alone and in another order: the same token, and its log-prob up to the order of one sum."""
    logits, numbers = rows_of(vocabulary, ROWS)
    together = draw(logits, numbers, *parameters) if parameters else draw_rows(logits, numbers, *COLUMNS)
    for picked in [*([n] for n in range(ROWS)), list(range(ROWS))[::-1]]:
        some = logits[picked], numbers[picked]
        token, logprob = draw(*some, *parameters) if parameters else draw_rows(*some, *(x[picked] for x in COLUMNS))
        np.testing.assert_array_equal(token, np.asarray(together[0])[picked])
        np.testing.assert_allclose(logprob, np.asarray(together[1])[picked], atol=4e-7, rtol=4e-7)


def test_extreme_uniforms_draw_the_first_and_the_last_kept_token():
    vocabulary = 700
    logits, _ = rows_of(vocabulary, 6)
    logits[:, 0] = logits[:, -1] = logits.max(-1)  # the last has mass enough for the largest uniform to reach it
    logits[3, :5] = -np.inf
    for parameters in [(1.0, 0, 1.0), (0.8, 20, 0.9)]:
        wanted = np.array([reference(row, *parameters) for row in logits]) > 0
        columns = [np.full(6, x, t) for x, t in zip(parameters, (np.float32, np.int32, np.float32), strict=True)]
        for number, index in [(np.float32(0), wanted.argmax(-1)), (LAST, vocabulary - 1 - wanted[:, ::-1].argmax(-1))]:
            numbers = np.full(6, number)
            np.testing.assert_array_equal(draw(logits, numbers, *parameters)[0], index)
            np.testing.assert_array_equal(draw_rows(logits, numbers, *columns)[0], index)


def test_greedy_takes_the_first_of_equal_tokens():
    logits = np.zeros((3, 1000), np.float32)
    logits[0, [700, 301, 999]] = 5.0
    logits[1, [999, 998]] = 1e-20
    columns = np.zeros(3, np.float32), np.zeros(3, np.int32), np.ones(3, np.float32)
    for token, logprob in [draw(logits, np.full(3, LAST), 0.0, 0, 1.0), draw_rows(logits, np.full(3, LAST), *columns)]:
        np.testing.assert_array_equal(token, [301, 998, 0])
        np.testing.assert_array_equal(logprob, np.zeros(3))


@pytest.mark.parametrize(("vocabulary", "count"), [(30, 5), (LEADERS * 40, 20), (LEADERS * 40 + 9, 20), (LEADERS * 40 + 9, 0)])
def test_raw_logprobs_of_the_chosen_and_the_likeliest(vocabulary, count):
    logits, _ = rows_of(vocabulary, 8)
    logits[4:] = np.round(logits[4:])  # ties, −0 with +0 among them
    logits[2, :] = 1.0
    logits[3, 4:] = -np.inf
    logits[7] = np.minimum(logits[7], 0.0)
    tokens = np.arange(8, dtype=np.int32) * (vocabulary // 9) % vocabulary
    tokens[3] = 2
    chosen, ids, values = score(logits, tokens, count)
    exact = logits.astype(np.float64) - logits.max(-1, keepdims=True)
    exact -= np.log(np.exp(exact).sum(-1, keepdims=True))
    order = np.argsort(-logits, axis=-1, kind="stable")[:, :count]
    assert ids.dtype == jnp.int32 and values.dtype == chosen.dtype == jnp.float32
    np.testing.assert_array_equal(ids, order)
    np.testing.assert_allclose(values, np.take_along_axis(exact, order, -1), atol=4e-6, rtol=2e-6)
    np.testing.assert_allclose(chosen, exact[np.arange(8), tokens], atol=4e-6, rtol=2e-6)


def test_more_likeliest_tokens_than_there_are_is_refused():
    with pytest.raises(ValueError, match="vocabulary's 30; got 31"):
        raw_logprobs(jnp.zeros((1, 30)), jnp.zeros(1, jnp.int32), 31)


def test_vocabularies_around_a_block_draw_every_token():
    for vocabulary in (BLOCK, BLOCK + 1):
        numbers = ((np.arange(vocabulary) + 0.5) / vocabulary).astype(np.float32)
        token, logprob = draw(np.zeros((vocabulary, vocabulary), np.float32), numbers, 1.0, 0, 1.0)
        np.testing.assert_array_equal(token, np.arange(vocabulary))
        np.testing.assert_allclose(logprob, -np.log(vocabulary), rtol=1e-6)
