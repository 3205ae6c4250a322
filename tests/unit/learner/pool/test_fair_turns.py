"""Turns of tenants: in proportion to weights, nobody kept waiting, nothing saved up."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slipstream.learner.pool.fair_turns import FairTurns

NAMES = ("a", "b", "c", "d")


def taken(turns: FairTurns, ready: set[str], seconds: dict[str, float], count: int) -> list[str]:
    order = []
    for _ in range(count):
        name = turns.next(ready)
        assert name is not None
        turns.spend(name, seconds[name])
        order.append(name)
    return order


def test_equal_tenants_take_turns_one_after_another():
    turns = FairTurns(dict.fromkeys(NAMES, 1.0))
    order = taken(turns, set(NAMES), dict.fromkeys(NAMES, 1.0), 12)
    assert order == list(NAMES) * 3


def test_nobody_is_next_where_nobody_is_ready():
    turns = FairTurns({"a": 1.0})
    assert turns.next(set()) is None
    assert turns.next({"a"}) == "a"


def test_a_tenant_that_was_idle_has_saved_nothing_up():
    turns = FairTurns({"a": 1.0, "b": 1.0})
    taken(turns, {"a"}, {"a": 1.0}, 50)
    order = taken(turns, {"a", "b"}, {"a": 1.0, "b": 1.0}, 10)
    assert order.count("b") <= 6


@given(
    weights=st.lists(st.floats(0.1, 10.0), min_size=2, max_size=4),
    seconds=st.lists(st.floats(0.1, 10.0), min_size=4, max_size=4),
)
def test_time_is_in_proportion_to_weights(weights: list[float], seconds: list[float]):
    names = NAMES[: len(weights)]
    weight, cost = dict(zip(names, weights, strict=True)), dict(zip(NAMES, seconds, strict=True))
    turns, spent = FairTurns(weight), dict.fromkeys(names, 0.0)
    for _ in range(200):
        (name,) = taken(turns, set(names), cost, 1)
        spent[name] += cost[name]
        for one, other in pairwise(names):  # the theorem of start-time fair queueing
            apart = abs(spent[one] / weight[one] - spent[other] / weight[other])
            assert apart <= cost[one] / weight[one] + cost[other] / weight[other] + 1e-6


@given(st.lists(st.sets(st.sampled_from(NAMES), min_size=1), min_size=1, max_size=60))
def test_a_ready_tenant_waits_for_one_turn_of_each_other(schedule: list[set[str]]):
    turns, waits = FairTurns(dict.fromkeys(NAMES, 1.0)), dict.fromkeys(NAMES, 0)
    ready = set[str]()
    for arrived in schedule:
        ready |= arrived  # a batch stays ready until it is trained
        (name,) = taken(turns, ready, dict.fromkeys(NAMES, 1.0), 1)
        for other in ready - {name}:
            waits[other] += 1
            assert waits[other] < len(NAMES)
        waits[name] = 0
        ready.discard(name)


@pytest.mark.parametrize("left", NAMES)
def test_a_tenant_that_left_is_not_next(left: str):
    turns = FairTurns(dict.fromkeys(NAMES, 1.0))
    taken(turns, set(NAMES), dict.fromkeys(NAMES, 1.0), 3)
    turns.leave(left)
    order = taken(turns, set(NAMES) - {left}, dict.fromkeys(NAMES, 1.0), 9)
    assert sorted(set(order)) == sorted(set(NAMES) - {left})
