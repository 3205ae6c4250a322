"""Answers of a version that is not proven yet are not sent; of one that is disproven, never."""

import asyncio
from pathlib import Path

import pytest

from slipstream.generators.service import _work
from slipstream.generators.versions.probe_audit import ProbeAudit
from slipstream.generators.versions.probe_noise import Noise
from slipstream.wire.errors import QuarantineError
from slipstream.wire.messages.broker import (
    EngineQuarantined,
    Goodbye,
    GroupsLeased,
    LeaseGroups,
    SubmitTrajectory,
)
from tests.support.waiting import until_async
from tests.unit.generators.versions.test_probe_audit import Scoring, probe
from tests.unit.generators.working import ledger_of, working


def audit_of(engine: Scoring) -> ProbeAudit:
    return ProbeAudit(engine, Noise("float32"))


async def test_finished_answers_wait_for_the_verdict_with_their_lanes(tmp_path: Path):
    scoring = Scoring()
    audit = audit_of(scoring)
    async with working(tmp_path, ledger_of(2, 2), max_sequences=2, audit=audit) as it:
        version = it.broker.ledger.book.version
        audit.adopted(version, probe(-1.0))
        auditing = asyncio.create_task(audit.run())
        await it.until_held((0, 0), (0, 1))
        it.engine.let((0, 0), (0, 1))
        await it.until_held()
        await it.until_asked_again()
        assert it.client.asked(SubmitTrajectory) == []
        assert it.client.granted == 2, "more was leased while answers wait"
        scoring.computes(-1.0, version.step)
        await it.until_held((1, 0), (1, 1))
        it.engine.let_all()
        await until_async(lambda: len(it.client.asked(SubmitTrajectory)) == 4, "they were not sent")
        auditing.cancel()


async def test_a_quarantined_generator_sends_nothing_and_gives_its_work_back(tmp_path: Path):
    scoring = Scoring()
    audit = audit_of(scoring)
    async with working(tmp_path, ledger_of(1, 2), max_sequences=2, audit=audit) as it:
        version = it.broker.ledger.book.version
        audit.adopted(version, probe(-1.0))
        await it.until_held((0, 0), (0, 1))
        it.engine.let((0, 0))
        await it.until_held((0, 1))
        scoring.computes(-1.5, version.step)
        stopping: asyncio.Task[object] = asyncio.create_task(asyncio.Event().wait())
        with pytest.raises(QuarantineError, match=r"differ by 0\.5 nats"):
            await _work(it.worker, (it.job, audit.run()), stopping)
        stopping.cancel()
        assert it.client.asked(SubmitTrajectory) == []
        (found,) = it.client.asked(EngineQuarantined)
        assert (found.version, "0.5 nats" in found.reason) == (version, True)
        assert isinstance(it.client.requests[-1], Goodbye)
        assert it.last_report().counters["probes"] == 1
        book = it.broker.ledger.book
        assert [len(held) for held in book.by_holder.values() if held] == []
        assert it.broker.status.quarantines == 1
        # What was leased is granted to another at once, and no attempt was counted.
        other = await it.broker.client("generator", "generator-1")
        leased, _ = await other.ask(
            LeaseGroups(adopted=version, max_sequences=2, wait_s=0.0), GroupsLeased
        )
        assert [group.siblings for group in leased.groups] == [(0, 1)]
