"""CPU time of buckets on their way from a relay to another host's agent: encrypted, and plain.

A real listener and bulk socket, and an agent's fetcher, over loopback in one process, whose CPU
time is that of both ends. Turns alternate; the best of each counts, as other load only adds.
"""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import zmq
import zmq.asyncio

from benchmarks.broker.process import work_folder
from benchmarks.weightbus.model import BUCKET_BYTES, Sizes, written_slots
from slipstream.weightbus.agent.fetcher import BucketFetcher
from slipstream.weightbus.agent.staging import Staging
from slipstream.weightbus.config import WeightBusSection
from slipstream.weightbus.net.curve import RemoteListener
from slipstream.weightbus.net.traffic import Traffic
from slipstream.weightbus.relay.bulk import serve_buckets
from slipstream.weightbus.relay.deltas import Deltas
from slipstream.weightbus.relay.served import Versions
from slipstream.wire.files.keys import ClientKey
from slipstream.wire.messages.manifest import WeightManifest
from slipstream.wire.messages.relay import OpenMemory
from slipstream.wire.messages.versions import PolicyVersion

_EPOCH = 1
_TIMEOUT_S = 120.0
GB = 1e9


@dataclass(slots=True)
class BulkFigures:
    """CPU seconds per GB of each turn, of both ends together."""

    num_bytes: int
    wire: list[float] = field(default_factory=list)  # nothing but bytes
    received: list[float] = field(default_factory=list)  # digests of the relay and the agent, too
    seconds: list[float] = field(default_factory=list)  # of the wire, elapsed, per GB


@dataclass(frozen=True, slots=True)
class PlainFigures:
    """Both ways with their own digests by default, xxh3 and keyed ones."""

    encrypted: BulkFigures
    plain: BulkFigures

    @property
    def wire_share(self) -> float:
        """CPU time of plain bytes, of what encrypted ones take."""
        return min(self.plain.wire) / min(self.encrypted.wire)

    @property
    def received_share(self) -> float:
        """The same with digests on both sides."""
        return min(self.plain.received) / min(self.encrypted.received)


class _Way:
    """One relay and one agent."""

    def __init__(
        self, settings: WeightBusSection, versions: Versions, staging: Staging, figures: BulkFigures
    ) -> None:
        self._settings = settings
        self._versions = versions
        self._staging = staging
        self.figures = figures
        self.fetcher: BucketFetcher
        self._manifest: WeightManifest

    async def begin(self) -> None:
        publication = self._versions.find(PolicyVersion(_EPOCH, 1))
        if publication is None:
            raise RuntimeError("there is no version")
        self._snapshot = publication.snapshot
        self._manifest = await publication.manifest()

    async def turn(self, *, counts: bool) -> None:
        figures, gigabytes = self.figures, self._manifest.num_bytes / GB
        receiving = self.fetcher.receiving(self._manifest)
        began_cpu_s, began_s = time.process_time(), time.monotonic()
        gate = asyncio.Semaphore(receiving.ahead)

        async def fetch(index: int) -> None:
            async with gate:
                await receiving.fetch(index)

        await asyncio.gather(*map(fetch, receiving.order))
        wire_s, seconds = time.process_time() - began_cpu_s, time.monotonic() - began_s
        receiving = self.fetcher.receiving(self._manifest)
        began_cpu_s = time.process_time()
        await asyncio.to_thread(self._snapshot.digests, self._settings.digest_kind)
        await self._staging.receive(
            self._manifest, receiving.fetch, order=receiving.order, ahead=receiving.ahead
        )
        received_s = time.process_time() - began_cpu_s
        if counts:
            figures.wire.append(wire_s / gigabytes)
            figures.seconds.append(seconds / gigabytes)
            figures.received.append(received_s / gigabytes)


@asynccontextmanager
async def _way(folder: Path, sizes: Sizes, settings: WeightBusSection) -> AsyncIterator[_Way]:
    memory = written_slots(sizes)
    versions = Versions(folder, digests=settings.digest_kind)
    layout = sizes.layout(BUCKET_BYTES)
    versions.open(OpenMemory(epoch=_EPOCH, paths=memory.paths, layout=layout))
    versions.written(_EPOCH, versions.reserve(_EPOCH), PolicyVersion(_EPOCH, 1))
    listener = RemoteListener("tcp://127.0.0.1:0", is_plain=settings.bulk == "plain")
    public, secret = (half.decode() for half in zmq.curve_keypair())
    key = ClientKey(name="far", role="generator", public=public, secret=secret, broker="")
    listener.admit({public: "far"})
    context = zmq.asyncio.Context(io_threads=4)
    socket, bulk = listener.open(context)
    deltas = Deltas(versions, WeightBusSection(delta_versions=0))
    serving = asyncio.create_task(serve_buckets(bulk, versions, deltas, listener, Traffic()))
    far = zmq.asyncio.Context(io_threads=4)
    staging = Staging(folder, settings.bulk)
    way = _Way(settings, versions, staging, BulkFigures(layout.num_bytes))
    way.fetcher = BucketFetcher(far, timeout_s=_TIMEOUT_S)
    address = listener.address
    if address is None:
        raise RuntimeError("it does not listen")
    way.fetcher.connect(address, key)
    try:
        await way.begin()
        yield way
    finally:
        serving.cancel()
        with suppress(asyncio.CancelledError):
            await serving
        way.fetcher.close()
        staging.close()
        listener.close()
        for one in (socket, bulk):
            one.close(linger=0)
        far.destroy(linger=0)
        context.destroy(linger=0)
        memory.close()


async def _measure(folder: Path, sizes: Sizes, rounds: int) -> PlainFigures:
    encrypted, plain = WeightBusSection(), WeightBusSection(bulk="plain")
    async with _way(folder, sizes, encrypted) as one, _way(folder, sizes, plain) as other:
        for number in range(-1, rounds):  # the first round warms up
            for way in (one, other) if number % 2 else (other, one):
                await way.turn(counts=number >= 0)
        return PlainFigures(one.figures, other.figures)


def measure_plain(sizes: Sizes, *, rounds: int) -> PlainFigures:
    """Fetch a version from an encrypted and from a plain door, in turns."""
    with work_folder() as folder:
        return asyncio.run(_measure(folder, sizes, rounds))
