"""The broker's loop over a real socket in a private folder, with the store in memory."""

import asyncio
import re
from collections.abc import Sequence
from pathlib import Path

import msgspec
import pytest
from msgspec.structs import replace
from typing_extensions import override

from slipstream.broker.client import BrokerClient
from slipstream.broker.ledger.events import TakenOver, Trained, decode_event
from slipstream.broker.ledger.groups import Group
from slipstream.broker.ledger.state import decode_state
from slipstream.broker.report.run_records import Frames, RunRecords
from slipstream.broker.server.loop import MAX_WAIT_S, may_wait_s
from slipstream.wire.errors import RefusedError
from slipstream.wire.messages import broker
from slipstream.wire.messages.codec import encode
from slipstream.wire.messages.trajectory import Prompt, Score, transcript_of
from slipstream.wire.messages.versions import PolicyVersion
from slipstream.wire.messages.weightbus import RelayAddress
from tests.support.ledger_driver import header, make_ledger, make_rules
from tests.support.running_broker import (
    BATCH,
    SCORING,
    V0,
    WORK,
    WORK_NOW,
    Running,
    bare_socket,
    running,
    submit,
)
from tests.support.waiting import HANG_S, until_async
from tests.support.wire_samples import RECORD


async def test_a_run_of_one_step_goes_through_every_role(it: Running):
    learner, generator, group = await it.opened(0, 1)
    assert it.ledger.book.version == V0
    await submit(generator, group.group_id, 0)
    assert await it.scored() == ["response 0", "response 1"]
    batch, _ = await learner.ask(BATCH, broker.BatchDelivered)
    delivered = batch.groups[0].trajectories
    assert [t.reward for t in delivered] == [0.0, 1.0]
    keys = ((group.group_id, 1), (group.group_id, 0))
    _, payloads = await learner.ask(broker.FetchPayloads(keys=keys), broker.Payloads)
    assert [bytes(p) for p in payloads] == [b"payload 1", b"payload 0"]
    commit = broker.StepCommit(version=V0.next(), metrics={"policy/loss": 1.0})
    await learner.ask(commit, broker.StepCommitted)
    question = broker.GetLedgerSnapshot(version=V0.next())
    answer, _ = await learner.ask(question, broker.LedgerSnapshotAnswer)
    assert decode_state(answer.data).version == V0.next()
    await learner.ask(
        broker.RequestBatch(version=V0.next(), step=V0.next().step, wait_s=30.0), broker.RunComplete
    )
    not_yet, _ = await generator.ask(WORK_NOW, broker.GroupsLeased)
    assert not not_yet.finished, "its learner may still go back"
    await learner.ask(broker.Goodbye(), broker.Done)
    finished, _ = await generator.ask(WORK_NOW, broker.GroupsLeased)
    assert finished.finished
    stored = [event async for event in it.store.replay()]
    assert len(await it.store.fetch(keys)) == 2, "no checkpoint holds them yet"
    seal = broker.SealSteps(version=V0.next(), step=1, oldest_kept=1)
    await learner.ask(seal, broker.Done)
    with pytest.raises(KeyError):
        await it.store.fetch(keys)
    status = it.status
    assert (status.steps, status.trained, status.unaccounted) == (1, 1, 0)
    assert status.steps_history[0].metrics == {"policy/loss": 1.0, "reward/sampled": 0.5}
    # taken over, issued, leased, 2 generated, 2 scored, delivered, held, trained, left
    assert len(stored) == 11


async def test_a_prompt_that_cannot_be_answered_is_dropped_and_replaced(it: Running):
    await (await it.client("learner", "learner")).ask(broker.TakeOver(step=0), broker.TookOver)
    generator = await it.client("generator", "generator-0")
    first, _ = await generator.ask(WORK_NOW, broker.GroupsLeased)
    lease_id = first.groups[0].lease_id
    reject = broker.RejectPrompt(lease_id=lease_id, reason="overlong_prompt", detail="99 tokens")
    await generator.ask(reject, broker.Done)
    again, _ = await generator.ask(WORK_NOW, broker.GroupsLeased)
    assert (it.status.dropped, again.groups[0].prompt.text) == ({"overlong_prompt": 1}, "train 1")


async def test_planned_stop_is_reported_with_its_reason(it: Running):
    learner = await it.client("learner", "learner")
    await learner.ask(broker.TakeOver(step=0), broker.TookOver)
    it.server.plan_stop("run.max_hours = 1 have passed")
    await learner.ask(BATCH, broker.RunComplete)
    await learner.ask(broker.Goodbye(), broker.Done)
    status = it.status
    assert (status.finished, status.total_steps) == (True, 0)
    assert status.stop_reason == "run.max_hours = 1 have passed"


