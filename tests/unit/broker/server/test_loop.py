"""The broker's loop over a real socket in a private folder, with the store in memory."""

import asyncio
import re
import time
from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager, closing
from pathlib import Path

import msgspec
import pytest
from msgspec.structs import replace
from typing_extensions import override

from slipstream.broker.client import BrokerClient
from slipstream.broker.dashboard.metrics import render_metrics
from slipstream.broker.ledger.commands import Ledger
from slipstream.broker.ledger.effects import apply
from slipstream.broker.ledger.events import TakenOver, Trained, decode_event
from slipstream.broker.ledger.groups import Group
from slipstream.broker.ledger.scores import MAX_PARTS_OF_RUN, OTHER_PARTS
from slipstream.broker.ledger.state import decode_state
from slipstream.broker.report.run_records import Frames, RunRecords
from slipstream.broker.server.loop import MAX_WAIT_S, may_wait_s
from slipstream.wire.errors import (
    ForbiddenError,
    NameTakenError,
    PeerLostError,
    RefusedError,
    SupersededError,
)
from slipstream.wire.messages import broker
from slipstream.wire.messages.codec import decode_transcript, encode
from slipstream.wire.messages.trajectory import (
    Prompt,
    Score,
    TrajectoryHeader,
    Turn,
    VersionRun,
    transcript_of,
)
from slipstream.wire.messages.versions import PolicyVersion
from slipstream.wire.messages.weightbus import RelayAddress
from slipstream.wire.process.command_line import EXIT_SUPERSEDED, run_role
from tests.support.ledger_driver import (
    RESPONSE_TOKENS,
    generate,
    header,
    lease,
    make_ledger,
    make_rules,
)
from tests.support.memory_store import MemoryStore
from tests.support.running_broker import (
    BATCH,
    SCORING,
    V0,
    WORK,
    WORK_NOW,
    Running,
    bare_socket,
    one_group,
    running,
    submit,
)
from tests.support.waiting import HANG_S, until_async
from tests.support.wire_samples import MEMBERS, RECORD


@pytest.fixture
def it(short_folder: Path) -> AbstractAsyncContextManager[Running]:
    return running(short_folder)


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


async def test_client_without_a_hello_is_refused(it: Running):
    async with bare_socket(it.endpoint) as ask:
        answer = await ask(b"1", encode(broker.GetStatus()))
    assert answer == broker.Refusal(reason="send a hello first", code="hello_first")


async def test_another_wire_revision_is_refused_with_both_numbers(it: Running):
    async with bare_socket(it.endpoint) as ask:
        other = broker.Hello(role="learner", name="learner", wire_revision=99)
        answer = await ask(b"1", encode(other))
    assert isinstance(answer, broker.Refusal)
    assert f"wire revision 99, this broker {broker.WIRE_REVISION}" in answer.reason


async def test_another_tokenizer_is_refused_with_both_names(it: Running):
    await it.client("learner", "learner")  # names no tokenizer
    known = broker.Hello(role="generator", name="generator-0", tokenizer="aaaa")
    other = broker.Hello(role="generator", name="generator-1", tokenizer="bbbb")
    async with bare_socket(it.endpoint) as ask:
        assert isinstance(await ask(b"1", encode(known)), broker.Welcome)
        assert isinstance(await ask(b"2", encode(known)), broker.Welcome)
        answer = await ask(b"3", encode(other))
    assert isinstance(answer, broker.Refusal)
    assert "tokenizer of generator-1 (bbbb) is not that of generator-0 (aaaa)" in answer.reason


async def test_a_prompt_that_cannot_be_answered_is_dropped_and_replaced(it: Running):
    await (await it.client("learner", "learner")).ask(broker.TakeOver(step=0), broker.TookOver)
    generator = await it.client("generator", "generator-0")
    first, _ = await generator.ask(WORK_NOW, broker.GroupsLeased)
    lease_id = first.groups[0].lease_id
    reject = broker.RejectPrompt(lease_id=lease_id, reason="overlong_prompt", detail="99 tokens")
    await generator.ask(reject, broker.Done)
    again, _ = await generator.ask(WORK_NOW, broker.GroupsLeased)
    assert (it.status.dropped, again.groups[0].prompt.text) == ({"overlong_prompt": 1}, "train 1")


