"""The link between the hosts of an engine, over loopback with keys, without an engine."""

import asyncio
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import zmq
import zmq.asyncio

from slipstream.generators.nodes.follower import EngineFollower
from slipstream.generators.nodes.host_fetcher import HostFetcher
from slipstream.generators.nodes.leader import EngineLeader
from slipstream.weightbus.agent.staging import Staging
from slipstream.weightbus.agent.tensor_set import TensorSet
from slipstream.weightbus.config import WeightBusSection
from slipstream.weightbus.hosts.membership import Membership
from slipstream.weightbus.net.curve import connect
from slipstream.wire.errors import NameTakenError, PeerLostError, PublishError
from slipstream.wire.files.keys import ClientKey
from slipstream.wire.messages.followers import FetchToo
from slipstream.wire.messages.weightbus import ReceiveVersion, RelayAddress
from slipstream.wire.settings.rendezvous import Address
from tests.support.bus.remote import client_key, free_ports, running
from tests.support.memberships import KEY, membership
from tests.support.waiting import NEVER_S, until_async
from tests.support.wire_samples import MANIFEST

pytestmark = pytest.mark.integration
FACTS = {"generators.dtype": "float32"}
DTYPE = MANIFEST.tensors[0].dtype
RECEIVE = ReceiveVersion(command_id=9, manifest=MANIFEST)
RELAY = RelayAddress(  # that is not there
    endpoint="tcp://127.0.0.1:1", bulk_endpoint="tcp://127.0.0.1:1", key=client_key("relay").public
)
TENSORS = TensorSet({spec.name: spec.shape for spec in MANIFEST.tensors}, DTYPE)


class Link:
    """Node 0, and what followers need to reach it."""

    def __init__(self, host: str, receive_timeout_s: float, silence_s: float) -> None:
        self.address = Address(host, int(free_ports().rpartition(":")[2]))
        self.silence_s = silence_s
        self.context = zmq.asyncio.Context()
        self.leader = EngineLeader(
            self.membership(0),
            receive_timeout_s=receive_timeout_s,
            on_stop=lambda: signal.raise_signal(signal.SIGTERM),
        )

    def membership(self, node: int, key: ClientKey = KEY, timeout_s: float = NEVER_S) -> Membership:
        return membership(
            node,
            3,
            facts=FACTS,
            address=self.address,
            key=key,
            silence_s=self.silence_s,
            rendezvous_timeout_s=timeout_s,
        )

    @asynccontextmanager
    async def follower(
        self, node: int, key: ClientKey = KEY, timeout_s: float = NEVER_S
    ) -> AsyncIterator[tuple[EngineFollower, zmq.asyncio.Socket, "asyncio.Task[None]"]]:
        link = EngineFollower(self.membership(node, key, timeout_s))
        socket = link.open(self.context)
        running = asyncio.create_task(link.run(socket))
        try:
            yield link, socket, running
        finally:
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)
            socket.close(linger=0)


@asynccontextmanager
async def linked(
    host: str = "127.0.0.1", *, receive_timeout_s: float = NEVER_S, silence_s: float = NEVER_S
) -> AsyncIterator[Link]:
    link = Link(host, receive_timeout_s, silence_s)
    socket = link.leader.open(link.context)
    serving = asyncio.create_task(link.leader.serve(socket))
    try:
        yield link
    finally:
        serving.cancel()
        await asyncio.gather(serving, return_exceptions=True)
        link.leader.close()
        link.context.destroy(linger=0)


def fetching(link: Link, *, may_be_read: bool = True) -> "asyncio.Task[int]":
    return asyncio.create_task(link.leader.fetch_too(RECEIVE, RELAY, may_be_read=may_be_read))


async def test_a_version_is_there_when_every_node_has_it_and_one_that_has_not_is_named():
    async with linked() as link, link.follower(1) as one, link.follower(2) as two:
        await link.leader.until_all_are_there()
        first, second = one[0], two[0]
        task = fetching(link)
        orders = [await first.fetches.get(), await second.fetches.get()]
        assert (
            orders == [FetchToo(command_id=1, receive=RECEIVE, relay=RELAY, may_be_read=True)] * 2
        )
        await first.answer(1, num_bytes=5)
        await asyncio.sleep(0.1)
        assert not task.done()
        await second.answer(1, num_bytes=7)
        assert await task == 12

        task = fetching(link)
        await second.answer(1, num_bytes=7)  # late, of the one before
        await first.answer(2)
        await second.answer(2, error="bucket 0 was wrong")
        with pytest.raises(PublishError, match=r"^node 2 \(host .*, rank 2\): bucket 0 was"):
            await task


async def test_nodes_hear_that_their_memory_may_be_read_until_all_have_taken_other():
    async with linked() as link, link.follower(1) as one, link.follower(2) as two:
        await link.leader.until_all_are_there()
        told = []
        for number, (error, may_be_read) in enumerate((("full", True), ("", False)), 1):
            task = fetching(link, may_be_read=may_be_read)
            told += [(await follower[0].fetches.get()).may_be_read for follower in (one, two)]
            await one[0].answer(number)
            await two[0].answer(number, error=error)
            await asyncio.gather(task, return_exceptions=True)
        task = fetching(link, may_be_read=False)
        told.append((await one[0].fetches.get()).may_be_read)
        assert told == [True, True, True, True, False]
        task.cancel()