async def test_malformed_frames_are_counted_and_the_loop_keeps_running(it: Running):
    async with bare_socket(it.endpoint) as ask:
        refused = [
            await ask(b"0"),
            await ask(b"1", b"garbage"),
            await ask(b"2", b""),
            await ask(b"3", b"\x81\xa4kind\xa6gossip"),
        ]
        welcome = await ask(b"4", encode(broker.Hello(role="generator", name="generator-0")))
        refused.append(
            await ask(b"5", encode(broker.SubmitTrajectory(header=header(0, 0, V0))), b"one frame")
        )
    assert it.server.telemetry.rejected["malformed"] == 5
    assert all(isinstance(answer, broker.Refusal) for answer in refused)
    assert (welcome.run_name, welcome.learner_step, welcome.heartbeat_s) == ("run", 0, 2.5)


@pytest.mark.parametrize(
    ("request_", "why"),
    [
        (broker.TakeOver(step=3), "holds step 3, this run is at step 0"),
        (
            broker.RequestBatch(version=PolicyVersion(2, 0), step=0, wait_s=0.0),
            "the learner is at v2.0, the run at v1.0",
        ),
        (broker.StepCommit(version=PolicyVersion(2, 1), metrics={}), "the learner is at v2.0"),
        (broker.FetchPayloads(keys=((0, 0),)), "trajectory 0/0 is in no delivered batch"),
    ],
)
async def test_what_the_ledger_refuses_comes_back_with_its_reason(
    it: Running, request_: broker.Request, why: str
):
    learner = await it.client("learner", "learner")
    if not isinstance(request_, broker.TakeOver):
        await learner.ask(broker.TakeOver(step=0), broker.TookOver)
    with pytest.raises(RefusedError, match=re.escape(why)):
        await learner.ask_any(request_)
    assert it.status.queue["rejected_messages"] == 1


async def test_waiting_request_is_answered_as_soon_as_there_is_work(it: Running):
    generator = await it.client("generator", "generator-0")
    learner = await it.client("learner", "learner")
    waiting = asyncio.create_task(generator.ask(WORK, broker.GroupsLeased))
    # an answer to a later question of the same client: the first one is being waited on
    await generator.ask(broker.Heartbeat(lease_ids=()), broker.HeartbeatAnswer)
    assert not waiting.done()
    await learner.ask(broker.TakeOver(step=0), broker.TookOver)
    answer, _ = await waiting
    assert [group.siblings for group in answer.groups] == [(0, 1)], "it waited to its end"


def test_a_request_waits_as_long_as_it_asks_within_limits():
    for asked_s, may_s in [
        (0.0, 0.0),
        (-1.0, 0.0),
        (0.5, 0.5),
        (MAX_WAIT_S + 1.0, MAX_WAIT_S),
        (float("inf"), MAX_WAIT_S),
        (float("nan"), MAX_WAIT_S),
    ]:
        assert may_wait_s(asked_s) == may_s


async def test_unfilled_batch_request_is_answered_with_what_is_missing(it: Running):
    learner = await it.client("learner", "learner")
    generator = await it.client("generator", "generator-0")
    await learner.ask(broker.TakeOver(step=0), broker.TookOver)
    await generator.ask(WORK_NOW, broker.GroupsLeased)
    answer, _ = await learner.ask(
        broker.RequestBatch(version=V0, step=V0.step, wait_s=0.0), broker.BatchNotReady
    )
    assert it.status.waiting_for == answer.reason
    assert answer.waiting_for == (0,)
    assert answer.reason == "groups 0 (leased, held by generator-0)"


async def test_a_trajectory_without_reward_is_scored_again(it: Running):
    await (await it.client("learner", "learner")).ask(broker.TakeOver(step=0), broker.TookOver)
    generator = await it.client("generator", "generator-0")
    await generator.ask(WORK_NOW, broker.GroupsLeased)
    await submit(generator, 0, 1)
    worker = await it.client("reward_worker", "reward-worker-0")
    siblings = []
    for _ in range(2):
        leased, _ = await worker.ask(SCORING, broker.ScoringLeased)
        (item,) = leased.items
        siblings.append(item.sibling)
        none = Score(group_id=0, sibling=1, lease_id=item.lease_id, unavailable="raised")
        await worker.ask(broker.SubmitScores(scores=(none,)), broker.Done)
    assert siblings == [1, 1]


