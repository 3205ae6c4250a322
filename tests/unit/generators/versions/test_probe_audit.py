"""Verdicts of the audit, with an engine that answers what a test has it compute."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress

import pytest

from slipstream.generators.engine import Scores
from slipstream.generators.versions.probe_audit import ProbeAudit
from slipstream.generators.versions.probe_noise import Noise
from slipstream.wire.errors import EngineError, QuarantineError
from slipstream.wire.messages.probe import ProbeLogprobs
from slipstream.wire.messages.versions import PolicyVersion
from tests.support.waiting import HANG_S, until_async


def probe(value: float) -> ProbeLogprobs:
    """A probe whose tokens no other one has."""
    token = round(-1000 * value)
    sequences = ((1, 2, token, 4), (5, 6, token, 8))
    return ProbeLogprobs(
        sequences=sequences, logprobs=((value, value), (value, value)), num_context=2
    )


def version(step: int) -> PolicyVersion:
    return PolicyVersion(1, step)


class Scoring:
    """Answers each request with the next of what it was given, once it may."""

    def __init__(self) -> None:
        self.answers: asyncio.Queue[Scores | str] = asyncio.Queue()
        self.asked: list[int] = []  # the first token that each request had scored

    def computes(self, value: float, step: int | None, *, cached: int = 0) -> None:
        label = None if step is None else version(step)
        self.answers.put_nowait(Scores(label, [[value, value], [value, value]], cached))

    def fails(self) -> None:
        self.answers.put_nowait("no answer")

    async def score(self, sequences: Sequence[Sequence[int]], *, num_context: int) -> Scores:
        assert (len(sequences), num_context) == (2, 2)
        self.asked.append(sequences[0][num_context])
        answer = await self.answers.get()
        if isinstance(answer, str):
            raise EngineError(answer)
        return answer


class Audited:
    def __init__(self) -> None:
        self.engine = Scoring()
        self.audit = ProbeAudit(self.engine, Noise("float32"))
        self.job = asyncio.create_task(self.audit.run())

    async def proven(self, step: int) -> None:
        await self.audit.until_proven(version(step))

    async def waits(self, step: int) -> bool:
        """True if answers of a version are not sent now."""
        waiting = asyncio.create_task(self.proven(step))
        for _ in range(5):
            await asyncio.sleep(0)
        is_waiting = not waiting.done()
        waiting.cancel()
        return is_waiting

    async def verdict(self) -> str:
        with pytest.raises(QuarantineError) as caught:
            await self.job
        return str(caught.value)


@asynccontextmanager
async def audited() -> AsyncIterator[Audited]:
    async with asyncio.timeout(HANG_S):
        it = Audited()
        try:
            yield it
        finally:
            it.job.cancel()
            with suppress(asyncio.CancelledError, QuarantineError):
                await it.job


async def test_answers_wait_for_the_verdict_on_their_version():
    async with audited() as it:
        assert await it.waits(0)
        it.audit.adopted(version(0), probe(-1.0))
        assert await it.waits(0)
        it.engine.computes(-1.0, 0)
        await it.proven(0)
        it.audit.adopted(version(1), probe(-2.0))
        assert not await it.waits(0)
        assert await it.waits(1)
        it.engine.computes(-2.000001, 1)
        await it.proven(1)
        assert it.audit.counters == {"probes": 2, "unproven": 0}
        assert it.audit.gauges["probe_difference"] == pytest.approx(1e-6, rel=0.01)
        assert it.audit.gauges["probe_bound"] < 1e-4


async def test_an_engine_that_computes_something_else_is_quarantined_and_its_answers_never_sent():
    async with audited() as it:
        it.audit.adopted(version(0), probe(-1.0), ["tcp://10.0.0.7:5600"])
        it.engine.computes(-1.25, 0)
        why = await it.verdict()
        assert why == (
            "the engine does not compute v1.0: its logprobs of the probe differ by 0.25 nats "
            "on average, 0.25 at worst, of noise 0.02 nats on average, 0.32 at worst; parts of its "
            "weights came from tcp://10.0.0.7:5600"
        )
        assert await it.waits(0)


async def test_a_prefix_from_before_is_a_fault_and_one_of_the_same_version_is_none():
    async with audited() as it:
        it.audit.adopted(version(0), probe(-1.0))
        it.engine.fails()  # what was computed meanwhile is not known
        it.engine.computes(-1.0, 0, cached=2)
        await it.proven(0)
        it.audit.pausing()
        it.audit.adopted(version(1), probe(-1.0))
        it.audit.resumed()
        it.engine.computes(-1.0, 1, cached=2)
        assert "its prefix cache held 2 tokens of the probe from before" in await it.verdict()


async def test_no_verdict_comes_of_another_versions_probe():
    """A pause has requests computed again, under the version that follows."""

    async with audited() as it:
        it.audit.adopted(version(0), probe(-1.0))
        await until_async(lambda: len(it.engine.asked) == 1, "it was not asked")
        it.audit.pausing()
        it.audit.adopted(version(1), probe(-2.0))
        it.audit.resumed()
        it.engine.computes(-7.0, 1)  # right, of the tokens of v1.0
        it.engine.computes(-2.0, 1, cached=2)  # its own, of the first try
        await it.proven(1)
        assert it.audit.counters == {"probes": 1, "unproven": 1}
        assert it.engine.asked == [1000, 2000]


async def test_a_probe_that_meets_a_change_of_versions_is_asked_again():
    async with audited() as it:
        it.audit.adopted(version(3), probe(-1.0))
        it.engine.computes(-1.0, None)
        it.engine.computes(-1.0, 2)
        it.engine.computes(-1.0, 3)
        await it.proven(3)
        assert len(it.engine.asked) == 3


async def test_an_engine_that_never_answers_for_its_version_is_quarantined():
    async with audited() as it:
        it.audit.adopted(version(3), probe(-1.0))
        for _ in range(3):
            it.engine.computes(-1.0, 2)
        why = "it was asked 3 times for a probe: the engine computed it under v1.2"
        assert why in await it.verdict()


async def test_a_proven_version_that_is_adopted_again_is_proven_again():
    """As after an Adopt whose outcome came too late: the relay repairs the engine."""

    async with audited() as it:
        for num_probes in (1, 2):
            it.audit.adopted(version(0), probe(-1.0))
            it.engine.computes(-1.0, 0)
            await until_async(lambda: it.audit.counters["probes"] == num_probes)  # noqa: B023
        assert not await it.waits(0)
        it.audit.adopted(version(0), probe(-1.0))
        it.engine.computes(-1.25, 0)
        assert "differ by 0.25 nats" in await it.verdict()


async def test_versions_without_a_probe_are_passed():
    async with audited() as it:
        it.audit.adopted(version(0), None)
        assert not await it.waits(0)
        it.audit.adopted(version(1), probe(-1.0))
        assert await it.waits(1)
        it.audit.adopted(version(2), None)
        assert not await it.waits(1)
        assert it.audit.counters == {"probes": 0, "unproven": 1}
