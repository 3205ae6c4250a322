"""Engines on other hosts: which may get weights, and how a relay that moved is found again."""

import asyncio
import socket
import tempfile
from collections.abc import AsyncIterator, Coroutine, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from pathlib import Path

import pytest
import zmq

from slipstream.generators.sglang.start_order import free_port
from slipstream.generators.weights import take_weights
from slipstream.weightbus.agent.staging import Staging
from slipstream.weightbus.agent.subscriber import Subscriber
from slipstream.weightbus.agent.tensor_set import TensorSet
from slipstream.weightbus.config import WeightBusSection
from slipstream.weightbus.net.compatibility import installed_libraries
from slipstream.weightbus.net.curve import RemoteListener
from slipstream.weightbus.relay.publisher import Publisher
from slipstream.weightbus.relay.served import Versions
from slipstream.weightbus.version.layout import plan_layout
from slipstream.weightbus.version.shared_memory import SharedSlots
from slipstream.weightbus.version.slots import NUM_SLOTS
from slipstream.weightbus.version.snapshot import tensor_spec, tensor_views
from slipstream.wire.errors import ConfigError
from slipstream.wire.files.keys import ClientKey
from slipstream.wire.messages.broker import FindRelay, RelayPlace
from slipstream.wire.messages.relay import OpenMemory
from slipstream.wire.messages.versions import PolicyVersion
from slipstream.wire.messages.weightbus import Join, PublishRecord, RelayAddress
from slipstream.wire.settings.sections import RunSection
from tests.support.bus.engine import BusEngine, random_tensors
from tests.support.waiting import NEVER_S, until_async

pytestmark = pytest.mark.integration
TENSORS = random_tensors(seed=1)
EPOCH = 1


@pytest.fixture
def folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="sp-", dir="/tmp") as name:
        yield Path(name)


def client_key(name: str) -> ClientKey:
    public, secret = (half.decode() for half in zmq.curve_keypair())
    return ClientKey(name=name, role="generator", public=public, secret=secret, broker="b" * 40)


def free_ports() -> str:
    """Return an address with no listener, nor at the port after it."""
    while True:
        port = free_port()
        with suppress(OSError), socket.socket() as after:
            after.bind(("127.0.0.1", port + 1))
            return f"tcp://127.0.0.1:{port}"


class WatchedListener(RemoteListener):
    """Counts the peers that it refuses."""

    def __init__(self, listen: str) -> None:
        super().__init__(listen)
        self.num_refused = 0

    def callback(self, _domain: str, key: bytes) -> bool:
        is_known = super().callback(_domain, key)
        self.num_refused += not is_known
        return is_known


class Relay:
    """A publisher that listens to others, and a learner's memory."""

    def __init__(self, folder: Path, listen: str = "tcp://127.0.0.1:0") -> None:
        self.listener = WatchedListener(listen)
        self.records: list[PublishRecord] = []
        self._versions = Versions(folder / "weights")
        specs = [tensor_spec(*item) for item in TENSORS.items()]
        self._layout = plan_layout(specs, bucket_bytes=4096)
        self._memory = SharedSlots.make(slot_bytes=self._layout.num_bytes, num_slots=NUM_SLOTS)
        self._versions.open(
            OpenMemory(
                epoch=EPOCH, path=self._memory.path, layout=self._layout, num_slots=NUM_SLOTS
            )
        )
        settings = WeightBusSection(
            timeout_s=NEVER_S, receive_timeout_s=NEVER_S, member_silence_s=NEVER_S
        )
        self.publisher = Publisher(
            settings, self._versions, on_record=self._keep, libraries=installed_libraries()
        )
        self.near = RelayAddress(
            endpoint=f"ipc://{folder}/bus", bulk_endpoint=f"ipc://{folder}/bulk"
        )

    async def _keep(self, record: PublishRecord) -> None:
        self.records.append(record)

    def publish(self, step: int) -> None:
        slot = self._versions.reserve(EPOCH)
        for name, view in tensor_views(self._layout, self._memory.slot(slot)).items():
            view.copy_(TENSORS[name] + step)
        self._versions.written(EPOCH, slot, PolicyVersion(EPOCH, step))

    async def place(self) -> RelayAddress:
        await until_async(lambda: self.listener.address is not None)
        assert self.listener.address is not None
        return self.listener.address


@asynccontextmanager
async def running_relay(folder: Path, listen: str = "tcp://127.0.0.1:0") -> AsyncIterator[Relay]:
    relay = Relay(folder, listen)
    async with running(relay.publisher.run(relay.near, relay.listener)):
        yield relay


@asynccontextmanager
async def running(job: Coroutine[None, None, None]) -> AsyncIterator["asyncio.Task[None]"]:
    task = asyncio.ensure_future(job)
    try:
        yield task
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task


