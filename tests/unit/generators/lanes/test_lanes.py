"""Lanes of an engine: what is booked, what is in it, and a limit that follows its load."""

import asyncio
from contextlib import AsyncExitStack
from pathlib import Path

import pytest

from slipstream.generators.config import generator_settings
from slipstream.generators.engine import EngineLoad
from slipstream.generators.lanes.concurrency import Range
from slipstream.generators.lanes.lanes import CallLanes, Lanes, MeanCount, lanes_of
from tests.support.generator_settings import generator_settings_of
from tests.support.waiting import HANG_S, until_async

WITHIN = Range(lowest=4, highest=32, step=4)


def load(used: int, *, retractions: int = 0, waiting: int = 0) -> EngineLoad:
    return EngineLoad(
        num_running=14,
        num_waiting=waiting,
        used_tokens=used,
        capacity_tokens=1000,
        num_retractions=retractions,
    )


async def entered(lanes: Lanes, *sizes: int) -> None:
    for size in sizes:
        await lanes.book(size).enter()


def test_fixed_lanes_never_change():
    lanes = Lanes(WITHIN)
    asyncio.run(entered(lanes, 4, 4))
    for seen in (load(0), load(1000, retractions=7), load(900)):
        lanes.observe(seen)
        assert (lanes.limit, lanes.free) == (32, 24)


def test_lanes_that_follow_the_load_begin_with_what_fits_however_long_it_becomes():
    lanes = Lanes(WITHIN, longest_tokens=50)
    assert lanes.limit == 4, "nothing is known of the cache yet"
    lanes.observe(load(0, retractions=3))
    assert lanes.limit == 20
    lanes.observe(load(0, retractions=3))
    assert lanes.limit == 20, "what was retracted before is nothing that they did"


async def test_a_retraction_cuts_what_may_be_under_way_and_lanes_open_again_when_some_have_ended():
    lanes = Lanes(WITHIN, longest_tokens=50)
    lanes.observe(load(0))
    bookings = [lanes.book(4) for _ in range(5)]
    for booking in bookings:
        await booking.enter()
    lanes.observe(load(990, retractions=1))
    assert (lanes.limit, lanes.free) == (15, -5)
    waiting = asyncio.create_task(lanes.until_free())
    bookings[0].leave(4)
    await asyncio.sleep(0)
    assert not waiting.done()
    lanes.observe(load(990, retractions=2))
    assert lanes.limit == 15, "it is one burst"
    bookings[1].leave(2)
    async with asyncio.timeout(HANG_S):
        await waiting
    assert (lanes.free, lanes.in_flight) == (1, 14)


async def test_lanes_that_were_cut_open_again_by_a_group_when_all_of_them_have_turned_over():
    lanes = Lanes(WITHIN, longest_tokens=50)
    lanes.observe(load(0))
    first = lanes.book(20)
    await first.enter()
    lanes.observe(load(990, retractions=1))
    assert lanes.limit == 15

    async def turn_over(count: int) -> None:
        for _ in range(count):
            booking = lanes.book(1)
            await booking.enter()
            booking.leave(1)
        lanes.observe(load(100, retractions=1))

    first.leave(6)
    await turn_over(8)
    assert lanes.limit == 15, "14 have ended since"
    await turn_over(1)
    assert lanes.limit == 19


async def test_work_that_was_granted_before_a_cut_enters_when_its_lanes_are_free():
    lanes = Lanes(WITHIN, longest_tokens=125)
    lanes.observe(load(0))
    first = lanes.book(4)
    await first.enter()
    granted = lanes.book(4)
    lanes.observe(load(990, retractions=1))
    assert lanes.limit == 4
    entering = asyncio.create_task(granted.enter())
    await asyncio.sleep(0)
    assert (entering.done(), lanes.in_flight, lanes.free) == (False, 4, -4)
    first.leave(3)
    first.close()
    async with asyncio.timeout(HANG_S):
        await entering
    assert (lanes.in_flight, lanes.free) == (4, 0)


def test_work_that_ends_before_it_entered_gives_back_what_it_had_booked():
    lanes = Lanes(WITHIN)
    booking = lanes.book(8)
    assert (lanes.free, lanes.in_flight) == (24, 0)
    booking.close()
    booking.close()
    assert (lanes.free, lanes.in_flight) == (32, 0)


def test_a_group_larger_than_the_limit_enters_an_empty_engine_rather_than_never():
    lanes = Lanes(Range(lowest=2, highest=2, step=2))
    asyncio.run(asyncio.wait_for(entered(lanes, 8), HANG_S))  # noqa: TID251 cancelled by nobody
    assert (lanes.in_flight, lanes.free) == (8, -6)


