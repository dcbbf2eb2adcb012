"""Worked solutions for the warm-up, by two teachers.

Invariants:
* Every demonstration is well-formed: steps ``left operator right=value`` joined by ";", then "####" and the answer;
  the arithmetic of every written step is right, the careless teacher's included.
* The careful teacher is always right. The careless one follows a wrong method: it drops the last terms of a sum or misreads
  one sign, forgets to divide or moves a term without changing its sign, stops subtracting early. Its answer is the end of that method,
  and right only by luck.
So after the warm-up every response is well-formed and the reward tells the ways of working apart.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence

from areal_jax.data.arithmetic import KINDS, Kind, calculate, chain, linear, signed_terms, solve, subtractions
from areal_jax.data.problems import Problem

ANSWER_MARK = "####"
STOP_EARLY = 0.8
"""Chance that the careless teacher stops after a subtraction."""


def demonstrate(problem: Problem, careless: bool, rng: random.Random) -> str:
    """One worked solution.

    Args:
      problem: a problem of ``arithmetic.build_pools``.
      careless: which teacher writes it.
      rng: draws the careless teacher's mistakes; unused by the careful one.

    Returns:
      Steps joined by ";" and then "####answer".

    Raises:
      ValueError: the problem is not one of the built-in task.
    """
    if problem.metadata.get("task") != "arithmetic":
        raise ValueError(f"demonstrations are written for the built-in task; '{problem.problem_id}' is not of it; set sft.steps=0")
    if not careless:
        steps, answer = solve(problem), problem.answer
    else:
        steps, answer = MISTAKES[problem.metadata["dataset"]](problem.metadata["entry"]["metadata"], rng)
    return ";".join(steps) + ANSWER_MARK + str(answer)


def _careless_sum(facts: Mapping, rng: random.Random) -> tuple[list[str], int]:
    terms = signed_terms(facts["expression"])
    if len(terms) > 2 and rng.random() < 0.5:
        return chain(terms[: -rng.randint(1, 3 if len(terms) > 6 else 1)])
    wrong = rng.randrange(1, len(terms))
    if terms[wrong] == 0:
        wrong = max(range(1, len(terms)), key=lambda i: abs(terms[i]))
    if terms[wrong] == 0:  # only zeros follow the first term: no sign can be misread
        return chain([terms[0], terms[0], *terms[2:]])
    return chain([-term if i == wrong else term for i, term in enumerate(terms)])


def _careless_equation(facts: Mapping, rng: random.Random) -> tuple[list[str], int]:
    a, b, c = linear(facts["equation"], facts["variable"])
    if abs(a) != 1 and rng.random() < 0.5:
        step, value = calculate(c, "-", b) if a > 0 else calculate(b, "-", c)
        return [step], value
    step, value = calculate(c, "+", b) if a > 0 else calculate(b, "+", c)
    if abs(a) == 1 or value % abs(a):
        return [step], value
    last, value = calculate(value, "/", abs(a))
    return [step, last], value


def _careless_gcd(facts: Mapping, rng: random.Random) -> tuple[list[str], int]:
    steps = subtractions(*facts["numbers"])
    written = []
    for step, smaller in steps:
        written.append(step)
        if rng.random() < STOP_EARLY:
            return written, smaller
    return written, steps[-1][1]


MISTAKES = {"chain_sum": _careless_sum, "simple_equations": _careless_equation, "gcd": _careless_gcd}


def demonstration_corpus(
    pool: Sequence[Problem],
    careless_fraction: float,
    count: int,
    seed: int,
    kinds: Mapping[str, Kind] = KINDS,
) -> list[tuple[Problem, str]]:
    """``count`` demonstrations in the warm-up's own mix (``Kind.warmup_weight``).

    Args:
      pool: training problems; each kind with a warm-up weight must be among them.
      careless_fraction: share written by the careless teacher.
      count: number of demonstrations.
      seed: seed of the choices; the same seed gives the same corpus.
      kinds: the mix.

    Returns:
      (problem, response text) pairs in random order; a response holds no end token.

    Raises:
      ValueError: a kind of the mix has no problem in the pool.
    """
    rng = random.Random(seed)
    by_kind: dict[str, list[Problem]] = {name: [] for name, kind in kinds.items() if kind.warmup_weight > 0}
    for problem in pool:
        if problem.metadata.get("kind") in by_kind:
            by_kind[problem.metadata["kind"]].append(problem)
    missing = [name for name, problems in by_kind.items() if not problems]
    if missing:
        raise ValueError(f"the pool must hold every kind of the warm-up's mix; '{missing[0]}' is missing; raise task.train_problems ({len(pool)})")
    names = list(by_kind)
    chosen = rng.choices(names, weights=[kinds[name].warmup_weight for name in names], k=count)
    corpus = []
    for name in chosen:
        problem = rng.choice(by_kind[name])
        corpus.append((problem, demonstrate(problem, rng.random() < careless_fraction, rng)))
    return corpus
