"""How many answers a worker lets be under way, and what it gives back, at a real broker."""

from pathlib import Path

import pytest

from slipstream.generators.lanes.concurrency import Range
from slipstream.generators.lanes.lanes import Lanes
from slipstream.wire.messages.broker import (
    GroupsLeased,
    Heartbeat,
    LeaseGroups,
    ReleaseLease,
    SubmitTrajectory,
)
from slipstream.wire.messages.versions import PolicyVersion
from tests.support.waiting import HANG_S, until_async
from tests.unit.generators.working import Answered, HeldRewards, ledger_of, working


def group(position: int, num_siblings: int) -> list[Answered]:
    return [(position, sibling) for sibling in range(num_siblings)]


async def test_no_more_answers_are_under_way_than_there_are_lanes(tmp_path: Path):
    async with working(tmp_path, ledger_of(8, 2), max_sequences=4) as it:
        await it.until_held(*group(0, 2), *group(1, 2))
        await it.until_asked_again()
        assert it.client.granted == 4, "the broker would have granted all eight groups"
        it.engine.let_all()
        await until_async(lambda: len(it.engine.begun) == 16, "not every group was answered")
        await until_async(lambda: not it.broker.ledger.book.leases)
        assert it.engine.most == 4
        assert max(it.rooms()) == 4
        assert min(it.rooms()) > 0, "a question for nothing"


async def test_a_lane_comes_back_with_each_answer_and_a_group_begins_when_all_of_it_has_one(
    tmp_path: Path,
):
    async with working(tmp_path, ledger_of(2, 4), max_sequences=5) as it:
        await it.until_held(*group(0, 4))
        for sibling in (2, 0):
            it.engine.let((0, sibling))
            await it.until_asked_again()
        await it.until_held((0, 1), (0, 3))
        it.engine.let((0, 3))
        await it.until_held((0, 1), *group(1, 4))
        assert it.engine.most == 5
        assert it.rooms()[:2] == [5, 1]
        assert 4 in it.rooms()


async def test_the_lanes_of_a_group_that_is_sampled_together_come_back_together(tmp_path: Path):
    ledger = ledger_of(3, 2)
    async with working(tmp_path, ledger, max_sequences=4, siblings_together=True) as it:
        await it.until_held(*group(0, 2), *group(1, 2))
        it.engine.let((1, 0))
        await it.until_held(*group(0, 2), *group(2, 2))
        assert it.engine.most == 4


async def test_an_answer_that_is_being_scored_takes_no_lane(tmp_path: Path):
    rewards = HeldRewards()
    async with working(tmp_path, ledger_of(2, 2), max_sequences=2, rewards=rewards) as it:
        await it.until_held(*group(0, 2))
        it.engine.let(*group(0, 2))
        await it.until_held(*group(1, 2))
        assert len(it.broker.ledger.book.leases) == 2, "the first group is not scored yet"


async def test_a_group_whose_last_answer_is_on_its_way_is_held_no_more(tmp_path: Path):
    """Its lease ends when that comes: later heartbeats that name it report it lost."""

    async with working(tmp_path, ledger_of(2, 2), max_sequences=4) as it:
        await it.until_held(*group(0, 2), *group(1, 2))
        it.client.may_submit.clear()
        it.engine.let((0, 0))
        await until_async(lambda: len(it.client.asked(SubmitTrajectory)) == 1)
        await it.until_asked_again()
        both = set(it.broker.ledger.book.leases)
        assert set(it.client.asked(Heartbeat)[-1].lease_ids) == both
        it.engine.let((0, 1))
        await until_async(lambda: len(it.client.asked(SubmitTrajectory)) == 2)
        await it.until_asked_again()
        (left,) = it.client.asked(Heartbeat)[-1].lease_ids
        assert left in both
        it.client.may_submit.set()
        it.engine.let_all()
        await until_async(lambda: not it.broker.ledger.book.leases)
        assert it.engine.cancelled == []


async def test_a_group_that_the_engine_fails_at_is_handed_back_with_the_reason_and_done_again(
    tmp_path: Path,
):
    async with working(tmp_path, ledger_of(2, 2), max_sequences=4) as it:
        await it.until_held(*group(0, 2), *group(1, 2))
        (lease_id,) = (
            one.lease_id for one in it.broker.ledger.book.leases.values() if one.group_id == 0
        )
        it.engine.fail((0, 1), "out of memory" + 300 * "!")
        await until_async(lambda: len(it.engine.begun) == 6, "it was not begun again")
        assert it.engine.cancelled == [(0, 0)], "its sibling alone is given up"
        assert it.client.asked(ReleaseLease) == [
            ReleaseLease(lease_id=lease_id, reason=("out of memory" + 300 * "!")[:200])
        ]
        await it.until_held(*group(0, 2), *group(1, 2))
        await it.until_asked_again()
        assert it.engine.most == 4
        assert it.last_report().counters["failed"] == 1
        ended = it.broker.ledger.book.state.ended_leases
        assert {reason: count for reason, count in ended.items() if count} == {"failed": 1}
        it.engine.let_all()
        await until_async(lambda: it.last_report().counters["trajectories"] == 4)
        assert not it.broker.ledger.book.leases