async def test_goodbye_cancels_a_pending_request_for_work(it: Running):
    it.ledger.training.take_over(0)
    leaving = await it.client("generator", "generator-0")
    await leaving.ask(WORK, broker.GroupsLeased)
    asked = asyncio.create_task(leaving.ask(WORK, broker.GroupsLeased))
    await until_async(lambda: len(it.server.pending) == 1, "it does not wait")
    await leaving.ask(broker.Goodbye(), broker.Done)
    nothing, _ = await asked
    assert it.ledger.book.leases == {}
    other = await it.client("generator", "generator-1")
    answer, _ = await other.ask(WORK, broker.GroupsLeased)
    assert nothing == broker.GroupsLeased(groups=())
    assert [one.group_id for one in answer.groups] == [0]


async def test_a_role_that_said_goodbye_is_not_called_silent(it: Running):
    """Else scaling down would wake somebody up: slipstream_role_silent_seconds has an alert."""
    it.ledger.training.take_over(0)
    leaving = await it.client("generator", "generator-0")
    await it.client("generator", "generator-1")
    await leaving.ask(broker.Goodbye(), broker.Done)
    status = it.status
    assert {one.name: one.has_left for one in status.roles if one.role == "generator"} == {
        "generator-0": True,
        "generator-1": False,
    }
    text = render_metrics(status, [])[0].decode()
    silent = [line for line in text.splitlines() if line.startswith("slipstream_role_silent_sec")]
    assert not [line for line in silent if "generator-0" in line]
    assert [line for line in silent if "generator-1" in line]
    ended = render_metrics(replace(status, finished=True), [])[0].decode()
    assert "slipstream_role_silent_seconds{" not in ended, "all have left, or will"


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


async def test_a_generator_that_starts_anew_loses_its_leases_and_its_old_self_is_out(it: Running):
    await (await it.client("learner", "learner")).ask(broker.TakeOver(step=0), broker.TookOver)
    old = await it.client("generator", "generator-0")
    await old.ask(WORK_NOW, broker.GroupsLeased)
    old._socket.disconnect(it.endpoint)  # as if its network was gone
    new = await it.client("generator", "generator-0")
    again, _ = await new.ask(WORK_NOW, broker.GroupsLeased)
    old._socket.connect(it.endpoint)
    with pytest.raises(SupersededError, match="another process took the name gen"):
        await old.ask(broker.Heartbeat(lease_ids=(0,)), broker.HeartbeatAnswer)
    lost, _ = await new.ask(broker.Heartbeat(lease_ids=(0, 1)), broker.HeartbeatAnswer)
    assert lost.lost == (0,)
    assert again.groups[0].group_id == 0
    assert it.ledger.book.state.ended_leases == {"restarted": 1}


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


async def test_an_observer_changes_nothing(it: Running):
    observer = await it.client("observer", "observer")
    answer, _ = await observer.ask(broker.GetStatus(), broker.StatusAnswer)
    status = answer.status
    names = [role.name for role in status.roles]
    assert (status.run_name, names, status.issued) == ("run", ["broker"], 0)


async def test_only_a_relay_may_report_engines_and_observers_see_the_report(it: Running):
    reports: list[broker.Request] = [
        broker.PublishReport(record=RECORD),
        broker.RelayReport(members=MEMBERS),
    ]
    relay = await it.client("relay", "relay")
    others: tuple[broker.Role, ...] = ("learner", "generator", "reward_worker", "operator")
    for role in others:
        client = await it.client(role, role)
        for report in reports:
            with pytest.raises(ForbiddenError, match=f"is a {role}, which may not send"):
                await client.ask(report, broker.Done)
        if role == "learner":
            await client.ask(broker.TakeOver(step=0), broker.TookOver)
    assert (it.status.members, it.status.publish_history) == ([], [])
    await relay.ask(reports[0], broker.Done)
    assert (await relay.ask(reports[1], broker.RelayHeard))[0].generator_keys == {}
    with pytest.raises(ForbiddenError, match="is a relay, which may not send TakeOver"):
        await relay.ask(broker.TakeOver(step=0), broker.TookOver)
    answer, _ = await (await it.client("observer", "o")).ask(
        broker.GetStatus(), broker.StatusAnswer
    )
    status, forbidden = answer.status, it.server.telemetry.rejected["forbidden"]
    assert (status.members, status.publish_history) == (MEMBERS, [RECORD])
    assert forbidden == 9
    assert next(one.role for one in status.roles if one.name == "relay") == "relay"


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


