"""What a worker reports of itself, and what the broker, the page and its advice make of it."""

import asyncio
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from typing_extensions import override

from slipstream.broker.history.rates import RunRates
from slipstream.broker.images import LocalImages
from slipstream.generators.environments.host import EnvironmentFailedError, EnvironmentLostError
from slipstream.generators.environments.turn_sampler import Differences, TurnSampler
from slipstream.generators.lanes.lanes import CallLanes
from slipstream.generators.rollout import Submission
from slipstream.generators.turns.calls import RecordedReply
from slipstream.wire.messages.broker import LeasedGroup, LeaseGroups, ReleaseLease, RoleReport
from slipstream.wire.process.phases import ACT, WAIT
from tests.support.waiting import until_async
from tests.unit.generators.working import PARAMS, HeldRewards, Working, ledger_of, working


async def until_reported(it: Working, name: str, value: float) -> None:
    await until_async(
        lambda: it.client.asked(RoleReport) and it.last_report().counters[name] == value,
        lambda: f"{name} is {it.last_report().counters[name]}, not {value}",
    )


async def test_a_worker_reports_again_and_again_while_its_answers_are_in_the_making(tmp_path: Path):
    async with working(tmp_path, ledger_of(1, 2), max_sequences=2) as it:
        await it.until_held((0, 0), (0, 1))
        before = len(it.client.asked(RoleReport))
        await until_async(lambda: len(it.client.asked(RoleReport)) >= before + 3)
        (status,) = (one for one in it.broker.status.roles if one.name == "generator-0")
        assert status.adopted == it.broker.ledger.book.version
        assert status.leases == 1


async def test_what_was_answered_is_counted_in_tokens_and_trajectories(tmp_path: Path):
    async with working(tmp_path, ledger_of(2, 3), max_sequences=6) as it:
        it.engine.let_all()
        await until_reported(it, "trajectories", 6)
        counters = it.last_report().counters
        assert counters["tokens"] == it.engine.num_chosen > 6
        none = ("retracted", "refused", "failed", "rejected", "unavailable", "decision_bytes")
        assert [counters[name] for name in none] == [0.0] * 6


async def test_the_size_of_kept_tokens_is_reported_for_each_token(tmp_path: Path):
    params = replace(PARAMS, max_kept=3)  # of a vocabulary of 40: a byte each
    async with working(tmp_path, ledger_of(1, 2), params=params, max_sequences=2) as it:
        it.engine.let_all()
        await until_reported(it, "trajectories", 2)
        await until_reported(it, "decision_bytes", it.engine.num_chosen * (1 + 3))
        (status,) = (one for one in it.broker.status.roles if one.name == "generator-0")
        assert status.decision_bytes_per_token == 4.0


async def test_answers_thrown_out_of_the_cache_reach_the_series_that_the_advice_reads(
    tmp_path: Path,
):
    ledger = ledger_of(2, 3)
    async with working(tmp_path, ledger, max_sequences=6, cached_tokens=60) as it:
        await it.until_held(*((group, sibling) for group in range(2) for sibling in range(3)))
        it.engine.let_all()  # six answers of four and sixteen tokens are twice the cache
        await until_reported(it, "trajectories", 6)
        thrown_out = (await it.engine.load()).num_retractions
        assert thrown_out > 0
        await until_reported(it, "retracted", thrown_out)
        await until_async(lambda: answered_and_thrown_out(it) == (6, thrown_out))


def answered_and_thrown_out(it: Working) -> tuple[float | None, float | None]:
    """Return what the broker's state, which it renews now and then, makes of the reports."""
    sample = RunRates().take(it.broker.status)
    return sample["answers"], sample["retracted"]


async def test_cache_use_and_lanes_are_reported_as_of_now(tmp_path: Path):
    async with working(tmp_path, ledger_of(1, 2), max_sequences=8, cached_tokens=96) as it:
        await it.until_held((0, 0), (0, 1))
        await it.engine.pause()
        it.engine.let_all()  # each has its prompt of four and its first eight tokens there

        def shown() -> list[tuple[int | None, int | None, float | None]]:
            roles = (one for one in it.broker.status.roles if one.name == "generator-0")
            return [(one.sequences, one.sequence_limit, one.kv_use) for one in roles]

        await until_async(lambda: shown() == [(2, 8, 24 / 96)])
        await it.engine.resume()
        await until_async(
            lambda: [it.last_report().gauges[name] for name in ("kv_use", "sequences")] == [0, 0]
        )


async def test_answers_without_a_reward_are_counted_and_not_those_with_one(tmp_path: Path):
    rewards = HeldRewards(unavailable=[0])
    rewards.may_end.set()
    async with working(tmp_path, ledger_of(2, 3), max_sequences=6, rewards=rewards) as it:
        it.engine.let_all()
        await until_reported(it, "trajectories", 6)
        assert it.last_report().counters["unavailable"] == 2


async def test_answer_refused_by_the_broker_is_counted_and_work_continues(tmp_path: Path):
    async with working(tmp_path, ledger_of(2, 2), max_sequences=2) as it:
        await it.until_held((0, 0), (0, 1))
        del it.broker.ledger.book.groups[0].lessees[0]  # as if it had never been granted
        it.engine.let_all()
        await until_reported(it, "refused", 2)
        await until_async(lambda: len(it.engine.begun) >= 4, "the next group is not begun")


