"""The built-in task: procedural arithmetic from reasoning-gym, in two pools.

Invariants:
* Problems, answers and scorers are reasoning-gym's; the question is its text cut to the part that varies.
* The pools are disjoint by canonical form: which pool a form belongs to depends on the form alone (a stable hash),
  not on the seed, so no warm-up and no run of any seed has seen a twin of a held-out problem.
* Held-out problems have distinct canonical forms, and each prefix of the held-out list has the kinds in the mix's
  proportions. The training pool holds distinct questions; a kind with fewer questions than its share repeats them.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Mapping
from typing import Any

from areal_jax.data.problems import Problem, hash_fraction

LONGEST_SOLUTION = 104
"""Characters (about tokens) of the longest careful solution that a problem may need."""


@dataclasses.dataclass(frozen=True)
class Kind:
    """One kind of problem.

    Attributes:
      dataset: name of the reasoning-gym data set.
      parameters: its configuration.
      weight: share in training and in the held-out set.
      warmup_weight: share in the demonstrations.
      holdout_scale: factor on ``task.holdout_fraction``; above 1 where there are few canonical forms.
      steps: fewest and most steps of the careful solution.
      draws: most entries taken from the generator, those with too few or too many steps included.
      additions: sums without a minus only; the question is the expression alone, as a few-shot prompt needs it, and each order of a held-out form counts.
    """

    dataset: str
    parameters: Mapping[str, Any]
    weight: float
    warmup_weight: float
    holdout_scale: float = 1.0
    steps: tuple[int, int] = (1, 99)
    draws: int = 12000
    additions: bool = False


KINDS: dict[str, Kind] = {
    "sum_short": Kind("chain_sum", {"min_terms": 2, "max_terms": 3, "min_digits": 1, "max_digits": 1}, 0.45, 0.30, holdout_scale=2.5, draws=15000),
    "equation": Kind(
        "simple_equations",
        {"min_terms": 2, "max_terms": 2, "min_value": 1, "max_value": 9, "operators_weights": [0.5, 0.5, 0.0]},
        0.25,
        0.30,
        holdout_scale=1.5,
        draws=5000,
    ),
    "gcd": Kind("gcd", {"min_value": 2, "max_value": 30}, 0.04, 0.15, holdout_scale=2.0, steps=(1, 7), draws=6000),
    "gcd_long": Kind("gcd", {"min_value": 2, "max_value": 44}, 0.19, 0.10, holdout_scale=3.5, steps=(8, 16)),
    "sum_long": Kind("chain_sum", {"min_terms": 8, "max_terms": 12, "min_digits": 1, "max_digits": 1}, 0.07, 0.15),
}
"""The mix. Weights sum to one."""

SUMS: dict[str, Kind] = {
    "sum_pair": Kind("chain_sum", {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}, 1.0, 0.0, holdout_scale=4.0, additions=True),
}
"""One-digit sums, for a language model with examples in its prompt. Held-out problems are few: sample each several times."""

MIXES = {"arithmetic": KINDS, "sums": SUMS}
"""By ``task.name``."""


@dataclasses.dataclass(frozen=True)
class Pools:
    """Disjoint by canonical form."""

    train: list[Problem]
    heldout: list[Problem]


def build_pools(task: Any, seed: int, kinds: Mapping[str, Kind] = KINDS) -> Pools:
    """Generates the training pool and the held-out pool.

    Args:
      task: the configuration's ``task`` section (``train_problems``, ``holdout_fraction``).
      seed: seed of the generators; the split does not depend on it.
      kinds: the mix.

    Returns:
      ``train`` with ``task.train_problems`` problems and as many held-out ones as the kinds' supply allows in the
      mix's proportions.

    Raises:
      ValueError: a kind has no problem in one of the pools, or two kinds share a form but not its pool.
    """
    train: dict[str, list[Problem]] = {}
    heldout: dict[str, list[Problem]] = {}
    for number, (name, kind) in enumerate(kinds.items()):
        share = min(0.9, task.holdout_fraction * kind.holdout_scale)
        wanted = max(1, round(task.train_problems * kind.weight))
        train[name], heldout[name] = _distinct(_generate(name, kind, seed * 10**9 + number * 10**7), share, wanted, kind.additions)
        for pool, problems in (("training", train[name]), ("held-out", heldout[name])):
            if not problems:
                raise ValueError(f"each kind must have a {pool} problem; '{name}' has none; change task.holdout_fraction ({task.holdout_fraction})")
    twins = {p.canonical for pool in train.values() for p in pool} & {p.canonical for pool in heldout.values() for p in pool}
    if twins:
        raise ValueError(f"kinds that share canonical forms must have the same holdout_scale; '{min(twins)}' is in both pools; set it alike")
    counts = _shares(task.train_problems, {name: kind.weight for name, kind in kinds.items()})
    size = int(min(len(heldout[name]) / kind.weight for name, kind in kinds.items() if kind.weight > 0))
    held = _shares(size, {name: kind.weight for name, kind in kinds.items()})
    return Pools(
        _interleave([_cycle(train[name], counts[name]) for name in kinds]),
        _interleave([heldout[name][: held[name]] for name in kinds]),
    )


def _distinct(problems: Iterable[Problem], share: float, wanted: int, orders: bool) -> tuple[list[Problem], list[Problem]]:
    """Distinct questions for training until ``wanted`` are found, distinct forms (``orders``: questions) for the held-out pool."""
    train: dict[str, Problem] = {}
    heldout: dict[str, Problem] = {}
    for problem in problems:
        if hash_fraction(problem.canonical) < share:
            heldout.setdefault(problem.question if orders else problem.canonical, problem)
        elif len(train) < wanted:
            train.setdefault(problem.question, problem)
        if len(train) >= wanted and len(heldout) >= wanted * share:
            break
    return list(train.values()), list(heldout.values())


def _generate(name: str, kind: Kind, seed: int) -> Iterable[Problem]:
    from areal_jax.reasoning import create_dataset  # takes seconds to import, and only generating needs it

    dataset = create_dataset(kind.dataset, seed=seed, size=kind.draws, **kind.parameters)
    for index in range(kind.draws):
        entry = dataset[index]
        facts = {k: v for k, v in entry["metadata"].items() if k != "difficulty"}
        entry = {"question": entry["question"], "answer": entry["answer"], "metadata": facts}
        if kind.additions and "-" in facts["expression"]:
            continue
        question, canonical = describe(kind.dataset, facts)
        question = facts["expression"] if kind.additions else question
        metadata = {"task": "arithmetic", "kind": name, "dataset": kind.dataset, "entry": entry}
        problem = Problem(f"{name}-{index}", question, entry["answer"], metadata, canonical)
        steps = solve(problem)
        if kind.steps[0] <= len(steps) <= kind.steps[1] and len(";".join(steps)) <= LONGEST_SOLUTION - 6:
            yield problem


def describe(dataset: str, facts: Mapping[str, Any]) -> tuple[str, str]:
    """The short question and the canonical form of a reasoning-gym entry.

    Args:
      dataset: name of the reasoning-gym data set.
      facts: the entry's ``metadata``.

    Returns:
      (question, canonical form). The form of a sum is the sorted list of its signed terms; of an equation
      ``a·x + b = c`` it is (a, b, c) with a > 0; of a greatest common divisor it is the sorted numbers.
    """
    if dataset == "chain_sum":
        return f"Compute {facts['expression'].replace(' ', '')}:", f"sum {sorted(signed_terms(facts['expression']))}"
    if dataset == "simple_equations":
        a, b, c = linear(facts["equation"], facts["variable"])
        sign = 1 if a > 0 else -1
        return f"Solve {facts['equation'].replace(' ', '')}:", f"equation {[sign * a, sign * b, sign * c]}"
    if dataset == "gcd":
        return f"GCD of {', '.join(map(str, facts['numbers']))}:", f"gcd {sorted(facts['numbers'])}"
    raise ValueError(f"the built-in task knows chain_sum, simple_equations and gcd; not '{dataset}'")


def signed_terms(expression: str) -> list[int]:
    """'4 - 2 + 3' → [4, -2, 3]."""
    return [int(term) for term in re.findall(r"[+-]?\d+", expression.replace(" ", ""))]


def linear(equation: str, variable: str) -> tuple[int, int, int]:
    """(a, b, c) of ``a·x + b = c``; '9 - 2*j = 5' → (-2, 9, 5).

    Raises:
      ValueError: the left side is not one term in the variable and one number.
    """
    left, _, right = equation.replace(" ", "").partition("=")
    a = b = 0
    for term in re.findall(r"[+-]?[^+-]+", left):
        if term.endswith(variable):
            factor = term[: -len(variable)].rstrip("*")
            a += int(factor) if factor not in ("", "+", "-") else int(factor + "1")
        else:
            b += int(term)
    if a == 0 or b == 0:
        raise ValueError(f"an equation must have one term in the variable and one number; '{equation}' has not")
    return a, b, int(right)


def calculate(left: int, operator: str, right: int) -> tuple[str, int]:
    """('6+2=8', 8): one written step; a negative right operand is written with the other sign."""
    if right < 0 and operator in "+-":
        operator, right = ("-" if operator == "+" else "+"), -right
    value = left + right if operator == "+" else left - right if operator == "-" else left // right
    return f"{left}{operator}{right}={value}", value


def solve(problem: Problem) -> list[str]:
    """The steps of the careful solution: left to right; isolate and divide; subtract the smaller from the larger."""
    facts = problem.metadata["entry"]["metadata"]
    dataset = problem.metadata["dataset"]
    if dataset == "chain_sum":
        return chain(signed_terms(facts["expression"]))[0]
    if dataset == "simple_equations":
        a, b, c = linear(facts["equation"], facts["variable"])
        step, value = calculate(c, "-", b) if a > 0 else calculate(b, "-", c)
        return [step] if abs(a) == 1 else [step, calculate(value, "/", abs(a))[0]]
    return [step for step, _ in subtractions(*facts["numbers"])]


def chain(terms: list[int]) -> tuple[list[str], int]:
    """Steps and result of adding signed terms from left to right."""
    steps, total = [], terms[0]
    for term, sign in zip(terms[1:], signs(terms[1:]), strict=True):
        step, total = calculate(total, sign, abs(term))
        steps.append(step)
    return steps, total


def signs(terms: list[int]) -> list[str]:
    return ["-" if term < 0 else "+" for term in terms]


def subtractions(a: int, b: int) -> list[tuple[str, int]]:
    """Euclid by subtraction: (step, the smaller of the two numbers after it) until both are equal."""
    steps = []
    while a != b:
        large, small = max(a, b), min(a, b)
        step, difference = calculate(large, "-", small)
        a, b = small, difference
        steps.append((step, min(a, b)))
    return steps


def _shares(total: int, weights: Mapping[str, float]) -> dict[str, int]:
    """Whole numbers in proportion to ``weights`` that sum to ``total`` (largest remainders)."""
    whole = sum(weights.values())
    exact = {name: total * weight / whole for name, weight in weights.items()}
    counts = {name: int(value) for name, value in exact.items()}
    for name in sorted(exact, key=lambda n: counts[n] - exact[n])[: total - sum(counts.values())]:
        counts[name] += 1
    return counts


def _cycle(problems: list[Problem], count: int) -> list[Problem]:
    """``count`` problems; rounds after the first get ids of their own, so that ids stay unique."""
    rounds = [problems[i % len(problems)] for i in range(count)]
    return [p if i < len(problems) else dataclasses.replace(p, problem_id=f"{p.problem_id}/{i // len(problems)}") for i, p in enumerate(rounds)]


def _interleave(groups: list[list[Problem]]) -> list[Problem]:
    """One list whose every prefix has the groups in their proportions."""
    placed = [((i + 0.5) / len(group), number, problem) for number, group in enumerate(groups) for i, problem in enumerate(group)]
    return [problem for _, _, problem in sorted(placed, key=lambda item: item[:2])]