# ---- rights by item ----------------------------------------------------------


async def test_a_generator_scores_what_it_delivered_and_nothing_else(it: Running):
    _, generator, group = await it.opened(0, 1)
    other = await it.client("generator", "generator-1")
    now = broker.LeaseScoring(credits=8, wait_s=0.0)
    assert (await other.ask(now, broker.ScoringLeased))[0].items == ()
    leased, _ = await generator.ask(now, broker.ScoringLeased)
    assert [(one.group_id, one.sibling) for one in leased.items] == [(0, 0), (0, 1)]
    scores = tuple(
        Score(group_id=0, sibling=one.sibling, lease_id=one.lease_id, reward=1.0 + one.sibling)
        for one in leased.items
    )
    await other.ask(broker.SubmitScores(scores=scores), broker.Done)
    assert it.ledger.book.groups[group.group_id].scores == {}, "it holds no lease of them"
    await generator.ask(broker.SubmitScores(scores=scores), broker.Done)
    assert it.ledger.book.groups[group.group_id].values_of("reward") == [1.0, 2.0]


async def test_no_learner_but_the_one_that_took_over_trains(it: Running):
    await it.opened(0, 1)
    await it.scored()
    other = await it.client("learner", "learner-rank-1")
    version = it.ledger.book.version
    for request_ in (
        broker.RequestBatch(version=version, step=0, wait_s=0.0),
        broker.StepCommit(version=version.next(), metrics={}),
        broker.RejectBatch(version=version, step=0, reason="invalid", groups=(0,), detail=""),
        broker.SealSteps(version=version, step=0, oldest_kept=0),
        broker.GetLedgerSnapshot(version=version),
    ):
        with pytest.raises(ForbiddenError, match="does not train this run"):
            await other.ask_any(request_)
    with pytest.raises(RefusedError, match="in no delivered batch"):  # a rank's right
        await other.ask_any(broker.FetchPayloads(keys=((0, 0),)))
    await other.ask(broker.Goodbye(), broker.Done)
    assert not it.ledger.book.state.learner_left


async def test_a_broker_that_is_not_there_is_reported_by_its_address(short_folder: Path):
    endpoint = f"ipc://{short_folder}/none.sock"
    with pytest.raises(PeerLostError, match=r"none\.sock did not answer Hello"):
        await BrokerClient.connect(endpoint, role="learner", name="learner", timeout_s=0.05)


# ---- a broker that dies ------------------------------------------------------


async def read_back(store: MemoryStore) -> Ledger:
    """What the next broker finds in the store."""
    data = await store.snapshot()
    rules = make_rules(groups_per_step=1, total_steps=1)
    ledger = make_ledger(rules, decode_state(data) if data else None)
    async for event in store.replay():
        apply(ledger.book, decode_event(event))
    ledger.restarted(0.0)
    return ledger


