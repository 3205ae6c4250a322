"""Trades by hand, in which the first bin or sequence changes hands too."""

import pytest

from slipstream.learner.batches.balance import Trading
from slipstream.learner.batches.bins import Bins


@pytest.mark.parametrize(
    ("bins", "replicas", "tokens", "capacity", "shares"),
    [
        pytest.param([[2], [1], [0]], [0, 1, 1], [3, 8, 2], 8, [[[1]], [[2], [0]]], id="bins"),
        pytest.param([[1], [0, 2]], [1, 0], [5, 3, 8], 16, [[[1, 0]], [[2]]], id="sequences"),
    ],
)
def test_the_heaviest_replica_trades_for_what_is_first(
    bins: Bins, replicas: list[int], tokens: list[int], capacity: int, shares: list[Bins]
):
    flops = [float(number) for number in tokens]
    trading = Trading(bins, replicas, tokens, flops, capacity=capacity, equal_counts=True)
    trading.run()
    assert trading.shares() == shares
