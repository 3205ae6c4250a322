"""Lanes of several tenants: a free group goes where least is held; none is idle while wanted."""

from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slipstream.generators.engine import EngineLoad
from slipstream.generators.lanes.concurrency import Range
from slipstream.generators.lanes.lanes import Booking, Lanes
from slipstream.generators.lanes.shares import LaneDemand, SharedLanes, granted

IDLE = EngineLoad(
    num_running=0, num_waiting=0, used_tokens=0, capacity_tokens=1000, num_retractions=0
)


def of(held: int, *, weight: float = 1.0, group: int = 4, wants: bool = True) -> LaneDemand:
    return LaneDemand(weight, group, held, wants)


@pytest.mark.parametrize(
    ("limit", "demands", "expected"),
    [
        (16, [of(0), of(0)], [8, 8]),
        (16, [of(0, weight=3.0), of(0)], [12, 4]),
        (16, [of(0, wants=False), of(0)], [0, 16]),  # what one leaves, another takes
        (16, [of(8), of(4)], [0, 4]),
        (16, [of(12), of(0)], [0, 4]),
        (16, [of(16), of(0)], [0, 4]),  # a group must always fit
        (4, [of(0), of(0), of(0)], [4, 4, 4]),
        (16, [of(4, group=8), of(9)], [0, 0]),  # 3 are free, and no group fits
        (32, [of(4, group=16), of(12)], [16, 0]),
        (27, [of(4, group=16), of(12)], [0, 0]),  # lanes are saved for the larger group
    ],
)
def test_free_lanes_go_where_least_is_held(
    limit: int, demands: list[LaneDemand], expected: list[int]
):
    assert granted(limit, demands) == expected


demand = st.builds(
    LaneDemand,
    weight=st.floats(0.1, 10.0),
    group=st.integers(1, 16),
    held=st.integers(0, 64),
    wants=st.booleans(),
)


@given(st.integers(1, 512), st.lists(demand, min_size=1, max_size=6))
def test_grants_are_whole_groups_within_the_limit_and_leave_no_group_free(
    limit: int, demands: list[LaneDemand]
):
    given_ = granted(limit, demands)
    beyond = sum(one.group for one in demands if one.wants and not one.held)
    held = sum(one.held for one in demands)
    assert held + sum(given_) <= max(limit, held + beyond)
    for more, one in zip(given_, demands, strict=True):
        assert more % one.group == 0
        assert one.wants or not more
    wanting = [i for i, one in enumerate(demands) if one.wants]
    if wanting:
        largest = max(demands[i].group for i in wanting)
        assert limit - held - sum(given_) < largest, "lanes are idle though a tenant wants them"


def shared(**weights: float) -> tuple[SharedLanes, dict[str, Lanes]]:
    within = Range(lowest=4, highest=32, step=4)
    every, lanes = SharedLanes(Lanes(within)), {name: Lanes(within) for name in weights}
    for name, weight in weights.items():
        every.open(name, lanes[name], weight=weight, group=4)
    return every, lanes


def lease(lanes: Lanes, most: int) -> list[Booking]:
    """Ask for work, and book as many groups as there are lanes, and work."""
    asked = lanes.ask()
    groups = min(asked, most) // 4
    bookings = [lanes.book(4) for _ in range(groups)]
    lanes.answered(asked, groups * 4)
    return bookings


def test_a_tenant_without_work_leaves_its_lanes_but_can_ask_for_more():
    every, lanes = shared(a=1.0, b=1.0)
    assert lanes["b"].free == 16
    assert lease(lanes["b"], 0) == []
    assert lanes["b"].free == 4, "it asks for a group from time to time"
    assert lanes["a"].free == 32
    (booking,) = lease(lanes["b"], 4)
    assert lanes["a"].free + lanes["b"].free == 28
    assert every.fair_share(lanes["a"]) == 16
    booking.close()
    every.close("b")
    assert lanes["a"].limit == 32


@pytest.mark.parametrize("weights", [(1.0, 1.0, 1.0, 1.0), (2.0, 1.0, 1.0, 1.0)])
def test_over_time_lanes_are_in_proportion_to_weights_and_all_are_used(weights: tuple[float, ...]):
    random, names = Random(3), ("a", "b", "c", "d")
    every, lanes = shared(**dict(zip(names, weights, strict=True)))
    under_way: list[tuple[str, Booking, int]] = []
    held, used = dict.fromkeys(names, 0), 0
    for _ in range(2000):
        for name in random.sample(names, len(names)):
            under_way += [(name, booking, 4) for booking in lease(lanes[name], 64)]
        name, booking, left = under_way.pop(random.randrange(len(under_way)))
        booking.leave(1)  # siblings end one by one
        if left > 1:
            under_way.append((name, booking, left - 1))
        every.observe(IDLE)
        used += sum(own.booked for own in lanes.values())
        for one, own in lanes.items():
            held[one] += own.booked
    assert used / 2000 > 28, "three lanes at most wait for a fourth"
    assert all(own.booked <= 36 for own in lanes.values())
    levels = [held[name] / weight for name, weight in zip(names, weights, strict=True)]
    assert max(levels) / min(levels) < 1.15