async def test_clients_come_back_to_a_new_broker_and_nothing_is_done_twice(short_folder: Path):
    store, asked = MemoryStore(), asyncio.Event()
    async with running(short_folder, store=store) as first:
        learner, generator, group = await first.opened()
        generator.held = lambda: [group.lease_id]
        await submit(generator, group.group_id, 0)
        waiting = asyncio.create_task(learner.ask(BATCH, broker.BatchDelivered, extra_wait_s=30.0))
        asked.set()
        await generator.ask(broker.Heartbeat(lease_ids=(group.lease_id,)), broker.HeartbeatAnswer)
        first.clients.clear()  # they outlive this broker
    late = asyncio.create_task(submit(generator, group.group_id, 1))
    async with running(short_folder, await read_back(store), store=store) as second:
        second.clients += [learner, generator]
        await late
        kept, _ = await generator.ask(
            broker.Heartbeat(lease_ids=(group.lease_id,)), broker.HeartbeatAnswer
        )
        assert kept.lost == (group.lease_id,), "it ended with its last sibling"
        assert dict(second.ledger.book.state.ended_leases) == {}
        await submit(generator, group.group_id, 0)
        assert await second.scored() == ["response 0", "response 1"]
        delivered, _ = await asyncio.wait_for(waiting, HANG_S)  # noqa: TID251 cancelled by nobody
        assert delivered.groups[0].group_id == group.group_id
        assert second.status.queue["being_scored"] == 0


async def test_a_broker_that_is_gone_is_waited_for_as_long_as_an_outage_may_last(
    short_folder: Path,
):
    async with running(short_folder) as first:
        client, _ = await BrokerClient.connect(
            first.endpoint, role="generator", name="g", timeout_s=HANG_S, outage_s=0.5
        )
    client._timeout_s = 0.01  # of a request while the broker is there
    began_s = time.monotonic()
    with closing(client), pytest.raises(PeerLostError, match="LeaseGroups"):
        await client.ask(WORK_NOW, broker.GroupsLeased)
    assert time.monotonic() - began_s >= 0.5


async def test_a_lease_whose_grant_was_lost_with_the_broker_is_granted_again(short_folder: Path):
    store = MemoryStore()
    async with running(short_folder, store=store) as first:
        learner, generator, _ = await first.opened()  # whose answer the generator never read
        first.clients.clear()
    async with running(short_folder, await read_back(store), store=store) as second:
        second.clients += [learner, generator]
        leased, _ = await generator.ask(WORK, broker.GroupsLeased)
        assert leased.groups[0].group_id == 0
        assert second.ledger.book.state.ended_leases == {"lost": 1}


@pytest.mark.parametrize("role", ["learner", "generator", "reward_worker"])
async def test_second_process_of_a_name_waits_until_the_first_has_gone(
    it: Running, role: broker.Role
):
    """It ended the first one, and with it the run, before it had done anything itself."""
    first = await it.client(role, "one")
    if role == "learner":
        took, _ = await first.ask(broker.TakeOver(step=0), broker.TookOver)
        assert took.version == V0
    second = asyncio.create_task(it.client(role, "one"))
    await until_async(lambda: it.server.telemetry.rejected["name_taken"] > 0)
    assert not second.done()
    await first.ask(broker.RoleReport(phase_seconds={}, counters={}), broker.Done)
    assert it.ledger.book.version.epoch == (role == "learner")
    first.close()
    it.clients.remove(first)
    successor = await asyncio.wait_for(second, HANG_S)  # noqa: TID251 cancelled by nobody
    await successor.ask(broker.RoleReport(phase_seconds={}, counters={}), broker.Done)


async def test_a_learner_of_another_name_takes_over_only_when_the_first_has_gone(it: Running):
    first = await it.client("learner", "learner")
    await first.ask(broker.TakeOver(step=0), broker.TookOver)
    second = await it.client("learner", "another")
    with pytest.raises(RefusedError, match="learner is connected and trains this run"):
        await second.ask(broker.TakeOver(step=0), broker.TookOver)
    assert it.ledger.book.version == V0
    first.close()
    it.clients.remove(first)
    await until_async(lambda: not it.server._sessions.is_connected(it.ledger.book.state.learner))
    took, _ = await second.ask(broker.TakeOver(step=0), broker.TookOver)
    assert took.version == PolicyVersion(2, 0)


async def test_second_process_of_a_name_gives_up_and_names_the_holder(it: Running):
    """By exit code 3: bad settings (2) would end a run that started it again."""
    first = await it.client("learner", "learner")
    with pytest.raises(NameTakenError, match="another process is connected as learner"):
        await BrokerClient.connect(
            it.endpoint, role="learner", name="learner", timeout_s=HANG_S, name_patience_s=0.5
        )
    await first.ask(broker.TakeOver(step=0), broker.TookOver)

    def role() -> int:
        raise NameTakenError("another process is connected")

    assert run_role(role) == EXIT_SUPERSEDED


