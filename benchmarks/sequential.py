"""Test of two conditions for equal means within a margin, by pairs that are read as they come in.

Two one-sided t-tests (Schuirmann, 1987) at each look. The level is spent over the looks by Lan and
DeMets' function of O'Brien and Fleming's kind (1983), and each look is tested at what it adds: by
Bonferroni's inequality all looks together keep the level, however they depend on each other. That
costs some power against bounds from their joint distribution, and needs none.
"""

import math
from collections.abc import Sequence
from functools import cache
from itertools import pairwise
from statistics import NormalDist
from typing import NamedTuple

import numpy as np

from benchmarks.which_default import student_t

EQUIVALENT, WORSE, BETTER = "equivalent", "worse", "better"
OPEN = "open"  # more pairs are to come
NO_WORSE, UNDECIDED = "no worse", "undecided"  # there are no more
_TRIALS = 2000  # simulated tests


class Plan(NamedTuple):
    """What is stated before the first pair."""

    margin: float  # difference that matters
    level: float  # chance of a false claim, at most
    looks: tuple[int, ...]  # numbers of pairs


class Verdict(NamedTuple):
    """What the last look shows: nothing before the first one."""

    decision: str
    pairs: int = 0  # read
    mean: float = math.nan  # mean difference
    low: float = -math.inf  # limits of an interval that holds for all looks together
    high: float = math.inf


def decide(differences: Sequence[float], plan: Plan) -> Verdict:
    """Return what is decided at the first look that decides, or open.

    Differences that are all equal decide nothing: they are no sample.

    Args:
        differences: Condition minus baseline, by pair in the order of the pairs.
        plan: Margin, level and looks.
    """
    verdict = Verdict(OPEN)
    for pairs, level in zip(plan.looks, levels(plan), strict=True):
        if pairs > len(differences):
            return verdict
        read = np.asarray(differences[:pairs])
        mean = float(read.mean())
        error = float(read.std(ddof=1)) / math.sqrt(pairs)
        half = _quantile(1 - level, pairs - 1) * error if np.ptp(read) else math.inf
        verdict = Verdict(OPEN, pairs, mean, mean - half, mean + half)
        if -plan.margin < verdict.low and verdict.high < plan.margin:
            return verdict._replace(decision=EQUIVALENT)
        if verdict.high < -plan.margin:
            return verdict._replace(decision=WORSE)
        if verdict.low > plan.margin:
            return verdict._replace(decision=BETTER)
    is_no_worse = verdict.low > -plan.margin
    return verdict._replace(decision=NO_WORSE if is_no_worse else UNDECIDED)


def chance(decision: str, plan: Plan, *, difference: float, spread: float) -> float:
    """Return how often simulated tests of normal differences decide so (error 0.01).

    Args:
        decision: Decision to be counted.
        plan: Margin, level and looks.
        difference: True mean of the differences.
        spread: Their true standard deviation.
    """
    draws = np.random.default_rng(0).normal(difference, spread, (_TRIALS, plan.looks[-1]))
    return sum(decide(draw, plan).decision == decision for draw in draws) / _TRIALS


@cache
def levels(plan: Plan) -> tuple[float, ...]:
    """Return the level of each look: what the spending function adds there."""
    normal = NormalDist()
    edge = normal.inv_cdf(1 - plan.level / 2)
    spent = [2 - 2 * normal.cdf(edge / math.sqrt(n / plan.looks[-1])) for n in plan.looks]
    return tuple(after - before for before, after in pairwise([0.0, *spent]))


_quantile = cache(student_t)
