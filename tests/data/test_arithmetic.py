"""The pools against a reader of the question text that shares no code with the generator; the teachers against eval."""

import collections
import fractions
import json
import math
import pathlib
import random
import re
import runpy
import types

import numpy as np
import pytest

from areal_jax.data.arithmetic import KINDS, SUMS, build_pools, describe, linear, subtractions
from areal_jax.data.demonstrations import demonstrate, demonstration_corpus
from areal_jax.data.problems import Problem, apply_template, hash_fraction
from areal_jax.models.tokenizer import embedded_tokenizer


def task(**changes):
    return types.SimpleNamespace(**{"train_problems": 30000, "holdout_fraction": 0.1, **changes})


@pytest.fixture(scope="module")
def pools():
    return build_pools(task(), seed=0)


@pytest.fixture(scope="module")
def small():
    return build_pools(task(train_problems=600), seed=1)


def read(question: str):
    """(answer, what the problem is) of a question, from its text alone."""
    if found := re.fullmatch(r"Compute ([\d+-]+):", question):
        terms = collections.Counter(int(t) for t in found[1].replace("-", "+-").split("+"))
        return eval(found[1]), ("sum", frozenset(terms.items()))
    if found := re.fullmatch(r"Solve (.+)=(-?\d+):", question):
        letters = set(re.findall("[a-z]", found[1]))
        assert len(letters) == 1
        at_zero, at_one = (eval(found[1], {letters.copy().pop(): x}) for x in (0, 1))
        slope, right = at_one - at_zero, int(found[2])
        form = (slope, at_zero, right) if slope > 0 else (-slope, -at_zero, -right)
        return fractions.Fraction(right - at_zero, slope), ("equation", form)
    if found := re.fullmatch(r"GCD of (\d+), (\d+):", question):
        a, b = int(found[1]), int(found[2])
        return math.gcd(a, b), ("gcd", frozenset([a, b]))
    raise AssertionError(question)


def steps_hold(steps: str) -> bool:
    """Every ``left=right`` is true under Python's own arithmetic."""
    return all(eval(left) == int(right) for left, right in (step.split("=") for step in steps.split(";")))


def test_answers_are_right_and_ids_unique(pools):
    for pool in (pools.train, pools.heldout):
        assert len({p.problem_id for p in pool}) == len(pool)
        for problem in pool[:4000]:
            assert read(problem.question)[0] == int(problem.answer)


def test_no_heldout_problem_has_a_twin_in_training(pools):
    train = {read(p.question)[1] for p in pools.train}
    heldout = [read(p.question)[1] for p in pools.heldout]
    assert len(set(heldout)) == len(heldout), "a form is held out twice"
    assert not train & set(heldout)


def test_a_split_by_question_text_would_fail_that_check(pools):
    """The check can fail: by the text alone, forms leak."""
    parts = collections.defaultdict(set)
    for problem in pools.train:
        parts[hash_fraction(problem.question) < 0.1].add(read(problem.question)[1])
    assert parts[True] & parts[False]


def test_the_split_is_the_same_for_every_seed(pools, small):
    assert not {p.canonical for p in pools.heldout} & {p.canonical for p in small.train}
    assert not {p.canonical for p in small.heldout} & {p.canonical for p in pools.train}
    assert [p.question for p in small.train[:50]] != [p.question for p in pools.train[:50]]


def test_same_seed_same_pools(small):
    again = build_pools(task(train_problems=600), seed=1)
    assert again == small


def test_sizes_and_mix_of_every_prefix(pools):
    assert len(pools.train) == 30000 and len(pools.heldout) >= 600
    assert math.isclose(sum(k.weight for k in KINDS.values()), 1.0)
    for pool in (pools.train, pools.heldout):
        for size in (128, 512, len(pool)):
            counts = collections.Counter(p.metadata["kind"] for p in pool[:size])
            assert all(abs(counts[name] - kind.weight * size) <= 2 for name, kind in KINDS.items())