@contextmanager
def agent(folder: Path, key: ClientKey | None, name: str = "generator-0") -> Iterator[Subscriber]:
    engine = BusEngine(TENSORS, log=folder / f"{name}.log", group_timeout_s=NEVER_S)
    yield Subscriber(
        engine,
        join=Join(
            name=name,
            incarnation="a",
            device="cpu",
            torch_version=installed_libraries().torch_version,
            transport="collective",
        ),
        tensors=TensorSet({n: tuple(t.shape) for n, t in TENSORS.items()}, "float32"),
        staging=Staging(folder, name),
        silence_s=NEVER_S,
        fetch_timeout_s=20,
        on_pause=lambda: None,
        on_adopt=lambda _version: None,
        key=key,
    )
    engine.close()


async def adopts(subscriber: Subscriber, step: int) -> None:
    await until_async(lambda: subscriber.adopted == PolicyVersion(EPOCH, step))


def test_a_key_that_the_broker_knows_gets_every_version_until_it_is_revoked(folder: Path):
    async def scenario() -> None:
        known, stranger = client_key("gpu-7"), client_key("gpu-8")
        async with running_relay(folder) as relay:
            relay.listener.admit({known.public: known.name})
            place = await relay.place()
            relay.publish(0)
            with agent(folder, known) as let_in, agent(folder, stranger, "b") as shut_out:
                async with running(let_in.run(place)), running(shut_out.run(place)):
                    await adopts(let_in, 0)
                    relay.publish(1)
                    await adopts(let_in, 1)
                    (state,) = relay.publisher.states()
                    assert (state.name, state.transport) == ("gpu-7/generator-0", "tcp")
                    assert {name for r in relay.records for name in r.adopted_by} == {state.name}
                    await until_async(lambda: relay.listener.num_refused > 0)
                    assert shut_out.adopted is None
                    relay.listener.admit({})
                    await until_async(lambda: relay.publisher.states() == [])
                    relay.publish(2)
                    await asyncio.sleep(0.2)  # in which it might get it
                    assert let_in.adopted == PolicyVersion(EPOCH, 1)

    asyncio.run(scenario())


class Broker:
    """Knows where the relay is; the real one answers the same in test_loop.py."""

    def __init__(self) -> None:
        self.place = RelayPlace(is_known=False)

    async def ask(self, request: FindRelay, _kind: type[RelayPlace]) -> tuple[RelayPlace, list]:
        assert isinstance(request, FindRelay)
        return self.place, []


RUN = RunSection(broker="tcp://head:5555")


def test_an_engine_finds_a_relay_that_took_the_place_of_its_own_with_another_key(folder: Path):
    async def scenario() -> None:
        key, broker = client_key("gpu-7"), Broker()
        with agent(folder, key) as subscriber:
            async with running(take_weights(subscriber, RUN, broker)):
                async with running_relay(folder, free_ports()) as first:
                    first.listener.admit({key.public: key.name})
                    first.publish(0)
                    place = await first.place()
                    broker.place = RelayPlace(is_known=True, door=place)
                    await adopts(subscriber, 0)
                async with running_relay(folder, place.endpoint) as second:  # the same port
                    second.listener.admit({key.public: key.name})
                    second.publish(1)
                    broker.place = RelayPlace(is_known=True, door=await second.place())
                    assert broker.place.door != place
                    await adopts(subscriber, 1)
                    second.publish(2)
                    await adopts(subscriber, 2)

    asyncio.run(scenario())


def test_an_engine_that_was_refused_gets_in_when_its_key_is_known(folder: Path):
    async def scenario() -> None:
        key, broker = client_key("gpu-7"), Broker()
        async with running_relay(folder) as relay:
            relay.publish(0)
            broker.place = RelayPlace(is_known=True, door=await relay.place())
            with agent(folder, key) as subscriber:
                async with running(take_weights(subscriber, RUN, broker)):
                    await until_async(lambda: relay.listener.num_refused >= 2)  # at either port
                    assert subscriber.adopted is None
                    relay.listener.admit({key.public: key.name})
                    await adopts(subscriber, 0)

    asyncio.run(scenario())


def test_engine_of_an_unreachable_relay_names_the_missing_setting(folder: Path):
    broker = Broker()
    broker.place = RelayPlace(is_known=True)
    with agent(folder, None) as subscriber, pytest.raises(ConfigError, match=r"weightbus\.listen"):
        asyncio.run(take_weights(subscriber, RUN, broker))


def test_no_key_no_weights(folder: Path):
    place = RelayAddress(
        endpoint="tcp://127.0.0.1:1", bulk_endpoint="tcp://127.0.0.1:2", key="k" * 40
    )
    with agent(folder, None) as subscriber, pytest.raises(ConfigError, match=r"run\.key_file"):
        asyncio.run(subscriber.run(place))