async def test_time_is_split_by_what_the_engine_does(tmp_path: Path):
    async with working(tmp_path, ledger_of(1, 2), max_sequences=2) as it:

        def phases() -> set[str]:
            return set(it.last_report().phase_seconds)

        await it.until_held((0, 0), (0, 1))
        await until_async(lambda: "generate" in phases())
        assert "adopt" not in phases()
        it.worker.pausing()
        await until_async(lambda: "adopt" in phases())
        it.worker.adopted(it.broker.ledger.book.version)
        it.engine.let_all()
        await until_async(lambda: it.last_report().counters["trajectories"] == 2)
        before = it.last_report().phase_seconds
        await until_async(lambda: it.last_report().phase_seconds[WAIT] > before[WAIT])
        assert phases() == {"generate", "adopt", WAIT}


class Uncounted(TurnSampler):
    """A sampler that counts nothing."""

    @property
    @override
    def counters(self) -> dict[str, float]:
        return {}


class TwoCalls(Uncounted):
    """Calls the engine twice; in between it waits for ``answers``."""

    def __init__(self) -> None:
        self.differences = Differences()
        self.calling, self.answers = asyncio.Event(), asyncio.Event()
        self.end_call = asyncio.Event()

    @override
    async def run(
        self,
        group: LeasedGroup,
        sibling: int,
        lanes: CallLanes,
        on_reply: Callable[[RecordedReply], None] | None = None,
        images: LocalImages | None = None,
    ) -> Submission:
        async with lanes.call():
            self.calling.set()
            await self.end_call.wait()
        await self.answers.wait()
        async with lanes.call():
            raise EnvironmentFailedError("the world ended")


class Ends(Uncounted):
    """Each sibling of a group ends in an error of its own; the next group's do."""

    def __init__(self, *errors: EnvironmentFailedError) -> None:
        self.errors = list(errors)
        self.differences = Differences()

    @override
    async def run(
        self,
        group: LeasedGroup,
        sibling: int,
        lanes: CallLanes,
        on_reply: Callable[[RecordedReply], None] | None = None,
        images: LocalImages | None = None,
    ) -> Submission:
        async with lanes.call():
            if self.errors:
                raise self.errors.pop(0)
            await asyncio.Event().wait()
            raise AssertionError


async def test_a_group_whose_server_was_lost_begins_anew_without_an_attempt(tmp_path: Path):
    """It was a dead letter after three losses."""
    lost, failed = EnvironmentLostError("silent"), EnvironmentFailedError("it raised")
    agent = Ends(*[lost] * 10, lost, failed)
    async with working(tmp_path, ledger_of(1, 2), max_sequences=2, turn_sampler=agent) as it:
        ended = it.broker.ledger.book.state.ended_leases
        await until_async(lambda: ended["failed"] > 0)
        released = it.client.asked(ReleaseLease)
        assert [one.is_stranded for one in released] == [True] * 5 + [False]
        (group,) = it.broker.ledger.book.groups.values()
        assert (group.attempts, [one.reason for one in group.failures]) == (
            1,
            ["its lease of generation failed: it raised"],
        )
        assert dict(ended) == {"stranded": 5, "failed": 1}


async def test_time_that_is_up_to_environments_alone_is_told_from_the_engines(tmp_path: Path):
    agent = TwoCalls()
    async with working(tmp_path, ledger_of(1, 2), max_sequences=2, turn_sampler=agent) as it:

        def grows(phase: str) -> Callable[[], bool]:
            before = it.last_report().phase_seconds.get(phase, 0.0)
            return lambda: it.last_report().phase_seconds.get(phase, 0.0) > before

        await agent.calling.wait()
        await until_async(grows("generate"))
        before = it.last_report().phase_seconds.get(ACT, 0.0)
        await until_async(grows("generate"))
        assert it.last_report().phase_seconds.get(ACT, 0.0) == before
        agent.end_call.set()
        await until_async(grows(ACT))
        await until_async(lambda: it.last_report().gauges["acting"] == 2)
        await until_async(grows(ACT))
        (status,) = (one for one in it.broker.status.roles if one.name == "generator-0")
        assert status.acting is not None
        sample = RunRates().take(it.broker.status)
        assert sample["acting"] == 2
        assert 0.0 < (sample["acted:generator-0"] or 0.0) < 1.0
        agent.answers.set()
        await until_async(lambda: it.last_report().counters["environment_failed"] >= 2)
        counters = it.last_report().counters
        assert counters["environment_s"] > 0.0
        assert counters["engine_s"] > 0.0


async def test_a_worker_beside_an_engine_that_hangs_makes_no_progress_though_the_broker_answers(
    tmp_path: Path,
):
    async with working(tmp_path, ledger_of(1, 2), max_sequences=4) as it:
        await it.until_held((0, 0), (0, 1))
        await it.until_asked_again()
        seen, asked = it.worker.signs(), len(it.client.asked(LeaseGroups))
        await until_async(lambda: len(it.client.asked(LeaseGroups)) >= asked + 2)
        assert it.worker.signs() == seen
        it.engine.let((0, 0))
        await until_async(lambda: it.worker.signs() != seen, "no progress with an answer")
        it.engine.let_all()
        await until_async(lambda: it.last_report().counters["trajectories"] == 2)
        idle = it.worker.signs()
        await until_async(lambda: it.worker.signs() != idle, "no progress without work")


def test_a_rewritten_history_is_forgotten_once_none_has_been_for_a_hundred_trajectories():
    differences = Differences()
    assert differences.newest == ""
    differences.extend(["after 'a'", "after 'b'", *[""] * 99])
    assert differences.newest == "after 'b'"
    differences.append("")
    assert differences.newest == ""