def test_the_slow_tenth_is_four_times_the_median(pools):
    tokenizer, rng = embedded_tokenizer(), random.Random(0)
    for pool in (pools.train[:5000], pools.heldout):
        lengths = [len(tokenizer.encode(demonstrate(p, False, rng))) + 1 for p in pool]
        assert np.percentile(lengths, 90) >= 4 * np.median(lengths)
        assert max(lengths) <= 112, "longer than rollout.max_new_tokens"


def test_the_generators_scorer_agrees(pools):
    from areal_jax.reasoning import get_score_answer_fn

    for problem in pools.heldout[:200]:
        metadata = json.loads(json.dumps(problem.metadata))
        score = get_score_answer_fn(metadata["dataset"])
        assert score(problem.answer, entry=metadata["entry"]) >= 1.0
        assert score(str(int(problem.answer) + 1), entry=metadata["entry"]) < 1.0


def test_careful_solutions_are_right_to_the_letter(pools):
    rng = random.Random(0)
    for problem in pools.train[:3000]:
        steps, answer = demonstrate(problem, False, rng).split("####")
        assert steps_hold(steps) and answer == problem.answer == steps.rpartition("=")[2]


def test_careless_solutions_are_well_formed_and_mostly_wrong(pools):
    rng = random.Random(0)
    lucky = collections.defaultdict(list)
    for problem in pools.train[:5000]:
        steps, answer = demonstrate(problem, True, rng).split("####")
        assert steps_hold(steps) and re.fullmatch(r"-?\d+", answer)
        lucky[problem.metadata["kind"]].append(answer == problem.answer)
    assert set(lucky) == set(KINDS)
    limits = {"sum_short": 0.15, "equation": 0.1, "gcd": 0.6, "gcd_long": 0.3, "sum_long": 0.15}
    assert all(0 < np.mean(lucky[kind]) < limit for kind, limit in limits.items()), {k: np.mean(v) for k, v in lucky.items()}


@pytest.mark.parametrize(
    ("dataset", "facts", "question", "careful"),
    [
        ("chain_sum", {"expression": "2 - 8"}, "Compute 2-8:", "2-8=-6####-6"),
        ("chain_sum", {"expression": "1 + 8 + 8 - 1"}, "Compute 1+8+8-1:", "1+8=9;9+8=17;17-1=16####16"),
        ("simple_equations", {"equation": "9 - 2*j = 5", "variable": "j"}, "Solve 9-2*j=5:", "9-5=4;4/2=2####2"),
        ("simple_equations", {"equation": "7*s - 9 = 19", "variable": "s"}, "Solve 7*s-9=19:", "19+9=28;28/7=4####4"),
        ("simple_equations", {"equation": "3 - g = -6", "variable": "g"}, "Solve 3-g=-6:", "3+6=9####9"),
        ("simple_equations", {"equation": "g + 3 = 5", "variable": "g"}, "Solve g+3=5:", "5-3=2####2"),
        ("gcd", {"numbers": [16, 20]}, "GCD of 16, 20:", "20-16=4;16-4=12;12-4=8;8-4=4####4"),
    ],
)
def test_worked_examples(dataset, facts, question, careful):
    text, canonical = describe(dataset, facts)
    metadata = {"task": "arithmetic", "kind": "any", "dataset": dataset, "entry": {"metadata": facts}}
    answer = careful.rpartition("#")[2]
    assert text == question
    assert demonstrate(Problem("x", text, answer, metadata, canonical), False, random.Random(0)) == careful


@pytest.mark.parametrize(
    ("dataset", "left", "right"),
    [
        ("chain_sum", {"expression": "8 - 1 + 3"}, {"expression": "3 + 8 - 1"}),
        ("simple_equations", {"equation": "2*a + 3 = 9", "variable": "a"}, {"equation": "2*z + 3 = 9", "variable": "z"}),
        ("simple_equations", {"equation": "3 - 2*a = 1", "variable": "a"}, {"equation": "2*b - 3 = -1", "variable": "b"}),
        ("gcd", {"numbers": [18, 5]}, {"numbers": [5, 18]}),
    ],
)
def test_twins_have_one_canonical_form(dataset, left, right):
    assert describe(dataset, left)[1] == describe(dataset, right)[1]


