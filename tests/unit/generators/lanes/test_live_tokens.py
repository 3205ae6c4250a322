"""Tokens of live trajectories: sleeping ones count, and nothing that lives is held back."""

import asyncio
from contextlib import AsyncExitStack
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from slipstream.generators.engine import EngineLoad
from slipstream.generators.lanes.concurrency import Range
from slipstream.generators.lanes.lanes import Booking, Lanes, lanes_of
from slipstream.generators.lanes.live_tokens import LiveTokens
from tests.support.generator_settings import generator_settings_of
from tests.support.waiting import HANG_S

LONGEST = 1000
WITHIN = Range(lowest=4, highest=64, step=4)


def ended(*sizes: int) -> LiveTokens:
    """Return tokens after trajectories of one call each have ended."""
    live = LiveTokens(LONGEST)
    for number, size in enumerate(sizes):
        live.begin(number)
        live.hold(number, size)
        live.end(number)
    return live


def test_before_one_has_ended_each_counts_with_the_most_tokens():
    live = LiveTokens(LONGEST)
    assert live.num_fitting(8000, 0) == 8
    assert live.num_fitting(8000, 3) == 5, "of those that are leased, too"
    live.begin("asleep")
    live.hold("asleep", 10)
    assert live.num_fitting(8000, 3) == 4


def test_a_trajectory_that_ends_frees_its_room_at_once():
    live = ended(*[200] * 400)
    before = live.num_fitting(8000, 0)
    for number in range(8):
        live.begin(number)
        live.hold(number, 900)
    full = live.num_fitting(8000, 0)
    assert full <= 0, "each has 900 tokens and its next call may add some"
    live.end(0)
    assert live.num_fitting(8000, 0) > full
    for number in range(1, 8):
        live.end(number)
    assert 0.8 * before < live.num_fitting(8000, 0) <= before


def test_the_average_is_over_calls_and_not_what_trajectories_have_at_their_end():
    live = LiveTokens(LONGEST)
    for number in range(400):
        live.begin(number)
        for size in (100, 200, 300, 400):
            live.hold(number, size)
        live.end(number)
    assert 250 <= live.mean_tokens < 260


def test_young_ones_have_the_room_that_old_ones_need_beyond_the_average():
    live = LiveTokens(LONGEST)
    for number in range(400):
        live.begin(number)
        for size in range(20, 800, 40):
            live.hold(number, size)
        live.end(number)
    for number, size in enumerate([100, 700] * 8):
        live.begin(number)
        live.hold(number, size)
    assert 21 <= live.num_fitting(16_000, 0) <= 22, "each has 400 on average, and gets some 40 more"
    live.begin("new")
    assert 20 <= live.num_fitting(16_000, 0) <= 21, "one that has no tokens yet counts with 400"


def test_short_ones_that_end_first_do_not_let_many_begin():
    live = LiveTokens(LONGEST)
    for number in range(8):
        live.begin(number)
    for number in range(8):
        live.hold(number, 100 if number < 2 else 800)
    for number in range(2):
        live.end(number)
    assert live.mean_tokens > 2 * (LONGEST + 100 + 100) / 3, "the six that live will be long"


def test_a_call_that_ends_after_its_trajectory_holds_nothing():
    live = ended(100)
    before = live.mean_tokens
    live.hold(0, 900)
    assert live.mean_tokens == before


@example([1, 1], [0, 0, 59], 0, 0)  # a whole number of averages is missing, but for rounding
@given(
    st.lists(st.integers(1, LONGEST), max_size=30),
    st.lists(st.integers(0, LONGEST), max_size=30),
    st.integers(0, 30),
    st.integers(0, 20_000),
)
def test_no_more_begin_than_fit_with_what_each_has_now(
    sizes: list[int], held: list[int], num_promised: int, capacity: int
):
    live = ended(*sizes)
    for number, size in enumerate(held):
        live.begin(number)
        live.hold(number, size)
    fitting = live.num_fitting(capacity, num_promised)
    if fitting > 0:
        assert sum(held) + (fitting + num_promised) * live.mean_tokens <= capacity + 1e-3
    live.begin("new")
    assert live.num_fitting(capacity, num_promised) < fitting


def load(capacity: int) -> EngineLoad:
    return EngineLoad(
        num_running=0, num_waiting=0, used_tokens=0, capacity_tokens=capacity, num_retractions=0
    )


def lanes_with(capacity: int) -> Lanes:
    lanes = Lanes(WITHIN, longest_tokens=100, most_outside=64, live=LiveTokens(LONGEST))
    lanes.observe(load(capacity))
    return lanes


async def entered(lanes: Lanes) -> Booking:
    booking = lanes.book(4)
    await booking.enter()
    return booking


async def test_no_group_is_taken_while_the_cache_is_full_of_sleeping_ones():
    lanes = lanes_with(10_000)
    assert lanes.free == 8, "whole groups"
    first, second = await entered(lanes), await entered(lanes)
    assert lanes.free == 0
    async with AsyncExitStack() as stack:
        asleep = [await stack.enter_async_context(first.by_call()) for _ in range(4)]
        for trajectory in asleep:
            async with trajectory.call():
                trajectory.hold(900)
        assert lanes.in_flight == 4, "the engine has the second group alone"
        assert lanes.free == 0
    first.close()
    second.close()
    assert lanes.free == 8


async def test_the_log_says_once_that_the_cache_holds_back_trajectories(
    caplog: pytest.LogCaptureFixture,
):
    caplog.set_level("INFO")
    lanes = lanes_with(10_000)
    assert not caplog.messages
    bookings = [await entered(lanes) for _ in range(2)]
    for _ in range(2):
        lanes.observe(load(10_000))
    told = "new trajectories wait for room in the KV cache: 8 live ones take 1000 of its 10000"
    assert caplog.messages == [f"{told} tokens each"]
    for booking in bookings:
        booking.close()


async def test_one_group_is_always_taken_and_live_ones_go_on_in_a_cache_that_is_too_small():
    lanes = lanes_with(500)
    assert lanes.free == 4
    booking = await entered(lanes)
    async with AsyncExitStack() as stack, asyncio.timeout(HANG_S):
        four = [await stack.enter_async_context(booking.by_call()) for _ in range(4)]
        for _ in range(3):
            for trajectory in four:
                async with trajectory.call():
                    trajectory.hold(900)
        assert lanes.free == 0
        booking.leave(3)
        assert lanes.free == 3, "one still sleeps, and a group begins beside it"
    booking.close()
    assert lanes.free == 4


async def test_a_group_that_ends_before_it_begins_promises_nothing_more():
    lanes = lanes_with(8000)
    booking = lanes.book(4)
    assert lanes.free == 4
    booking.close()
    booking.close()
    assert lanes.free == 8


def test_live_ones_count_where_prefixes_are_kept_and_the_number_is_not_fixed(tmp_path: Path):
    environment = {"function": "a.py:A"}
    for concurrency, in_flight, section, sglang, count in [
        ("adaptive", "retract", environment, {}, True),
        ("adaptive", "in_place", environment, {}, False),
        ("adaptive", "retract", environment, {"disable_radix_cache": True}, False),
        ("adaptive", "retract", {}, {}, False),
        ("fixed", "retract", environment, {}, False),
    ]:
        settings = generator_settings_of(
            tmp_path,
            generators={"concurrency": concurrency, "device": "cpu", "sglang": sglang},
            weightbus={"in_flight": in_flight},
            environment=section,
        )
        assert (lanes_of(settings)._live is not None) is count
