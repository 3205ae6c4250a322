"""The interval of a difference: seeded, in pairs where the problems are the same."""

import random

from slipstream.broker.history.compare.bootstrap import difference_of_means


def scores(mean: float, count: int = 200, first: int = 0) -> dict[int, float]:
    draw = random.Random(f"{mean} {count}")
    return {first + at: float(draw.random() < mean) for at in range(count)}


def test_the_same_scores_give_the_same_interval():
    a, b = scores(0.4), scores(0.6)
    assert difference_of_means(a, b) == difference_of_means(a, b)
    a = {at: at**0.5 for at in range(50)}
    assert difference_of_means(a, b, seed=1) != difference_of_means(a, b)


def test_a_clear_difference_excludes_zero_and_none_does_not():
    found = difference_of_means(scores(0.2), scores(0.7))
    assert found.low < found.difference < found.high
    assert found.low > 0
    same = difference_of_means(scores(0.5), scores(0.5))
    assert (same.difference, same.low, same.high) == (0.0, 0.0, 0.0)


def test_pairs_are_surer_than_problems_apart():
    hard = {at: at / 100 for at in range(100)}
    better = {at: value + 0.05 for at, value in hard.items()}
    paired = difference_of_means(hard, better)
    apart = difference_of_means(hard, {at + 1_000: value for at, value in better.items()})
    assert (paired.paired, apart.paired) == (True, False)
    assert paired.high - paired.low < 0.1 * (apart.high - apart.low)
    assert abs(paired.difference - 0.05) < 1e-9


def test_the_interval_is_about_as_wide_as_the_error_of_a_mean():
    a, b = scores(0.5, 400), scores(0.5, 400, first=1_000)
    found = difference_of_means(a, b)
    expected = 2 * 1.96 * (2 * 0.25 / 400) ** 0.5
    assert 0.9 * expected < found.high - found.low < 1.1 * expected


def test_one_problem_is_enough_to_be_shown():
    found = difference_of_means({0: 0.0}, {0: 1.0})
    assert (found.difference, found.low, found.high) == (1.0, 1.0, 1.0)
