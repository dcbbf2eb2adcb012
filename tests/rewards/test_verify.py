"""The built-in verifier against the shared cases, a scorer of its own kind and hand-made responses."""

import json
import random

import pytest

from areal_jax.reasoning import create_dataset
from areal_jax.rewards import verify
from areal_jax.rewards.service import RewardService

ROWS = {"task": "rows"}


def load_cases(cases):
    with open(cases / "math.jsonl", encoding="utf-8") as stream:
        return [json.loads(line) for line in stream]


def test_shared_cases(cases):
    """Every case with a settled answer; the hostile ones go through the service below."""
    wrong, checked = [], 0
    for case in load_cases(cases):
        if "must" in case or case.get("debatable"):
            continue
        checked += 1
        correct = verify.verify(case["prediction"], case["gold"], ROWS)["correct"]
        if correct != float(case["expected"]):
            wrong.append((case["id"], case["prediction"][-80:], case["gold"], correct))
    assert checked >= 55
    assert not wrong


def test_debatable_cases_are_never_paid_where_the_case_says_no(cases):
    for case in load_cases(cases):
        if case.get("debatable") and not case["expected"]:
            assert verify.verify(case["prediction"], case["gold"], ROWS)["correct"] == 0.0, case["id"]


@pytest.mark.parametrize(
    ("response", "correct"),
    [
        ("It is 3, or \\boxed{3}?\n</think>\n\n\\boxed{4}", 1.0),
        ("Clearly \\boxed{4}.\n</think>\n\nI give up.", 0.0),
        ("Clearly \\boxed{4}, but wait", 0.0),
        ("a " * 200_000 + "\\boxed{4}", 0.0),
        ("a " * 200_000 + "</think>\\boxed{4}", 1.0),
    ],
)
def test_a_response_that_begins_in_thinking_answers_behind_it(response, correct):
    assert verify.verify(response, "4", ROWS | {"in_thinking": True})["correct"] == correct


def test_hostile_cases_return_in_time_and_are_never_paid(cases):
    hostile = [case for case in load_cases(cases) if "must" in case]
    assert len(hostile) >= 5
    results = []
    with RewardService(1, 2.0, on_result=results.append) as service:
        service.warm_up(90)
        for case in hostile:
            service.submit(case["id"], case["prediction"], case["gold"], ROWS)
        service.submit("after", "#### 3", "3", ROWS)
        assert service.wait(100)
    answered = {result.key: result for result in results}
    assert set(answered) == {case["id"] for case in hostile} | {"after"}
    assert all(not answered[case["id"]].reward for case in hostile)
    assert all(result.latency_s <= 2.0 and result.failure != "died" for result in results)
    assert answered["after"].reward == 1.0


@pytest.mark.parametrize(
    ("response", "expected"),
    [
        ("4+2=6;6+2=8####8", "8"),
        ("####5 no, ####6", "6"),
        ("#### 42\nchecked twice", "42"),
        ("so \\boxed{1} then \\boxed{\\frac{a}{\\sqrt{b}}}.", "\\frac{a}{\\sqrt{b}}"),
        ("\\boxed{\\{1, 2\\}}", "\\{1, 2\\}"),
        ("\\boxed{3} ####4", "4"),
        ("The answer is 7.", "7"),
        ("Final Answer: **58**", "58"),
        ("the answer is 1\nthe answer is 2.5.", "2.5"),
        ("<think>####3</think>####4", "4"),
        ("<think>####3", None),
        ("<think>####3</think>nothing", None),
        ("3", None),
        ("", None),
        ("####", None),
        ("####  \n ", None),
        ("\\boxed{}", None),
        ("\\boxed{5", None),
        ("\\boxed{4} and \\boxed{5", None),
        ("the answer is", None),
    ],
)
def test_final_answer(response, expected):
    assert verify.final_answer(response) == expected


@pytest.mark.parametrize("dataset", ["chain_sum", "simple_equations", "gcd"])
def test_procedural_tasks_pay_right_answers_only(dataset):
    generator = random.Random(5)
    for entry in create_dataset(dataset, size=25, seed=11):
        metadata = {"task": "arithmetic", "kind": dataset, "dataset": dataset, "entry": json.loads(json.dumps(entry))}
        answer = entry["answer"]
        right = verify.verify(f"1+1=2####{answer}", answer, metadata)
        assert right == {"correct": 1.0, "format": 1.0, "math_verify": 1.0, "scorer": 1.0}
        wrong = str(int(answer) + generator.choice([-10, -1, 1, 10]))
        assert verify.verify(f"1+1=2####{wrong}", answer, metadata)["correct"] == 0.0
        assert verify.verify(answer, answer, metadata)["correct"] == 0.0


@pytest.mark.parametrize("text", ["{a} or {b}", "{a}, {b}", "{a} {b}", "{b} {a}", "x{a}", "{a}{b}", "maybe {a}", "{a}?", "[{a}, {b}]", "{a}/{b}", "{a}..{b}"])
def test_partial_marks_and_hedging_do_not_pay(text):
    """reasoning-gym gives part of the marks to an answer that merely contains the right one."""
    entry = {"question": "gcd of 6 and 9", "answer": "3", "metadata": {"source_dataset": "gcd"}}
    metadata = {"task": "arithmetic", "dataset": "gcd", "entry": entry}
    response = "####" + text.format(a="3", b="5")
    components = verify.verify(response, "3", metadata)
    assert components["correct"] == 0.0 and components["scorer"] < 1.0


def test_agreement_of_both_judges_is_needed():
    entry = {"question": "", "answer": "7", "metadata": {}}
    metadata = {"task": "arithmetic", "dataset": "gcd", "entry": entry}
    agreed_by_one = verify.verify("####7.0", "7", metadata)  # the same value, but not the generator's own form
    assert agreed_by_one["math_verify"] == 1.0 and agreed_by_one["scorer"] < 1.0 and agreed_by_one["correct"] == 0.0
    other = verify.verify("####7", "8", metadata)  # the scorer's entry disagrees with the reference
    assert other["scorer"] == 1.0 and other["math_verify"] == 0.0 and other["correct"] == 0.0


def test_only_the_response_is_read():
    """A box in the prompt's instructions is not an answer (system-047)."""
    metadata = {**ROWS, "question": "Put the answer into \\boxed{7}. ####7"}
    assert verify.verify("I do not know", "7", metadata) == {"correct": 0.0, "format": 0.0, "math_verify": 0.0}


@pytest.mark.parametrize("answer", ["", "   ", "\\boxed{", "??", "\x00", "9" * 5000])
@pytest.mark.parametrize("repeat", [False, True])
def test_an_unreadable_reference_raises_and_never_pays(answer, repeat):
    with pytest.raises(verify.UnreadableAnswerError, match="reference answer"):
        verify.verify(f"####{answer}" if repeat else "####7", answer, ROWS)


@pytest.mark.parametrize("exponents", [(98, 99), (40, 41), (200, 100)])
def test_tiny_numbers_are_compared_by_their_size(exponents):
    first, second = (f"\\frac{{1}}{{2^{{{e}}}}}" for e in exponents)
    assert verify.equal(first, first) and not verify.equal(first, second)


def test_overlong_answers_are_wrong_and_quick():
    assert verify.verify("####" + "1+" * 400_000 + "1", "5", ROWS)["correct"] == 0.0
    assert verify.verify("####" + "9" * 900, "9", ROWS)["correct"] == 0.0
