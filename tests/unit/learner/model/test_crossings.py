"""What the rings of context parallelism see of each other's keys."""

from bisect import bisect_right
from itertools import accumulate
from typing import Any, cast

from hypothesis import given
from hypothesis import strategies as st

from slipstream.learner.model.context import TokenSplit
from slipstream.learner.model.crossings import Run, crossing
from slipstream.learner.parallel import HeadShares

LENGTHS = st.lists(st.integers(0, 30), min_size=1, max_size=8)


def tokens_of(runs: list[Run]) -> list[int]:
    return [token for run in runs for token in range(*run)]


@given(LENGTHS, st.integers(1, 3), st.integers(2, 4))
def test_each_query_sees_each_key_of_its_past_once(lengths: list[int], parts: int, rings: int):
    split = TokenSplit.of(
        sum(lengths), shares=HeadShares(parts, rings), group=cast("Any", object())
    )
    lengths = [*lengths, split.padded - split.count]
    bounds, runs = list(accumulate(lengths, initial=0)), split.runs_of_rings()
    seen = []
    for asking in runs:
        queries = tokens_of(asking)
        for first, end in asking:  # causally, within the run
            seen += [
                (query, key)
                for query in range(first, end)
                for key in range(max(first, bounds[bisect_right(bounds, query) - 1]), query + 1)
            ]
        for having in runs:
            keys, found = tokens_of(having), crossing(bounds, asking, having)
            assert found.num_keys == len(tokens_of(list(found.keys)))
            assert bool(found.queries) == bool(found.keys)
            seen += [
                (queries[query], keys[key])
                for query in tokens_of(list(found.queries))
                for key in tokens_of(list(found.keys))
            ]
    expected = [
        (query, key)
        for query in range(split.padded)
        for key in range(bounds[bisect_right(bounds, query) - 1], query + 1)
    ]
    assert sorted(seen) == expected


def test_short_sequences_send_nothing_to_other_rings():
    split = TokenSplit.of(16, shares=HeadShares(1, 2), group=cast("Any", object()))
    first, second = split.runs_of_rings()
    assert (first, second) == ([(0, 4), (12, 16)], [(4, 8), (8, 12)])
    assert crossing([0, 4, 8, 12, 16], first, second) == ((), ())
    # A sequence of 6 tokens: two of its last run's queries see four keys of the ring before.
    assert crossing([0, 6, 16], second, first) == (((0, 2),), ((0, 4),))
    assert crossing([0, 16], first, second) == (((4, 8),), ((0, 4), (4, 8)))
