"""The learner's rank 0 against the broker's loop, over a real socket."""

import asyncio
import threading
from pathlib import Path

import pytest

from slipstream.learner.batches.broker_link import LeaderLink
from slipstream.learner.batches.orders import Rejection, StepPlan
from slipstream.learner.config import LearnerSettings, learner_settings
from slipstream.learner.publish.relay_process import RelayLaunch
from slipstream.wire.messages.broker import (
    BatchNotReady,
    Done,
    GroupsLeased,
    LeaseGroups,
    LeaseScoring,
    RunComplete,
    ScoringLeased,
    SubmitScores,
)
from slipstream.wire.messages.trajectory import Score
from slipstream.wire.messages.versions import PolicyVersion
from slipstream.wire.process.background import BackgroundLoop
from slipstream.wire.process.phases import PhaseClock
from tests.support.blank_model import write_blank_model
from tests.support.ledger_driver import eval_plan, make_ledger, make_rules
from tests.support.running_broker import Running, running, submit
from tests.support.waiting import HANG_S, NEVER_S

pytestmark = pytest.mark.integration


def settings_in(folder: Path, *, steps: int) -> LearnerSettings:
    write_blank_model(folder / "model", hidden=16, layers=1)
    run = {"model": str(folder / "model"), "socket_dir": str(folder), "steps": steps}
    return learner_settings({"run": run})


async def generate_for_ever(it: Running) -> None:
    """Answer every prompt with the policy that the run began with, and reward the answers."""
    generator = await it.client("generator", "generator-0")
    worker = await it.client("reward_worker", "reward-worker-0")
    adopted = PolicyVersion(1, 0)
    while True:
        request = LeaseGroups(adopted=adopted, max_sequences=8, wait_s=0.05)
        leased, _ = await generator.ask(request, GroupsLeased)
        for group in leased.groups:
            for sibling in group.siblings:
                await submit(generator, group.group_id, sibling)
        scoring, _ = await worker.ask(LeaseScoring(credits=8, wait_s=0.05), ScoringLeased)
        scores = tuple(
            Score(
                group_id=item.group_id,
                sibling=item.sibling,
                lease_id=item.lease_id,
                reward=float(item.sibling),
            )
            for item in scoring.items
        )
        await worker.ask(SubmitScores(scores=scores), Done)


async def test_a_stop_that_was_planned_while_the_learner_waits_reaches_it_at_once(tmp_path: Path):
    settings = settings_in(tmp_path, steps=9)
    ledger = make_ledger(make_rules(total_steps=9, plan=eval_plan(1)))

    def learner(took_over: asyncio.Event, broker: asyncio.AbstractEventLoop) -> list[BatchNotReady]:
        with BackgroundLoop() as loop:
            link = LeaderLink(loop, settings, PhaseClock(), lambda: False, relay=RelayLaunch())
            version = link.take_over(0, "", None)
            broker.call_soon_threadsafe(took_over.set)
            first = link.next_order(version, max_wait_s=NEVER_S)
            second = link.next_order(version, max_wait_s=0.0)
            link.close()
        assert isinstance(first, BatchNotReady)
        assert isinstance(second, BatchNotReady)
        return [first, second]

    async with running(tmp_path, ledger) as it:
        took_over = asyncio.Event()
        broker = asyncio.get_running_loop()
        learning = asyncio.create_task(asyncio.to_thread(learner, took_over, broker))
        await took_over.wait()
        it.server.plan_stop("enough")
        answers = await asyncio.wait_for(learning, HANG_S)  # noqa: TID251 cancelled by nobody
        assert [answer.last_step for answer in answers] == [0, 0]


def groups_of(order: object) -> list[int]:
    assert isinstance(order, StepPlan), order
    return [group.group_id for group in order.batch.groups]


async def test_batches_are_prefetched_rejected_and_sealed_at_the_broker(tmp_path: Path):
    settings = settings_in(tmp_path, steps=3)
    ledger = make_ledger(make_rules(groups_per_step=1, total_steps=3, max_staleness_steps=2))

    def learner(is_bound: threading.Event) -> None:
        with BackgroundLoop() as loop:
            link = LeaderLink(loop, settings, PhaseClock(), lambda: False, relay=RelayLaunch())
            version = link.take_over(0, "", None)
            first = link.next_order(version, max_wait_s=HANG_S)
            assert isinstance(first, StepPlan)
            assert len(link.fetch(0, first.keys(0))) == 2
            link.begin_prefetch(1)
            assert is_bound.wait(HANG_S), "the next batch was not asked for"
            version = version.next()
            link.commit(version, {}, 8)

            second = link.next_order(version, max_wait_s=HANG_S)
            link.reject_batch(version, Rejection("nonfinite", tuple(groups_of(second)), "why not"))
            instead = link.next_order(version, max_wait_s=HANG_S)
            assert set(groups_of(instead)).isdisjoint(groups_of(first) + groups_of(second))
            assert isinstance(instead, StepPlan)
            assert groups_of(link.next_order(version, max_wait_s=0.0)) == groups_of(instead)
            payloads = link.fetch(1, instead.keys(0))
            assert sorted(bytes(payload) for payload in payloads) == [b"payload 0", b"payload 1"]
            link.begin_prefetch(2)
            version = version.next()
            link.commit(version, {}, 8)
            link.seal(version, step=2, oldest_kept=2)

            third = link.next_order(version, max_wait_s=HANG_S)
            assert isinstance(third, StepPlan)
            link.fetch(2, third.keys(0))
            link.begin_prefetch(3)
            version = version.next()
            link.commit(version, {}, 8)
            assert isinstance(link.next_order(version, max_wait_s=HANG_S), RunComplete)
            link.close()

    async with running(tmp_path, ledger) as it:
        is_bound = threading.Event()
        learning = asyncio.create_task(asyncio.to_thread(learner, is_bound))
        generating = asyncio.create_task(generate_for_ever(it))
        while not learning.done():
            if 1 in ledger.book.state.batches:
                is_bound.set()
            await asyncio.sleep(0.01)
        generating.cancel()
        await learning
        status = it.status
        assert (status.steps, status.unaccounted) == (3, 0)
        assert status.dropped == {"nonfinite": 1}
