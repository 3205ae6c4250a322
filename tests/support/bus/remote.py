"""A relay and agents of other hosts in one process, which reach each other over loopback."""

import asyncio
import socket
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager, suppress
from pathlib import Path
from typing import Literal, TypeAlias

import zmq
from torch import Tensor

from slipstream.generators.sglang.start_order import free_port
from slipstream.weightbus.agent.staging import Staging
from slipstream.weightbus.agent.subscriber import Subscriber
from slipstream.weightbus.agent.tensor_set import TensorSet
from slipstream.weightbus.agent.updates import OtherHosts
from slipstream.weightbus.config import WeightBusSection
from slipstream.weightbus.net.compatibility import installed_libraries
from slipstream.weightbus.net.curve import RemoteListener
from slipstream.weightbus.net.proofs import Refusals
from slipstream.weightbus.net.traffic import Traffic
from slipstream.weightbus.relay.publisher import Publisher
from slipstream.weightbus.relay.served import Versions
from slipstream.weightbus.version.layout import plan_layout
from slipstream.weightbus.version.shared_memory import SharedSlots
from slipstream.weightbus.version.slots import NUM_SLOTS
from slipstream.weightbus.version.snapshot import tensor_spec, tensor_views
from slipstream.wire.files.keys import ClientKey
from slipstream.wire.messages.relay import OpenMemory
from slipstream.wire.messages.versions import PolicyVersion
from slipstream.wire.messages.weightbus import Join, PublishRecord, RelayAddress
from tests.support.bus.engine import BusEngine, random_tensors
from tests.support.waiting import NEVER_S, until_async

Bulk: TypeAlias = Literal["encrypted", "plain"]
Digests: TypeAlias = Literal["auto", "xxh3", "keyed", "blake2b"]
TENSORS = random_tensors(seed=1)
EPOCH = 1


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

    def __init__(self, listen: str, *, is_plain: bool = False) -> None:
        self.traffic = Traffic()
        super().__init__(listen, is_plain=is_plain, refusals=Refusals(self.traffic))
        self._num_by_curve = 0

    @property
    def num_refused(self) -> int:
        return self._num_by_curve + self.traffic.unproved_requests

    def callback(self, _domain: str, key: bytes) -> bool:
        is_known = super().callback(_domain, key)
        self._num_by_curve += not is_known
        return is_known


class Relay:
    """A publisher that listens to others, and a learner's memory."""

    def __init__(
        self,
        folder: Path,
        listen: str = "tcp://127.0.0.1:0",
        *,
        bucket_bytes: int = 4096,
        fanout: int = 0,
        tensors: Mapping[str, Tensor] = TENSORS,
        engine_check_every: int = 1,
        digests: Digests = "auto",
        bulk: Bulk = "encrypted",
        delta_versions: int = 8,
    ) -> None:
        self._bucket_bytes = bucket_bytes
        self.listener = WatchedListener(listen, is_plain=bulk == "plain")
        self.records: list[PublishRecord] = []
        settings = WeightBusSection(
            timeout_s=NEVER_S,
            receive_timeout_s=NEVER_S,
            member_silence_s=NEVER_S,
            fanout=fanout,
            engine_check_every=engine_check_every,
            digests=digests,
            bulk=bulk,
            delta_versions=delta_versions,
        )
        self.versions = Versions(folder / "weights", digests=settings.digest_kind)
        self.epoch = EPOCH - 1
        self.open_memory(tensors)
        self.publisher = Publisher(
            settings, self.versions, on_record=self._keep, libraries=installed_libraries()
        )
        self.near = RelayAddress(
            endpoint=f"ipc://{folder}/bus", bulk_endpoint=f"ipc://{folder}/bulk"
        )

    async def _keep(self, record: PublishRecord) -> None:
        self.records.append(record)

    def open_memory(self, tensors: Mapping[str, Tensor]) -> None:
        """Begin an epoch: a learner, or one that took over."""
        self.epoch += 1
        self.tensors = tensors
        specs = [tensor_spec(*item) for item in tensors.items()]
        self._layout = plan_layout(specs, bucket_bytes=self._bucket_bytes)
        self._memory = SharedSlots.make(slot_bytes=self._layout.num_bytes, num_slots=NUM_SLOTS)
        self.versions.open(
            OpenMemory(
                epoch=self.epoch, path=self._memory.path, layout=self._layout, num_slots=NUM_SLOTS
            )
        )

    def at(self, step: int) -> Mapping[str, Tensor]:
        """Return the weights of a step."""
        return {name: tensor + step for name, tensor in self.tensors.items()}

    def publish(self, step: int) -> None:
        slot, weights = self.versions.reserve(self.epoch), self.at(step)
        for name, view in tensor_views(self._layout, self._memory.slot(slot)).items():
            view.copy_(weights[name])
        self.versions.written(self.epoch, slot, PolicyVersion(self.epoch, step))

    async def place(self) -> RelayAddress:
        await until_async(lambda: self.listener.address is not None)
        assert self.listener.address is not None
        return self.listener.address


@asynccontextmanager
async def running_relay(
    folder: Path,
    listen: str = "tcp://127.0.0.1:0",
    *,
    bucket_bytes: int = 4096,
    fanout: int = 0,
    digests: Digests = "auto",
    bulk: Bulk = "encrypted",
) -> AsyncIterator[Relay]:
    relay = Relay(
        folder, listen, bucket_bytes=bucket_bytes, fanout=fanout, digests=digests, bulk=bulk
    )
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


def _type_of(tensors: Mapping[str, Tensor]) -> str:
    return str(next(iter(tensors.values())).dtype).removeprefix("torch.")


@contextmanager
def agent(
    folder: Path,
    key: ClientKey | None,
    name: str = "generator-0",
    *,
    tensors: Mapping[str, Tensor] = TENSORS,
    transport: str = "collective",
    fetch_timeout_s: float = 20.0,
    fault: Callable[[str], None] = lambda _step: None,
    staging: Staging | None = None,
    forward: str = "",
    bulk: Bulk = "encrypted",
    trusts_xxh3: bool = False,
    connections: int = 0,
    others: OtherHosts | None = None,
) -> Iterator[Subscriber]:
    engine = BusEngine(
        dict(tensors), fault=fault, log=folder / f"{name}.log", group_timeout_s=NEVER_S
    )
    yield Subscriber(
        engine,
        join=Join(
            name=name,
            incarnation="a",
            device="cpu",
            torch_version=installed_libraries().torch_version,
            transport=transport,
        ),
        tensors=TensorSet({n: tuple(t.shape) for n, t in tensors.items()}, _type_of(tensors)),
        staging=staging or Staging(folder, name),
        silence_s=NEVER_S,
        fetch_timeout_s=fetch_timeout_s,
        on_pause=lambda: None,
        on_adopt=lambda _version, _stood_s: None,
        key=key,
        forward=forward,
        forwards_plain=bulk == "plain",
        trusts_xxh3=trusts_xxh3,
        connections=connections,
        others=others,
    )
    engine.close()


async def adopts(subscriber: Subscriber, step: int) -> None:
    await until_async(lambda: subscriber.adopted == PolicyVersion(EPOCH, step))
