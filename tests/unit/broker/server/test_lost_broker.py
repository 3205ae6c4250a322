"""A broker that dies, and clients that come back to the next one."""

import asyncio
import time
from contextlib import closing
from pathlib import Path

import pytest

from slipstream.broker.client import BrokerClient
from slipstream.broker.ledger.commands import Ledger
from slipstream.broker.ledger.effects import apply
from slipstream.broker.ledger.events import decode_event
from slipstream.broker.ledger.state import decode_state
from slipstream.wire.errors import PeerLostError
from slipstream.wire.messages import broker
from tests.support.ledger_driver import make_ledger, make_rules
from tests.support.memory_store import MemoryStore
from tests.support.running_broker import BATCH, WORK, WORK_NOW, running, submit
from tests.support.waiting import HANG_S

# ---- rights by item ----------------------------------------------------------


async def test_a_broker_that_is_not_there_is_reported_by_its_address(short_folder: Path):
    endpoint = f"ipc://{short_folder}/none.sock"
    with pytest.raises(PeerLostError, match=r"none\.sock did not answer Hello"):
        await BrokerClient.connect(endpoint, role="learner", name="learner", timeout_s=0.05)


async def read_back(store: MemoryStore) -> Ledger:
    """What the next broker finds in the store."""
    data = await store.snapshot()
    rules = make_rules(groups_per_step=1, total_steps=1)
    ledger = make_ledger(rules, decode_state(data) if data else None)
    async for event in store.replay():
        apply(ledger.book, decode_event(event))
    ledger.restarted(0.0)
    return ledger


# ---- a broker that dies ------------------------------------------------------


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
