"""How context parallelism divides tokens."""

from typing import Any, cast

import torch
from hypothesis import given
from hypothesis import strategies as st

from slipstream.learner.model.context import TokenSplit
from slipstream.learner.parallel import HeadShares

CPU = torch.device("cpu")


@given(st.integers(0, 60), st.sampled_from([1, 2, 4]), st.integers(1, 3), st.integers(1, 3))
def test_tokens_are_divided_as_evenly_as_units_allow(count: int, unit: int, parts: int, rings: int):
    shares, group = HeadShares(parts, rings), cast("Any", object())
    splits = [
        TokenSplit.of(count, unit=unit, rank=rank, shares=shares, group=group)
        for rank in range(parts * rings)
    ]
    padded, rows = splits[0].padded, splits[0].rows
    assert max(rows) - min(rows) <= unit
    assert min(rows) >= unit, "no rank computes nothing"
    enough = count >= parts * rings * unit * 2
    assert padded - count < unit or not enough, "more is padded than units need"
    laid_out = [token for split in splits for run in split.runs for token in range(*run)]
    assert sorted(laid_out) == list(range(padded)), "every token is on one rank"
    order = splits[0].order(CPU)
    assert laid_out == (list(range(padded)) if order is None else order.tolist())
    for split, number in zip(splits, rows, strict=True):
        mine = split.mine(torch.arange(1, count + 1)).tolist()
        tokens = [token for run in split.runs for token in range(*run)]
        assert mine == [token + 1 if token < count else 0 for token in tokens]
        assert len(mine) == number
        for first, end in split.runs_of_rings()[split.ring]:
            assert first < end, "attention has a query in each piece"