async def test_a_quarantine_is_in_the_record_of_its_version_and_counted(it: Running):
    await it.takes_over()
    relay = await it.client("relay", "relay")
    generator = await it.client("generator", "generator-0")
    await relay.ask(broker.PublishReport(record=RECORD), broker.Done)
    for reason in ("0.1 nats", "0.2 nats"):  # again after it was started anew
        found = broker.EngineQuarantined(version=RECORD.version, reason=reason)
        await generator.ask(found, broker.Done)
    older = broker.EngineQuarantined(version=V0, reason="0.3 nats")
    await generator.ask(older, broker.Done)
    answer, _ = await (await it.client("observer", "o")).ask(
        broker.GetStatus(), broker.StatusAnswer
    )
    status = answer.status
    known, other = status.publish_history
    assert known == replace(RECORD, quarantined={"generator-0": "0.2 nats"})
    assert (other.version, other.quarantined) == (V0, {"generator-0": "0.3 nats"})
    assert (status.quarantines, status.publishes) == (3, 1)


async def test_generator_gets_the_address_that_the_relay_of_the_learner_reported(it: Running):
    door = RelayAddress(endpoint="tcp://h:1", bulk_endpoint="tcp://h:2", key="k" * 40)
    relay, generator = await it.client("relay", "relay"), await it.client("generator", "g")

    async def found() -> broker.RelayPlace:
        return (await generator.ask(broker.FindRelay(), broker.RelayPlace))[0]

    assert await found() == broker.RelayPlace(is_known=False)
    await relay.ask(broker.RelayReport(members=[], door=door), broker.RelayHeard)
    assert await found() == broker.RelayPlace(is_known=False), "no learner has taken over"
    await it.takes_over()
    for place in (None, door):
        await relay.ask(broker.RelayReport(members=[], door=place), broker.RelayHeard)
        assert await found() == broker.RelayPlace(is_known=True, door=place)


async def batch_of_one(it: Running) -> tuple[BrokerClient, BrokerClient]:
    """Return a learner that was delivered the one group of its first step, and its generator."""
    learner, generator, _ = await it.opened(0, 1)
    for sibling in (0, 1):
        it.ledger.score(Score(group_id=0, sibling=sibling, lease_id=0, reward=float(sibling)))
    await learner.ask(BATCH, broker.BatchDelivered)
    return learner, generator


class SlowRecords(RunRecords):
    """Records batches as slowly as a test wants."""

    def __init__(self) -> None:
        self.begun, self.may_end = asyncio.Event(), asyncio.Event()
        self.steps: list[int] = []

    @property
    @override
    def wants_batches(self) -> bool:
        return True

    @override
    async def batch(self, step: int, groups: Sequence[tuple[Group, Frames]]) -> None:
        if groups:
            self.begun.set()
            await self.may_end.wait()
            self.steps.append(step)


# ---- a broker that dies ------------------------------------------------------


async def test_a_learner_takes_over_while_the_batch_of_the_one_before_is_being_recorded(
    short_folder: Path,
):
    """Both in one transaction, they named a step that was remembered no longer: KeyError."""
    mishaps: list[object] = []
    records = SlowRecords()
    asyncio.get_running_loop().set_exception_handler(lambda _, context: mishaps.append(context))
    rules = make_rules(groups_per_step=1, total_steps=2, replay_budget_bytes=0)
    async with running(short_folder, make_ledger(rules), records=records) as it:
        learner, _ = await batch_of_one(it)
        commit = broker.StepCommit(version=V0.next(), metrics={})
        waiting = asyncio.create_task(learner.ask(commit, broker.StepCommitted))
        await asyncio.wait_for(records.begun.wait(), HANG_S)  # noqa: TID251 cancelled by nobody
        assert not waiting.done()
        learner.close()
        waiting.cancel()
        it.clients.remove(learner)
        successor = await it.client("learner", "learner")
        took, _ = await successor.ask(broker.TakeOver(step=0), broker.TookOver)
        assert took.version == PolicyVersion(2, 0)
        kinds = [type(decode_event(event)) async for event in it.store.replay()]
        assert kinds.index(Trained) < kinds.index(TakenOver, kinds.index(Trained))
        records.may_end.set()
        await until_async(lambda: records.steps == [0], "the batch is not recorded")
        unheard = it.server.telemetry.rejected
        await until_async(
            lambda: unheard["unreachable"], "the answer to the commit is not given up"
        )
        assert unheard["unreachable"] == 1
    assert mishaps == []