async def test_an_order_that_comes_after_a_newer_one_is_not_obeyed():
    async with linked() as link, link.follower(1) as one, link.follower(2):
        await link.leader.until_all_are_there()
        peer = link.leader.book.known[1].peer
        for number in (2, 1, 3):
            order = FetchToo(command_id=number, receive=RECEIVE, relay=RELAY)
            await link.leader.send(peer, order)
        assert [(await one[0].fetches.get()).command_id for _ in range(2)] == [2, 3]


async def test_memory_that_may_be_read_is_left_also_if_that_order_was_given_up(tmp_path: Path):
    link = EngineFollower(membership(1, facts=FACTS))
    staging = Staging(tmp_path, "a")
    before = (staging.folder / "memory").readlink()
    for number in (1, 2):
        order = FetchToo(command_id=number, receive=RECEIVE, relay=RELAY, may_be_read=number == 1)
        link.fetches.put_nowait(order)
    bus = WeightBusSection(timeout_s=0.1)
    fetcher = HostFetcher(bus, 1, link, staging, TENSORS, KEY)
    async with running(fetcher.run()):
        await until_async(lambda: (staging.folder / "memory").readlink() != before)
    staging.close()


async def test_a_node_without_memory_for_a_version_says_so(tmp_path: Path):
    async with linked() as link, link.follower(1) as one, link.follower(2) as two:
        await link.leader.until_all_are_there()
        staging = Staging(tmp_path, "a")
        staging.close()
        fetcher = HostFetcher(WeightBusSection(), 1, one[0], staging, TENSORS, KEY)
        async with running(fetcher.run()):
            task = fetching(link, may_be_read=False)
            await two[0].answer(1)
            with pytest.raises(PublishError, match="Bad file descriptor"):
                await task


async def test_a_node_that_takes_too_long_is_named_with_the_setting():
    async with linked(receive_timeout_s=0.2) as link, link.follower(1) as one, link.follower(2):
        await link.leader.until_all_are_there()
        task = fetching(link)
        await one[0].answer(1)
        with pytest.raises(PublishError, match=r"^node 2 .* \(weightbus\.receive_timeout"):
            await task


async def test_what_was_lost_with_a_connection_is_asked_and_answered_again():
    async with linked() as link, link.follower(1) as one, link.follower(2) as two:
        await link.leader.until_all_are_there()
        first, second = one[0], two[0]
        task = fetching(link)
        await first.answer(1, num_bytes=1)
        order = await second.fetches.get()
        endpoint = f"tcp://{link.address}"
        two[1].disconnect(endpoint)
        await second.answer(order.command_id, num_bytes=1)  # into nothing
        await asyncio.sleep(0.1)
        assert not task.done()
        connect(two[1], endpoint, server_key=KEY.public, key=KEY)
        assert await task == 2
        assert second.fetches.empty()


async def test_another_key_does_not_get_in_and_a_second_process_is_refused():
    async with (
        linked() as link,
        link.follower(1, client_key("gpu-8"), 0.1) as stranger,
        link.follower(1) as first,
        link.follower(2),
    ):
        await link.leader.until_all_are_there()
        assert not stranger[0].is_admitted
        with pytest.raises(PeerLostError, match=r"does not reach node 0 .* another key"):
            await stranger[0].until_started()
        async with link.follower(1) as second:
            with pytest.raises(NameTakenError, match="two processes came as node 1"):
                await second[2]
        assert first[0].is_admitted
        assert link.leader.book.ended == {}


@pytest.mark.parametrize("host", ["localhost", "::1"])
async def test_nodes_meet_at_a_name_and_at_an_address_of_ipv6(host: str):
    async with linked(host) as link, link.follower(1), link.follower(2):
        await link.leader.until_all_are_there()


async def test_what_nobody_understands_changes_nothing():
    async with linked() as link, link.follower(1) as one, link.follower(2):
        for frames in ([b""], [b"\xff" * 100], [b"\x81\xa4kind\xa6follow"], [b"a", b"b"]):
            await one[1].send_multipart(frames)
        await link.leader.until_all_are_there()
        await until_async(lambda: one[0].is_admitted)


async def test_silence_is_noticed_on_both_sides():
    async with linked(silence_s=6) as link, link.follower(1) as one, link.follower(2) as two:
        await link.leader.until_all_are_there()
        _, store = await link.leader.start()
        store.close()
        two[2].cancel()  # says nothing any more
        with pytest.raises(PeerLostError, match=r"^node 2 .* for 6 s \(generators\.node_s"):
            await link.leader.watch()
        one[1].disconnect(f"tcp://{link.address}")
        with pytest.raises(
            PeerLostError,
            match=r"^node 0 \(host .*, rank 0\) ended: it gave no sign of life for 6 s",
        ):
            await one[2]


async def test_nobody_waits_for_nodes_that_node_0_hears_no_more():
    async def deaf() -> None:
        raise RuntimeError("its socket is gone")

    async with linked() as link:
        serving = asyncio.create_task(deaf())
        serving.add_done_callback(link.leader.deafened)
        with pytest.raises(PeerLostError, match=r"hears no other node any more: .* is gone"):
            await link.leader.watch()
        await asyncio.gather(serving, return_exceptions=True)
