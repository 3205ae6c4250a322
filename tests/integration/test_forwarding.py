"""Engines on other hosts that fetch a version from each other: a chain behind the relay."""

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import pytest
import zmq
import zmq.asyncio
from safetensors.torch import load_file

from slipstream.generators.nodes.follower import EngineFollower
from slipstream.generators.nodes.host_fetcher import HostFetcher
from slipstream.weightbus.agent.fetcher import BucketFetcher
from slipstream.weightbus.agent.staging import Staging
from slipstream.weightbus.agent.subscriber import Subscriber
from slipstream.weightbus.agent.tensor_set import TensorSet
from slipstream.weightbus.config import WeightBusSection
from slipstream.wire.errors import PublishError
from slipstream.wire.files.keys import ClientKey
from slipstream.wire.messages.followers import FetchedThere, FetchToo
from slipstream.wire.messages.manifest import WeightManifest
from slipstream.wire.messages.versions import PolicyVersion
from slipstream.wire.messages.weightbus import BulkDoor, ReceiveVersion, RelayAddress
from slipstream.wire.models.model_files import WEIGHTS
from tests.support.bus.engine import digest_of
from tests.support.bus.remote import (
    EPOCH,
    TENSORS,
    Bulk,
    Digests,
    Relay,
    adopts,
    agent,
    client_key,
    running,
    running_relay,
)
from tests.support.memberships import membership
from tests.support.waiting import NEVER_S, until_async

pytestmark = pytest.mark.integration
SIZE = sum(tensor.nbytes for tensor in TENSORS.values())
BUCKET = 16 * 1024  # one tensor
NUM_BUCKETS = SIZE // BUCKET
ANY_PORT = "tcp://127.0.0.1:0"


@pytest.fixture(params=["encrypted", "plain"])
def bulk(request: pytest.FixtureRequest) -> Bulk:
    return request.param


class Chain:
    """A relay, and agents that joined one after the other."""

    def __init__(self, relay: Relay, folder: Path, stack: AsyncExitStack, bulk: Bulk) -> None:
        self.relay = relay
        self._bulk = bulk
        self.agents: list[Subscriber] = []
        self.keys: list[ClientKey] = []
        self.tasks: list[asyncio.Task[None]] = []
        self._folder = folder
        self._stack = stack

    def admit(self, *strangers: ClientKey) -> None:
        keys = (*self.keys, *strangers)
        self.relay.listener.admit({key.public: key.name for key in keys})

    async def join(self, staging: Staging | None = None, **settings: object) -> Subscriber:
        number = len(self.agents)
        key = client_key(f"host-{number}")
        self.keys.append(key)
        self.admit()
        options: dict[str, object] = {"transport": "tcp", "forward": ANY_PORT, "connections": 2}
        options |= {"bulk": self._bulk}
        made = agent(
            self._folder,
            key,
            f"generator-{number}",
            staging=staging,
            **(options | settings),  # type: ignore[arg-type]
        )
        subscriber = self._stack.enter_context(made)
        job = running(subscriber.run(await self.relay.place()))
        self.tasks.append(await self._stack.enter_async_context(job))
        self.agents.append(subscriber)
        await until_async(lambda: len(self.relay.publisher.states()) > number)
        return subscriber

    async def brings(self, step: int) -> None:
        """Publish a version and wait until all agents have it."""
        self.relay.publish(step)
        await self.adopts(step)

    async def adopts(self, step: int) -> None:
        for subscriber in self.agents:
            await adopts(subscriber, step)

    def door_of(self, number: int) -> BulkDoor:
        name = f"host-{number}/generator-{number}"
        door = self.relay.publisher._members[name].join.forward
        assert door is not None
        return door


@asynccontextmanager
async def chain(
    folder: Path, bulk: Bulk, *, fanout: int = 1, digests: Digests = "auto"
) -> AsyncIterator[Chain]:
    made = running_relay(folder, bucket_bytes=BUCKET, fanout=fanout, digests=digests, bulk=bulk)
    async with made as relay, AsyncExitStack() as stack:
        yield Chain(relay, folder, stack, bulk)