async def test_a_group_that_the_engine_always_fails_at_is_given_up_by_the_broker(tmp_path: Path):
    async with working(tmp_path, ledger_of(1, 2, max_attempts=2), max_sequences=2) as it:
        for attempt in (1, 2):
            begun = attempt * 2
            await until_async(lambda begun=begun: len(it.engine.begun) == begun)
            it.engine.fail((0, 0), "no memory at all")
        await until_async(lambda: len(it.broker.ledger.book.state.dead_letters) == 1)
        await it.until_held(*group(1, 2))
        assert len(it.engine.begun) == 6, "another prompt took its place"


async def test_work_on_a_lease_that_lapsed_is_given_up_and_its_lanes_come_back(tmp_path: Path):
    async with working(tmp_path, ledger_of(2, 2), max_sequences=4) as it:
        await it.until_held(*group(0, 2), *group(1, 2))
        it.broker.ledger.release(it.broker.ledger.book.leases[0].holder, 0, "lapsed")
        await until_async(lambda: len(it.engine.begun) == 6, "the lanes did not come back")
        assert set(it.engine.cancelled) == set(group(0, 2)), "the other group continues"
        await it.until_held(*group(0, 2), *group(1, 2))
        assert it.engine.most == 4
        assert it.client.asked(ReleaseLease) == [], "there is nothing to give back"


async def test_a_worker_that_is_asked_to_end_gives_up_what_it_is_at_and_hands_every_lease_back(
    tmp_path: Path,
):
    async with working(tmp_path, ledger_of(2, 2), max_sequences=4) as it:
        await it.until_held(*group(0, 2), *group(1, 2))
        it.engine.let((0, 0))
        await until_async(lambda: it.last_report().counters["trajectories"] == 1)
        await it.end()
        assert it.engine.held == {}
        assert len(it.broker.ledger.book.leases) == 2, "nothing was handed back yet"
        await it.worker.hand_back()
        assert it.broker.ledger.book.leases == {}
        other = await it.broker.client("generator", "generator-1")
        work = LeaseGroups(adopted=PolicyVersion(1, 0), max_sequences=8, wait_s=HANG_S)
        missing = set()
        for _ in range(2):  # a half each time: there are two generators
            answer, _ = await other.ask(work, GroupsLeased)
            missing |= {(one.position, one.siblings) for one in answer.groups}
        assert missing == {(0, (1,)), (1, (0, 1))}, "what was answered is kept"


def lanes_that_follow_the_cache(longest_tokens: int) -> Lanes:
    return Lanes(Range(lowest=2, highest=8, step=2), longest_tokens=longest_tokens)


async def test_an_engine_whose_cache_stays_empty_is_given_all_that_there_may_be(tmp_path: Path):
    lanes = lanes_that_follow_the_cache(longest_tokens=1 << 20)
    async with working(tmp_path, ledger_of(8, 2), lanes=lanes) as it:
        await it.engine.pause()
        it.engine.let_all()
        await it.until_held(*(one for position in range(4) for one in group(position, 2)))
        await it.until_asked_again()
        assert it.client.granted == lanes.limit == 8
        assert it.rooms()[0] == 2, "it begins with what fits however long it becomes"


async def test_an_engine_is_given_no_more_than_its_cache_holds(tmp_path: Path):
    lanes = lanes_that_follow_the_cache(longest_tokens=1 << 20)
    async with working(tmp_path, ledger_of(8, 2), lanes=lanes, cached_tokens=100) as it:
        await it.engine.pause()  # each answer stops with twelve tokens in the cache
        it.engine.let_all()
        await until_async(lambda: lanes.in_flight == 6, "0.48 of it is in use by four")
        await it.until_asked_again()
        assert (it.client.granted, lanes.in_flight, lanes.limit) == (6, 6, 6), "0.72 by six"
        await it.engine.resume()
        await until_async(lambda: len(it.engine.begun) == 16)


async def test_the_lanes_stay_as_they_are_while_the_engine_is_paused_for_weights(tmp_path: Path):
    lanes = lanes_that_follow_the_cache(longest_tokens=1 << 20)
    async with working(tmp_path, ledger_of(8, 2), lanes=lanes) as it:
        it.worker.pausing()
        await it.engine.pause()
        it.engine.let_all()
        await it.until_held(*group(0, 2))
        await it.until_asked_again()
        assert (lanes.limit, it.client.granted) == (2, 2)
        it.worker.adopted(it.broker.ledger.book.version)
        await until_async(lambda: lanes.limit == 8)


async def test_engine_without_load_reports_keeps_its_lanes(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    lanes = lanes_that_follow_the_cache(longest_tokens=1 << 20)
    async with working(tmp_path, ledger_of(8, 2), lanes=lanes) as it:
        it.engine.is_silent = True
        await it.engine.pause()
        it.engine.let_all()
        await it.until_held(*group(0, 2))
        await it.until_asked_again()
        assert (lanes.limit, it.client.granted) == (2, 2)
        it.engine.is_silent = False
        await until_async(lambda: lanes.limit == 8)
    warnings = [one for one in caplog.messages if "no answer to /v1/loads" in one]
    assert len(warnings) == 1, "once, not at every poll"