async def test_a_process_that_was_replaced_while_the_broker_was_away_is_out(it: Running):
    old = await it.client("generator", "generator-0")
    old._socket.disconnect(it.endpoint)
    await it.client("generator", "generator-0")
    old._socket.connect(it.endpoint)
    for _ in range(2):
        with pytest.raises(SupersededError):
            await old.ask(broker.GetStatus(), broker.StatusAnswer)


async def test_a_worker_scores_the_prompt_that_was_issued_whatever_a_generator_sends(it: Running):
    _, generator, group = await it.opened()
    message = broker.SubmitTrajectory(header=header(group.group_id, 0, V0, lease_id=0))
    forged = transcript_of(message.header, Prompt(prompt="?", ground_truth="mine"), "mine")
    with pytest.raises(RefusedError, match="not a valid response"):
        await generator.ask(message, broker.Done, frames=[b"payload", encode(forged)])
    assert not it.ledger.book.groups[0].headers
    await generator.ask(message, broker.Done, frames=[b"payload", b"mine"])
    worker = await it.client("reward_worker", "reward-worker-0")
    _, (transcript,) = await worker.ask(SCORING, broker.ScoringLeased)
    assert decode_transcript(transcript).prompt == it.ledger.book.groups[0].prompt
    transcript = decode_transcript(transcript)
    assert (transcript.response, transcript.num_response_tokens) == ("mine", RESPONSE_TOKENS)


async def test_a_worker_is_shown_what_the_policy_said_by_turn(it: Running):
    _, generator, group = await it.opened()
    sent = header(group.group_id, 0, V0, lease_id=group.lease_id)
    sent = replace(sent, turns=(Turn(2, 1), Turn(4, sent.num_tokens - 4)))
    message = broker.SubmitTrajectory(header=sent)
    for frames, why in (
        ([b"payload", b"text"], "needs 3 attached frames, got 2"),
        ([b"payload", b"text", encode(["one"])], "1 replies came with 2 turns"),
        ([b"payload", b"text", b"\xc1"], "not a valid list of texts"),
    ):
        with pytest.raises(RefusedError, match=why):
            await generator.ask(message, broker.Done, frames=frames)
    assert not it.ledger.book.groups[0].headers
    frames = [b"payload", b"text", encode(["one", "two"])]
    await generator.ask(message, broker.Done, frames=frames)
    worker = await it.client("reward_worker", "reward-worker-0")
    _, (transcript,) = await worker.ask(SCORING, broker.ScoringLeased)
    transcript = decode_transcript(transcript)
    assert (transcript.response, transcript.turns) == ("text", ("one", "two"))


async def test_answers_to_the_lease_of_another_are_refused(it: Running):
    generator = await it.client("generator", "generator-0")
    thief = await it.client("generator", "thief")
    group = await one_group(await it.client("learner", "learner"), generator)
    for lease_id in (group.lease_id, 999_999):
        sent = broker.SubmitTrajectory(header=header(group.group_id, 0, V0, lease_id=lease_id))
        with pytest.raises(RefusedError, match="group 0 was not leased to thief@"):
            await thief.ask(sent, broker.Done, frames=[b"payload", b"response"])
    assert not it.ledger.book.groups[0].headers
    await submit(generator, group.group_id, 0)
    assert dict(+it.server.telemetry.rejected) == {"refused": 2}