@pytest.mark.parametrize(("fanout", "from_relay"), [(0, 4), (1, 1), (2, 2), (9, 4)])
async def test_only_so_many_engines_fetch_from_the_relay(
    folder: Path, bulk: Bulk, fanout: int, from_relay: int
):
    async with chain(folder, bulk, fanout=fanout) as bus:
        for _ in range(4):
            await bus.join()
        for step in range(3):
            await bus.brings(step)
        assert bus.relay.publisher.traffic.sent_bytes == 3 * from_relay * SIZE
        fetched = [one.traffic.relay_bytes for one in bus.agents]
        assert sorted(fetched) == sorted([3 * SIZE] * from_relay + [0] * (4 - from_relay))
        forwarded = [one.traffic.forwarded_bytes for one in bus.agents]
        assert [a + b for a, b in zip(fetched, forwarded, strict=True)] == [3 * SIZE] * 4
        assert sum(one.traffic.sent_bytes for one in bus.agents) == sum(forwarded)
        assert max(one.traffic.sent_bytes for one in bus.agents) <= 3 * SIZE, "one serves two"
        assert not any(one.traffic.left_doors for one in bus.agents)


class OtherHost:
    """Another host of an engine, whose node 0 is in this process."""

    def __init__(self, folder: Path) -> None:
        self.staging = Staging(folder, "node-1")
        self._folder = folder
        self._link: EngineFollower

    async def follow(self, key: ClientKey) -> None:
        """Fetch what it is told to, with the key of its engine, until cancelled."""
        self._link = EngineFollower(membership(1, facts={}, key=key))
        shapes = {name: tuple(tensor.shape) for name, tensor in TENSORS.items()}
        bus, tensors = WeightBusSection(timeout_s=NEVER_S), TensorSet(shapes, "float32")
        await HostFetcher(bus, 1, self._link, self.staging, tensors, key).run()

    async def fetch_too(
        self, receive: ReceiveVersion, relay: RelayAddress, *, may_be_read: bool
    ) -> int:
        number = receive.command_id
        order = FetchToo(command_id=number, receive=receive, relay=relay, may_be_read=may_be_read)
        self._link.fetches.put_nowait(order)
        await until_async(lambda: self._answer(number) is not None)
        answer = self._answer(number)
        assert answer is not None
        assert answer.error == ""
        return answer.num_bytes

    def _answer(self, number: int) -> FetchedThere | None:
        last = self._link._last
        return last if last is not None and last.command_id == number else None


def _fetched_by(name: str, relay: Relay) -> list[int]:
    """Bytes by record of a publish; the record of the last one is written after engines have it."""
    return [one.fetched_bytes[name] for one in relay.records if one.fetched_bytes.get(name)]


async def test_every_host_of_an_engine_stands_behind_the_same_one_in_a_chain(
    folder: Path, bulk: Bulk
):
    async with chain(folder, bulk) as bus:
        first, other = await bus.join(), OtherHost(folder)
        second = await bus.join(others=other)
        async with running(other.follow(bus.keys[-1])):
            for step in range(2):
                await bus.brings(step)
                found = load_file(other.staging.folder / f"v{EPOCH}.{step}" / WEIGHTS)
                assert digest_of(found) == digest_of(dict(bus.relay.at(step)))
        other.staging.close()
        assert bus.relay.publisher.traffic.sent_bytes == 2 * SIZE
        assert first.traffic.sent_bytes == 2 * 2 * SIZE
        assert (second.traffic.relay_bytes, second.traffic.forwarded_bytes) == (0, 2 * SIZE)
        await until_async(lambda: len(_fetched_by("host-1/generator-1", bus.relay)) == 2)
        assert _fetched_by("host-1/generator-1", bus.relay) == [2 * SIZE] * 2


