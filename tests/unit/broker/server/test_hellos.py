"""Clients that come, return, take another's name, and leave."""

import asyncio

import pytest
from msgspec.structs import replace

from slipstream.broker.client import BrokerClient
from slipstream.broker.dashboard.metrics import render_metrics
from slipstream.wire.errors import NameTakenError, RefusedError, SupersededError
from slipstream.wire.messages import broker
from slipstream.wire.messages.codec import encode
from slipstream.wire.messages.versions import PolicyVersion
from slipstream.wire.process.command_line import EXIT_SUPERSEDED, run_role
from tests.support.running_broker import V0, WORK, WORK_NOW, Running, bare_socket
from tests.support.waiting import HANG_S, until_async


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


# ---- a broker that dies ------------------------------------------------------


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
