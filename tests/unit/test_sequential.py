"""The sequential test of equal means: what it decides, how often it errs, and its power."""

import math
from itertools import accumulate
from statistics import NormalDist

import pytest

from benchmarks.sequential import (
    BETTER,
    EQUIVALENT,
    NO_WORSE,
    OPEN,
    UNDECIDED,
    WORSE,
    Plan,
    chance,
    decide,
    levels,
)

PLAN = Plan(margin=0.05, level=0.05, looks=(12, 24, 36, 48))
SPREAD = 0.1
_ERROR = 3 * math.sqrt(0.05 * 0.95 / 2000)  # three deviations of a simulated chance of 0.05


def _differences(mean: float, pairs: int, spread: float = 0.01) -> list[float]:
    return [mean + spread * (-1) ** pair for pair in range(pairs)]


def test_levels_of_the_looks_add_up_to_what_the_spending_function_has_spent():
    # published for five looks at a two-sided level of 0.05 (Lan and DeMets, 1983)
    spent = [2 * level for level in accumulate(levels(Plan(0.05, 0.025, (1, 2, 3, 4, 5))))]
    assert spent == pytest.approx([0.0000, 0.0008, 0.0076, 0.0244, 0.0500], abs=5e-5)


def test_looks_are_never_tested_at_more_than_the_published_bounds():
    # Lan and DeMets' of O'Brien and Fleming's kind: four looks, 0.025 on each side
    published = [4.333, 2.963, 2.359, 2.014]
    ours = [NormalDist().inv_cdf(1 - level) for level in levels(Plan(0.05, 0.025, (1, 2, 3, 4)))]
    assert ours[0] == pytest.approx(published[0], abs=1e-3)  # there is nothing to be joint with
    assert all(z >= bound - 1e-3 for z, bound in zip(ours, published, strict=True))


def test_a_test_ends_at_the_first_look_that_decides():
    few = _differences(0.0, 11)
    assert decide(few, PLAN) == decide([], PLAN)
    assert (decide(few, PLAN).decision, decide(few, PLAN).pairs) == (OPEN, 0)
    equal = decide(_differences(0.0, 12), PLAN)
    assert (equal.decision, equal.pairs) == (EQUIVALENT, 12)
    assert decide([*_differences(0.0, 12), *[1.0] * 36], PLAN) == equal
    assert decide(_differences(-0.1, 12), PLAN).decision == WORSE
    assert decide(_differences(0.1, 12), PLAN).decision == BETTER


def test_differences_near_the_margin_stay_open_until_there_are_no_more_pairs():
    wide = _differences(-0.03, 48, spread=0.2)
    assert decide(wide[:47], PLAN)._replace(low=0, high=0) == (OPEN, 36, pytest.approx(-0.03), 0, 0)
    assert decide(wide, PLAN).decision == UNDECIDED
    assert decide([-difference for difference in wide], PLAN).decision == NO_WORSE


@pytest.mark.parametrize("difference", [0.0, math.nan])
def test_differences_that_are_no_sample_decide_nothing(difference: float):
    assert decide(48 * [difference], PLAN).decision == UNDECIDED


def test_the_interval_is_of_students_t_at_the_level_of_the_look():
    plan = Plan(margin=0.001, level=0.025, looks=(8,))
    verdict = decide([1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0], plan)
    half = 2.364624 * math.sqrt(6) / math.sqrt(8)  # quantile of seven degrees; variance of 1..8
    assert (verdict.low, verdict.high) == pytest.approx((4.5 - half, 4.5 + half), rel=1e-5)


@pytest.mark.parametrize("difference", [-PLAN.margin, PLAN.margin])
@pytest.mark.parametrize("spread", [0.03, SPREAD])
def test_a_difference_that_matters_is_called_equal_no_oftener_than_the_level(
    difference: float, spread: float
):
    claims = [EQUIVALENT, NO_WORSE] if difference < 0 else [EQUIVALENT]
    falsely = sum(chance(claim, PLAN, difference=difference, spread=spread) for claim in claims)
    assert falsely <= PLAN.level + _ERROR
    beyond = WORSE if difference < 0 else BETTER
    assert chance(beyond, PLAN, difference=difference, spread=spread) <= PLAN.level + _ERROR


def test_the_power_of_one_look_is_that_of_two_one_sided_tests():
    plan = Plan(margin=0.05, level=0.05, looks=(200,))  # Student's t is nearly normal
    normal, spread = NormalDist(), 0.25
    reach = plan.margin * math.sqrt(200) / spread - normal.inv_cdf(0.95)
    expected = 2 * normal.cdf(reach) - 1
    assert 0.7 < expected < 0.9
    assert chance(EQUIVALENT, plan, difference=0.0, spread=spread) == pytest.approx(
        expected, abs=0.03
    )


def test_more_pairs_have_more_power_and_looks_cost_some():
    powers = [
        chance(EQUIVALENT, PLAN._replace(looks=looks), difference=0.0, spread=SPREAD)
        for looks in [(12, 24), (12, 24, 36, 48), (48,)]
    ]
    assert powers == sorted(powers)
    assert powers[1] > 0.8