async def test_commit_repeated_while_its_batch_is_read_is_answered_twice(short_folder: Path):
    records = SlowRecords()
    records.may_end.set()
    rules = make_rules(groups_per_step=1, total_steps=2, replay_budget_bytes=0)
    ledger = make_ledger(rules)
    async with running(short_folder, ledger, records=records, cache_bytes=0) as it:
        learner, _ = await batch_of_one(it)
        commit = broker.StepCommit(version=V0.next(), metrics={})
        await asyncio.gather(*(learner.ask(commit, broker.StepCommitted) for _ in range(2)))
        assert records.steps == [0]
        assert it.status.trained == 1


async def test_a_rejected_batch_is_answered_with_other_groups(it: Running):
    learner, generator = await batch_of_one(it)
    reject = broker.RejectBatch(
        version=V0, step=0, reason="nonfinite", groups=(0,), detail="loss is nan"
    )
    await learner.ask(reject, broker.Done)
    again, _ = await generator.ask(WORK, broker.GroupsLeased)
    assert again.groups[0].prompt.text == "train 1"
    assert it.status.dropped == {"nonfinite": 1}


async def test_account_names_the_oldest_items_and_their_holders(it: Running):
    learner, _, _ = await it.opened(1)
    answer, _ = await learner.ask(broker.GetLedger(), broker.LedgerAnswer)
    view = answer.view
    (item,) = view.oldest
    found = (item.state, item.holder, item.missing, item.unscored)
    assert found == ("leased", "generator-0", (0,), (1,))
    assert (item.prompt, item.deadline, item.age_s is not None) == ("train 0", 1, True)
    (holder,) = view.holders
    got = (holder.name, holder.work, holder.leases, holder.trajectories)
    assert got == ("generator-0", "generation", 1, 1)
    assert (view.issued, view.in_flight["leased"], view.unaccounted) == (1, 1, 0)
    flat = view.trajectories
    assert (flat["in_flight"], flat["to_generate"], flat["to_score"]) == (2, 1, 1)
    transcript = transcript_of(
        header(0, 1, V0), Prompt(prompt="train 0", ground_truth="0"), "response 1"
    )
    assert view.untrained_bytes == len(b"payload 1" + encode(transcript))


async def test_more_dead_letters_than_one_answer_holds_are_all_listed_in_order(short_folder: Path):
    ledger = make_ledger(make_rules(groups_per_step=200, max_attempts=1, group_size=1))
    ledger.training.take_over(0)
    leased = ledger.lease("g", ledger.book.version, max_sequences=240, now_s=0.0)
    for group in reversed(leased):
        ledger.reject("g", group.lease_id, "poison")
    async with running(short_folder, ledger) as it:
        operator = await it.client("operator", "operator")
        found: list[int] = []
        page = None
        while page is None or page.letters:
            question = broker.GetDeadLetters(after=found[-1] if found else -1)
            page, _ = await operator.ask(question, broker.DeadLetters)
            found += [letter.group_id for letter in page.letters]
    assert found == list(range(240))


async def test_late_reward_counts_once_and_one_without_a_lease_does_not(it: Running):
    _, _, group = await it.opened(0, 1)
    worker = await it.client("reward_worker", "w")
    leased, _ = await worker.ask(SCORING, broker.ScoringLeased)
    it.server._leases._scoring.expire(it.server._now() + 11.0)
    scores = {
        item.sibling: Score(
            group_id=item.group_id, sibling=item.sibling, lease_id=item.lease_id, reward=1.0
        )
        for item in leased.items
    }
    made_up = msgspec.structs.replace(scores[1], lease_id=scores[1].lease_id + 77)
    await worker.ask(broker.SubmitScores(scores=(scores[0], scores[0], made_up)), broker.Done)
    known = it.ledger.book.groups[group.group_id].scores
    assert (len(known), known[0].lease_id - scores[0].lease_id) == (1, 0)


async def test_a_worker_that_died_with_work_has_used_up_an_attempt(it: Running):
    _, _, group = await it.opened(0)
    worker = await it.client("reward_worker", "w")
    await worker.ask(SCORING, broker.ScoringLeased)
    worker.close()
    it.clients.remove(worker)
    await it.client("reward_worker", "w")  # another incarnation
    assert dict(it.ledger.book.groups[group.group_id].failed_scorings) == {0: 1}


@pytest.mark.parametrize("size", [65_535, 65_536, 65_537, 131_072, 500_000])
async def test_a_payload_arrives_whole_whatever_its_size(it: Running, size: int):
    payload = bytes(range(251)) * (size // 251 + 1)
    _, generator, _ = await it.opened()
    message = broker.SubmitTrajectory(header=header(0, 0, V0, lease_id=0))
    await generator.ask(message, broker.Done, frames=[payload[:size], b"response"])
    (stored,) = await it.store.fetch([(0, 0)])
    assert bytes(stored.payload) == payload[:size]
