from collections.abc import Callable
from itertools import chain

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slipstream.learner.batches.bins import Bins, fewest_bins, least_bins, level_bins, spread

LENGTHS = st.lists(st.integers(1, 120), min_size=1, max_size=60)


def loads(bins: Bins, num_tokens: list[int]) -> list[int]:
    return [sum(num_tokens[i] for i in one) for one in bins]


@given(LENGTHS)
def test_each_sequence_is_in_one_bin_and_only_one_too_long_for_any_exceeds_it(lengths: list[int]):
    bins = fewest_bins(range(len(lengths)), lengths, 100)
    assert sorted(chain.from_iterable(bins)) == list(range(len(lengths)))
    assert all(len(one) == 1 or sum(lengths[i] for i in one) <= 100 for one in bins)
    assert len(bins) >= least_bins(lengths, 100)


@given(LENGTHS)
def test_no_two_bins_would_fit_into_one(lengths: list[int]):
    used = sorted(loads(fewest_bins(range(len(lengths)), lengths, 100), lengths))
    assert len(used) == 1 or used[0] + used[1] > 100


def test_as_few_bins_as_an_optimal_packing_has():
    for lengths, best in [
        ([60, 50, 40, 30, 20], 2),
        ([5, 4, 4, 3, 2, 2], 2),  # best fit, longest first, needs three: 5+4, 4+3+2, 2
        ([6] * 5, 5),
        ([25, 3, 3], 2),
    ]:
        capacity = 100 if max(lengths) > 25 else 10
        assert len(fewest_bins(range(len(lengths)), lengths, capacity)) == best


def test_thousands_of_bins_are_filled_to_the_last_token():
    lengths = [37 * i % 1009 + 1 for i in range(4_000)]
    capacity = 4_096
    assert len(fewest_bins(range(4_000), lengths, capacity)) <= 1.01 * least_bins(lengths, capacity)


@pytest.mark.parametrize("flops", [lambda length: length, lambda length: length + length**2 / 50])
def test_bins_are_level_by_flops_where_there_is_room(flops: Callable[[int], float]):
    lengths = [17 * i % 61 + 1 for i in range(200)]
    work = [flops(length) for length in lengths]
    bins = level_bins(range(200), lengths, work, capacity=500, number=20)
    assert bins is not None
    assert max(loads(bins, lengths)) <= 500
    per_bin = [sum(work[i] for i in one) for one in bins]
    assert max(per_bin) <= 1.01 * sum(per_bin) / 20


def test_there_are_no_level_bins_where_one_sequence_does_not_fit():
    assert level_bins(range(3), [60, 60, 60], [1.0] * 3, capacity=100, number=2) is None


def test_sequences_are_spread_over_as_many_bins_as_are_wanted_then_bins_are_empty():
    assert [len(one) for one in spread([[0, 1, 2, 3], [4, 5]], 4)] == [2, 2, 1, 1]
    assert spread([[0, 1]], 4) == [[0], [1], [], []]