async def test_what_is_longer_than_the_settings_allow_is_refused(short_folder: Path):
    most = 2 + RESPONSE_TOKENS
    rules = make_rules(
        max_prompt_tokens=2,
        max_response_tokens={"train": RESPONSE_TOKENS},
        max_tokens={"train": most},
        max_turns=0,
    )
    async with running(short_folder, make_ledger(rules)) as it:
        _, generator, _ = await it.opened()
        fits = header(0, 0, V0)
        long = (
            (replace(fits, num_tokens=fits.num_tokens + 1), "a response of 5 tokens.*is 4"),
            (
                replace(fits, num_prompt_tokens=3, num_tokens=7, version_runs=(VersionRun(3, V0),)),
                "a prompt of 3 tokens.*sampling.max_prompt_tokens is 2",
            ),
            (
                replace(fits, num_tokens=200_004, turns=(Turn(2, 1), Turn(200_003, 1))),
                f"200004 tokens in group 0, context included.* {most} at most",
            ),
            (
                replace(fits, num_tokens=most, turns=(Turn(2, 1), Turn(4, 2))),
                r"2 turns in group 0.*no environment \(environment.function\)",
            ),
        )
        for sent, message in long:
            replies = [encode(["a", "b"])] if sent.turns else []
            with pytest.raises(RefusedError, match=message):
                await generator.ask(
                    broker.SubmitTrajectory(header=sent),
                    broker.Done,
                    frames=[b"payload", b"response", *replies],
                )
        await submit(generator, 0, 0)


async def test_texts_and_arrays_of_an_answer_have_no_more_bytes_than_its_tokens_can(
    short_folder: Path,
):
    turns = replace(header(0, 0, V0), num_tokens=9, turns=(Turn(2, 1), Turn(7, 2)))
    rules = make_rules(max_token_bytes=9)
    async with running(short_folder, make_ledger(rules)) as it:
        _, generator, _ = await it.opened()
        whole = header(0, 0, V0)
        text = 1_024 * (1 + whole.num_tokens)
        large: list[tuple[TrajectoryHeader, list[bytes], str]] = [
            (whole, [b"", b"x" * (text + 1)], f"a response of {text + 1} bytes.*{text} at most"),
            (whole, [b"x" * 1_079, b""], "a payload of 1079 bytes.*1078.*sampling.max_kept_tokens"),
            (turns, [b"", b"", encode(["x" * 9_000, ""])], "a text of turns of 9005 bytes"),
        ]
        for sent, frames, message in large:
            with pytest.raises(RefusedError, match=message):
                await generator.ask(
                    broker.SubmitTrajectory(header=sent), broker.Done, frames=frames
                )
        assert it.server.telemetry.rejected["refused"] == len(large)
        frames = [b"x" * 1_078, b"x" * text]
        await generator.ask(broker.SubmitTrajectory(header=whole), broker.Done, frames=frames)


async def test_parts_of_rewards_with_ever_new_names_are_summed_up(
    short_folder: Path, caplog: pytest.LogCaptureFixture
):
    ledger = make_ledger(make_rules(groups_per_step=MAX_PARTS_OF_RUN, drop_zero_variance=False))
    names = [f"{'x' * 40}{i}" for i in range(MAX_PARTS_OF_RUN + 10)]
    for first in range(0, len(names), 2):
        (group,) = lease(ledger, max_sequences=2)
        generate(ledger, group)
        for sibling in (0, 1):
            parts = {names[first + sibling]: 2.0, "known": 1.0}
            score = Score(group_id=group.group_id, sibling=sibling, lease_id=0, reward=0.5)
            ledger.score(replace(score, parts=parts))
    scores = [score for group in ledger.book.groups.values() for score in group.scores.values()]
    assert scores[-1].parts == {"known": 1.0, OTHER_PARTS: 2.0}
    assert len({name for score in scores for name in score.parts}) == MAX_PARTS_OF_RUN + 1
    async with running(short_folder, ledger) as it:
        assert it.status.queue["other_reward_parts"] == 11
    assert caplog.text.count("as many as a run may have") == 1


async def test_what_is_not_in_memory_comes_from_the_store(short_folder: Path):
    async with running(short_folder, cache_bytes=0) as it:
        learner, _, _ = await it.opened(0, 1)
        assert it.server.frames.get((0, 0)) is None
        assert await it.scored() == ["response 0", "response 1"]
        await learner.ask(BATCH, broker.BatchDelivered)
        _, payloads = await learner.ask(
            broker.FetchPayloads(keys=((0, 1), (0, 0))), broker.Payloads
        )
        assert [bytes(p) for p in payloads] == [b"payload 1", b"payload 0"]


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