def test_different_problems_have_different_forms():
    forms = [describe("chain_sum", {"expression": e})[1] for e in ("8 - 1 + 3", "8 + 1 - 3", "8 - 1", "8 + 1 + 3")] + [
        describe("simple_equations", {"equation": e, "variable": "a"})[1] for e in ("2*a + 3 = 9", "2*a - 3 = 9", "3*a + 2 = 9", "a + 3 = 9")
    ]
    assert len(set(forms)) == len(forms)


def test_odd_equations_are_refused():
    with pytest.raises(ValueError, match=r"a \+ a = 4"):
        linear("a + a = 4", "a")


def test_subtractions_end_at_the_greatest_common_divisor():
    for a in range(2, 40):
        for b in range(2, 40):
            assert a == b or subtractions(a, b)[-1][1] == math.gcd(a, b)


def test_corpus_mix_share_and_seed(pools):
    corpus = demonstration_corpus(pools.train, 0.65, 6000, seed=3)
    assert corpus == demonstration_corpus(pools.train, 0.65, 6000, seed=3)
    assert corpus != demonstration_corpus(pools.train, 0.65, 6000, seed=4)
    share = np.mean([problem.question.startswith("Solve") for problem, _ in corpus])
    assert abs(share - KINDS["equation"].warmup_weight) < 0.03
    right = [read(problem.question)[0] == int(response.rpartition("#")[2]) for problem, response in corpus]
    assert 0.35 < np.mean(right) < 0.5
    assert all(read(p.question)[0] == int(r.rpartition("#")[2]) for p, r in demonstration_corpus(pools.train, 0.0, 500, 0))


def test_errors_name_the_kind_and_the_key(pools):
    with pytest.raises(ValueError, match=r"'gcd_long' is missing.*train_problems"):
        demonstration_corpus([p for p in pools.train[:500] if p.metadata["kind"] != "gcd_long"], 0.5, 10, 0)
    with pytest.raises(ValueError, match=r"sft\.steps=0"):
        demonstrate(Problem("row-1", "?", "1"), False, random.Random(0))
    with pytest.raises(ValueError, match="prompt_template"):
        apply_template("no place", "?")
    with pytest.raises(ValueError, match="holdout_fraction"):
        build_pools(task(train_problems=50, holdout_fraction=1e-12), 0)


def test_the_sums_are_one_digit_additions_whose_held_out_forms_are_never_trained():
    pools = build_pools(task(train_problems=500), 0, SUMS)
    pairs = {side: {tuple(map(int, p.question.split(" + "))) for p in pool} for side, pool in (("train", pools.train), ("heldout", pools.heldout))}
    assert all(0 <= term <= 9 for pool in pairs.values() for pair in pool for term in pair)
    assert all(sum(map(int, p.question.split(" + "))) == int(p.answer) for p in [*pools.train, *pools.heldout])
    assert not {tuple(sorted(p)) for p in pairs["train"]} & {tuple(sorted(p)) for p in pairs["heldout"]}
    assert len(pairs["heldout"]) == len(pools.heldout) > 20 and len(pairs["train"]) > 60


def test_no_example_of_the_few_shot_prompt_is_held_out():
    config = runpy.run_path(str(pathlib.Path(__file__).parents[2] / "configs" / "math.py"))["get_config"]("smollm2-135m")
    shown = [tuple(sorted(map(int, e))) for e in re.findall(r"(\d) \+ (\d) = \d", config.task.prompt_template)]
    held = {tuple(sorted(map(int, p.question.split(" + ")))) for p in build_pools(config.task, config.seed, SUMS).heldout}
    assert len(shown) == 3 and not set(shown) & held