async def test_deltas_reach_the_first_of_a_chain_and_whole_buckets_those_behind(
    folder: Path, bulk: Bulk
):
    async with chain(folder, bulk) as bus:
        stagings = [Staging(folder, f"s{i}", uses_deltas=True) for i in range(2)]
        for one in stagings:
            await bus.join(one)
        for step in (0, 1, 2):
            await bus.brings(step)
        first, second = bus.agents
        deltas = bus.relay.publisher._deltas
        assert deltas.num_sent + sum(deltas.whole_because.values()) == 3 * NUM_BUCKETS
        assert first.traffic.relay_bytes == bus.relay.publisher.traffic.sent_bytes <= 3 * SIZE
        assert second.traffic.forwarded_bytes == 3 * SIZE
        assert second.traffic.relay_bytes == 0
        assert not any(one.num_refused_deltas for one in stagings)
        for one in stagings:
            one.close()


async def test_an_engine_that_offers_no_door_gets_all_from_the_relay(folder: Path, bulk: Bulk):
    async with chain(folder, bulk) as bus:
        await bus.join()
        doorless = await bus.join(forward="")
        await bus.join()
        await bus.brings(0)
        assert doorless.traffic.relay_bytes == SIZE
        assert bus.agents[2].traffic.forwarded_bytes == SIZE


async def test_one_that_joins_late_stands_behind_one_that_has_the_version(folder: Path, bulk: Bulk):
    async with chain(folder, bulk) as bus:
        await bus.join()
        await bus.brings(0)
        late = await bus.join()
        await bus.adopts(0)
        assert late.traffic.forwarded_bytes == SIZE


async def test_nobody_waits_behind_an_engine_that_refused_the_version(folder: Path, bulk: Bulk):
    async with chain(folder, bulk) as bus:
        few = {name: TENSORS[name] for name in list(TENSORS)[1:]}
        await bus.join(tensors=few)  # its model lacks a tensor
        heir = await bus.join(fetch_timeout_s=NEVER_S)
        bus.relay.publish(0)
        await adopts(heir, 0)
        assert heir.traffic.relay_bytes == SIZE


class Tampering(Staging):
    """Does something to what it is asked for by others."""

    def __init__(self, folder: Path, on_read: Callable[[memoryview, int], None]) -> None:
        super().__init__(folder, "tampering")
        self._on_read = on_read
        self._num_read = 0

    def read_into(self, data: memoryview, start: int) -> None:
        super().read_into(data, start)
        self._num_read += 1
        self._on_read(data, self._num_read)


@pytest.mark.parametrize(
    ("bulk", "digests"), [("encrypted", "xxh3"), ("encrypted", "keyed"), ("plain", "keyed")]
)
async def test_nothing_is_taken_from_an_engine_that_could_make_bytes_with_such_digests(
    folder: Path, bulk: Bulk, digests: Digests
):
    async with chain(folder, bulk, digests=digests) as bus:
        await bus.join()
        behind = await bus.join()
        bus.relay.publish(0)
        await adopts(bus.agents[0], 0)
        await until_async(lambda: any(record.failed for record in bus.relay.records))
        (failed,) = [record.failed for record in bus.relay.records if record.failed]
        assert f"{bus.door_of(0).endpoint} is another generator's" in failed["host-1/generator-1"]
        assert behind.traffic.forwarded_bytes == 0


async def test_wrong_bytes_are_refused_named_counted_and_fetched_from_the_relay(
    folder: Path, bulk: Bulk, caplog: pytest.LogCaptureFixture
):
    def flip(data: memoryview, number: int) -> None:
        if number > 3:
            data[17] ^= 1

    async with chain(folder, bulk) as bus:
        await bus.join(Tampering(folder, flip))
        victim = await bus.join()
        last = await bus.join()
        with caplog.at_level(logging.WARNING):
            await bus.brings(0)
        assert victim.traffic.rejected_buckets >= 1
        assert victim.traffic.left_doors == 1
        assert victim.traffic.relay_bytes >= SIZE - 5 * BUCKET
        assert victim.traffic.relay_bytes < SIZE, "what was right is fetched again"
        assert last.traffic.forwarded_bytes == SIZE
        assert last.traffic.rejected_buckets == 0, "wrong bytes were passed on"
        assert bus.door_of(0).endpoint in caplog.text
        assert "arrived with" in caplog.text
        assert not any(record.failed for record in bus.relay.records)


