"""Lanes of several tenants: weighted max-min fairness, whole groups, nothing idle while wanted."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slipstream.generators.engine import EngineLoad
from slipstream.generators.lanes.concurrency import Range
from slipstream.generators.lanes.lanes import Lanes
from slipstream.generators.lanes.shares import LaneDemand, SharedLanes, divided, fair_shares

IDLE = EngineLoad(
    num_running=0, num_waiting=0, used_tokens=0, capacity_tokens=1000, num_retractions=0
)


def hungry(weight: float = 1.0, group: int = 4) -> LaneDemand:
    return LaneDemand(weight, group, None)


@pytest.mark.parametrize(
    ("limit", "demands", "expected"),
    [
        (16, [hungry(), hungry()], [8, 8]),
        (16, [hungry(3.0), hungry()], [12, 4]),
        (16, [hungry(), LaneDemand(1.0, 4, 2)], [12, 2]),  # what one leaves, another takes
        (16, [LaneDemand(1.0, 4, 0), hungry()], [0, 16]),
        (4, [hungry(), hungry(), hungry()], [4, 4, 4]),  # a group must always fit
        (32, [hungry(group=8), hungry(group=8), hungry(group=8)], [16, 8, 8]),
    ],
)
def test_lanes_are_divided_by_weight_in_whole_groups(
    limit: int, demands: list[LaneDemand], expected: list[int]
):
    assert divided(limit, demands, [0.0] * len(demands)) == expected


def test_a_group_that_is_left_goes_to_who_is_owed_it():
    demands = [hungry(group=8)] * 3
    assert divided(32, demands, [0.0, 0.0, 3.0]) == [8, 8, 16]


demand = st.builds(
    LaneDemand,
    weight=st.floats(0.1, 10.0),
    group=st.integers(1, 16),
    wanted=st.none() | st.integers(0, 64),
)


@given(st.integers(1, 512), st.lists(demand, min_size=1, max_size=6))
def test_no_share_could_rise_but_by_a_poorer_one(limit: int, demands: list[LaneDemand]):
    shares = fair_shares(limit, demands)
    assert sum(shares) <= limit + 1e-6
    levels = [share / one.weight for share, one in zip(shares, demands, strict=True)]
    wants = [
        one.wanted is None or share < one.wanted - 1e-9
        for share, one in zip(shares, demands, strict=True)
    ]
    if any(wants):
        assert sum(shares) == pytest.approx(limit)
        lowest = min(level for level, wanting in zip(levels, wants, strict=True) if wanting)
        assert all(level <= lowest + 1e-6 for level in levels)
    lanes = divided(limit, demands, [0.0] * len(demands))
    for got, share, one in zip(lanes, shares, demands, strict=True):
        if one.wanted is None:
            assert got % one.group == 0
            assert got >= max(one.group, share - one.group)
        else:
            assert got <= one.wanted


def shared(**weights: float) -> tuple[SharedLanes, dict[str, Lanes]]:
    within = Range(lowest=4, highest=32, step=4)
    every, lanes = SharedLanes(Lanes(within)), {name: Lanes(within) for name in weights}
    for name, weight in weights.items():
        every.open(name, lanes[name], weight=weight, group=4)
    return every, lanes


def test_a_tenant_without_work_leaves_its_lanes_but_can_ask_for_more():
    every, lanes = shared(a=1.0, b=1.0)
    assert [lanes["a"].limit, lanes["b"].limit] == [16, 16]
    lanes["b"].answered(16, 0)
    lanes["a"].observe(IDLE)
    assert [lanes["a"].limit, lanes["b"].limit] == [32, 4]
    assert lanes["b"].free == 4
    booking = lanes["b"].book(4)
    lanes["b"].answered(4, 4)
    lanes["b"].observe(IDLE)
    assert [lanes["a"].limit, lanes["b"].limit] == [16, 16]
    assert every.fair_share(lanes["a"]) == 16
    booking.close()
    every.close("b")
    assert lanes["a"].limit == 32


def test_over_time_a_remaining_group_goes_around():
    every, lanes = shared(a=1.0, b=1.0, c=1.0)
    total = dict.fromkeys(lanes, 0)
    for _ in range(30):
        every.observe(IDLE)
        for name, own in lanes.items():
            total[name] += own.limit
        assert sum(own.limit for own in lanes.values()) == 32
    assert max(total.values()) - min(total.values()) <= 8