@pytest.mark.parametrize(("eval_samples", "limits"), [(1, [8, 32, 64]), (24, [24, 32, 64])])
def test_one_group_and_one_problem_always_fit(
    tmp_path_factory: pytest.TempPathFactory, eval_samples: int, limits: list[int]
):
    folder = tmp_path_factory.mktemp("model")
    (folder / "config.json").write_text("{}")
    table = {
        "run": {"name": "r", "model": str(folder), "group_size": 8},
        "sampling": {"max_prompt_tokens": 100, "max_response_tokens": 300},
        "eval": {"file": "held_out.jsonl", "samples": eval_samples, "temperature": 1.0},
        "generators": {"max_sequences": 64, "device": "cpu"},
    }
    lanes = lanes_of(generator_settings(table))
    found = [lanes.limit]
    for capacity in (12_800, 25_600):
        again = lanes_of(generator_settings(table))
        again.observe(
            EngineLoad(
                num_running=0,
                num_waiting=0,
                used_tokens=0,
                capacity_tokens=capacity,
                num_retractions=0,
            )
        )
        found.append(again.limit)
    assert found == limits
    table["generators"] = {"max_sequences": 64, "device": "cpu", "concurrency": "fixed"}
    assert lanes_of(generator_settings(table)).limit == 64


def test_a_mean_follows_a_number_over_seconds():
    now = [0.0]
    it = MeanCount(lambda: now[0])
    it.add(8)
    assert it.mean == 0.0
    now[0] = 1.0
    assert 2.2 < it.mean < 2.3
    it.add(-8)
    now[0] = 100.0
    assert it.mean < 0.001
    it.add(3)
    now[0] = 200.0
    assert it.mean == pytest.approx(3.0, abs=0.001)


async def test_while_an_environment_answers_others_have_the_lane_and_more_trajectories_are_taken():
    now = [0.0]
    within = Range(lowest=2, highest=4, step=2)
    lanes = Lanes(within, most_outside=3, now=lambda: now[0])
    booking = lanes.book(4)
    await booking.enter()
    assert (lanes.in_flight, lanes.free) == (4, 0)
    async with AsyncExitStack() as stack:
        four = [await stack.enter_async_context(booking.by_call()) for _ in range(4)]
        for one in four:
            async with one.call():
                assert lanes.in_flight == 1
        assert (lanes.in_flight, lanes.free) == (0, 0), "it may have been a moment"
        now[0] = 0.3
        assert lanes.free == 0
        now[0] = 100.0
        assert lanes.free == 3, "as many as may be beyond the lanes"
        other = lanes.book(2)
        await other.enter()
        assert (lanes.in_flight, lanes.free) == (2, 1)
        async with four[0].call(), four[0].call():  # side by side
            assert lanes.in_flight == 4
            waiting = asyncio.create_task(one_call(four[1]))
            await asyncio.sleep(0)
            assert not waiting.done(), "the engine is full"
            other.leave(2)
            async with asyncio.timeout(HANG_S):
                await waiting
        assert lanes.in_flight == 0
    assert lanes.in_flight == 4
    booking.leave(4)
    assert lanes.in_flight == 0
    now[0] = 300.0
    assert lanes.free == 4


@pytest.mark.parametrize("most", [0, 3])
async def test_as_many_trajectories_are_taken_beyond_the_lanes_as_the_setting_says(
    tmp_path: Path, most: int
):
    settings = generator_settings_of(
        tmp_path / "model",
        run={"group_size": 1},
        generators={"concurrency": "fixed", "max_sequences": 50, "device": "cpu"},
        environment={"function": "a.py:A", "max_outside": most},
    )
    lanes = lanes_of(settings)
    booking = lanes.book(50)
    await booking.enter()
    async with AsyncExitStack() as stack:
        for _ in range(50):
            await stack.enter_async_context(booking.by_call())
        await until_async(lambda: lanes._outside.mean > most + 1)
        assert lanes.free == most


async def test_a_call_that_is_cancelled_while_it_waits_for_a_lane_leaves_nothing():
    lanes = Lanes(Range(lowest=1, highest=1, step=1), most_outside=9)
    booking = lanes.book(1)
    await booking.enter()
    async with booking.by_call() as first:
        async with first.call():
            waiting = asyncio.create_task(one_call(first))
            await asyncio.sleep(0)
            waiting.cancel()
            await asyncio.gather(waiting, return_exceptions=True)
            assert lanes.in_flight == 1
        assert lanes.in_flight == 0
    booking.close()
    assert (lanes.in_flight, lanes.free) == (0, 1)


async def one_call(lanes: CallLanes) -> None:
    async with lanes.call():
        pass


async def test_seconds_of_a_trajectory_are_in_the_engine_or_out_of_it_and_changes_are_told():
    now, told = [0.0], []
    lanes = Lanes(Range(lowest=1, highest=1, step=1), most_outside=9, now=lambda: now[0])
    booking = lanes.book(1)
    await booking.enter()
    changed = lambda: told.append((lanes.calling, lanes.acting))  # noqa: E731
    async with booking.by_call(changed) as one:
        now[0] = 1.0  # its environment begins
        assert told == [(0, 1)]
        async with one.call():
            now[0] = 3.0
        now[0] = 7.0
        assert one.seconds() == (2.0, 5.0)
        async with one.call():
            now[0] = 8.0
            assert one.seconds() == (3.0, 5.0)
        assert one.seconds() == (3.0, 5.0)
    booking.close()
    assert told == [*[(0, 1), (0, 0), (1, 0), (0, 0)] * 2, (0, 1), (0, 0)]