async def test_a_predecessor_that_dies_in_mid_version_is_replaced_by_the_relay(
    folder: Path, bulk: Bulk
):
    async with chain(folder, bulk) as bus:
        loop = asyncio.get_running_loop()

        def die(_data: memoryview, number: int) -> None:
            if number == 4:
                loop.call_soon_threadsafe(bus.tasks[0].cancel)

        await bus.join(Tampering(folder, die))
        heir = await bus.join()
        bus.relay.publish(0)
        await adopts(heir, 0)
        assert heir.traffic.forwarded_bytes + heir.traffic.relay_bytes == SIZE
        assert 0 < heir.traffic.relay_bytes < SIZE
        assert heir.traffic.left_doors == 1
        bus.relay.publish(1)
        await adopts(heir, 1)
        assert heir.traffic.left_doors == 1, "it still stood behind the dead one"


async def test_a_predecessor_that_is_late_is_left(folder: Path, bulk: Bulk):
    never = asyncio.Event()

    class Slow(Staging):
        def read_into(self, data: memoryview, start: int) -> None:
            loop = slow_loop
            asyncio.run_coroutine_threadsafe(never.wait(), loop).result()
            super().read_into(data, start)

    slow_loop = asyncio.get_running_loop()
    async with chain(folder, bulk) as bus:
        await bus.join(Slow(folder, "slow"))
        heir = await bus.join(fetch_timeout_s=1.0)
        bus.relay.publish(0)
        await adopts(heir, 0)
        assert heir.traffic.relay_bytes == SIZE
        assert heir.traffic.left_doors == 1
        never.set()


async def _fetched(door: BulkDoor, key: ClientKey, manifest: WeightManifest) -> bytes:
    """Return the first bucket that a door gives to a key."""
    context = zmq.asyncio.Context()
    fetcher = BucketFetcher(context, timeout_s=2.0, connections=1)
    nowhere = RelayAddress(endpoint="ipc:///nowhere", bulk_endpoint="ipc:///tmp/sp-nowhere")
    fetcher.connect(nowhere, key)
    try:
        receiving = fetcher.receiving(manifest, ((door,),))
        return bytes(memoryview(await receiving.fetch(0)))
    finally:
        fetcher.close()
        context.destroy(linger=0)


async def test_a_door_serves_the_one_behind_it_and_nobody_else(folder: Path, bulk: Bulk):
    async with chain(folder, bulk) as bus:
        for _ in range(3):
            await bus.join()
        stranger = client_key("stranger")
        outsider = client_key("outsider")  # a generator of the run, not behind this one
        bus.admit(outsider)
        await bus.brings(0)
        found = bus.relay.versions.find(PolicyVersion(EPOCH, 0))
        assert found is not None
        manifest = await found.manifest()
        door = bus.door_of(0)
        behind, after = bus.keys[1], bus.keys[2]
        assert len(await _fetched(door, behind, manifest)) == BUCKET
        for key in (stranger, outsider, after, bus.keys[0]):
            with pytest.raises(PublishError, match=r"refused our key|handshake"):
                await _fetched(door, key, manifest)

        # Without the key of the second: it is revoked at the relay, which closes the door.
        bus.relay.listener.admit({key.public: key.name for key in (bus.keys[0], after)})
        await until_async(lambda: len(bus.relay.publisher.states()) == 2)

        async def is_shut_out() -> bool:
            with contextlib.suppress(PublishError):
                await _fetched(door, behind, manifest)
                return False
            return True

        for _ in range(100):
            if await is_shut_out():
                break
            await asyncio.sleep(0.1)
        assert await is_shut_out()


async def test_a_door_gives_no_version_but_the_one_that_was_admitted(folder: Path, bulk: Bulk):
    async with chain(folder, bulk) as bus:
        for _ in range(2):
            await bus.join()
        manifests: Mapping[int, WeightManifest] = {}
        for step in range(2):
            await bus.brings(step)
            found = bus.relay.versions.find(PolicyVersion(EPOCH, step))
            assert found is not None
            manifests = {**manifests, step: await found.manifest()}
        door = bus.door_of(0)
        assert await _fetched(door, bus.keys[1], manifests[1])
        with pytest.raises(PublishError, match="did not admit"):
            await _fetched(door, bus.keys[1], manifests[0])
