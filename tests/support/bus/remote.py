"""A relay and agents of other hosts in one process, which reach each other over loopback."""

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager, suppress
from pathlib import Path
from typing import Literal, TypeAlias

import zmq
from torch import Tensor
from typing_extensions import override

from slipstream.weightbus.agent.staging import Staging
from slipstream.weightbus.agent.subscriber import Subscriber
from slipstream.weightbus.agent.tensor_set import TensorSet
from slipstream.weightbus.net.curve import RemoteListener
from slipstream.weightbus.net.proofs import DoorRefusals
from slipstream.weightbus.net.traffic import Traffic
from slipstream.wire.files.keys import ClientKey
from slipstream.wire.messages.versions import PolicyVersion
from slipstream.wire.messages.weightbus import PublishRecord, RelayAddress
from slipstream.wire.process.ports import free_port
from tests.support.bus.engine import BusEngine, random_tensors
from tests.support.bus.published import Published, subscriber_of
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
    return f"tcp://127.0.0.1:{free_port(count=2)}"


class WatchedListener(RemoteListener):
    """Counts the peers that it refuses."""

    def __init__(self, listen: str, *, is_plain: bool = False) -> None:
        self.traffic = Traffic()
        super().__init__(listen, is_plain=is_plain, refusals=DoorRefusals(self.traffic))
        self._num_by_curve = 0

    @property
    def num_refused(self) -> int:
        return self._num_by_curve + self.traffic.unproved_requests

    def callback(self, _domain: str, key: bytes) -> bool:
        is_known = super().callback(_domain, key)
        self._num_by_curve += not is_known
        return is_known


class Relay(Published):
    """A publisher that listens to others, and a learner's memory."""

    def __init__(
        self,
        folder: Path,
        listen: str = "tcp://127.0.0.1:0",
        *,
        bucket_bytes: int = 4096,
        tensors: Mapping[str, Tensor] = TENSORS,
        bulk: Bulk = "encrypted",
        **settings: object,
    ) -> None:
        """Begin an epoch; ``settings`` are of [weightbus]."""
        self.listener = WatchedListener(listen, is_plain=bulk == "plain")
        self.records: list[PublishRecord] = []
        super().__init__(
            folder, tensors, bucket_bytes=bucket_bytes, epoch=EPOCH, bulk=bulk, **settings
        )

    @override
    async def keep(self, record: PublishRecord) -> None:
        self.records.append(record)

    @override
    def open_memory(self, tensors: Mapping[str, Tensor], epoch: int = 0) -> None:
        """Begin an epoch: a learner, or one that took over."""
        self.tensors = tensors
        super().open_memory(tensors, epoch or self.epoch + 1)

    def at(self, step: int) -> Mapping[str, Tensor]:
        """Return the weights of a step."""
        return {name: tensor + step for name, tensor in self.tensors.items()}

    def publish(self, step: int) -> None:
        self.write(step, self.at(step))

    async def place(self) -> RelayAddress:
        await until_async(lambda: self.listener.address is not None)
        assert self.listener.address is not None
        return self.listener.address


@asynccontextmanager
async def running_relay(
    folder: Path, listen: str = "tcp://127.0.0.1:0", **settings: object
) -> AsyncIterator[Relay]:
    relay = Relay(folder, listen, **settings)  # type: ignore[arg-type]
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
    bulk: Bulk = "encrypted",
    **others: object,
) -> Iterator[Subscriber]:
    """Yield an agent of an engine of plain tensors; ``others`` are of its subscriber."""
    engine = BusEngine(
        dict(tensors), fault=fault, log=folder / f"{name}.log", group_timeout_s=NEVER_S
    )
    yield subscriber_of(
        engine,
        TensorSet({n: tuple(t.shape) for n, t in tensors.items()}, _type_of(tensors)),
        staging or Staging(folder, name),
        name=name,
        transport=transport,
        fetch_timeout_s=fetch_timeout_s,
        key=key,
        forwards_plain=bulk == "plain",
        **others,
    )
    engine.close()


async def adopts(subscriber: Subscriber, step: int) -> None:
    await until_async(lambda: subscriber.adopted == PolicyVersion(EPOCH, step))
