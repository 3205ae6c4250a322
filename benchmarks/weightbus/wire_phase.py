"""The wire phase of a publish against broadcasts of the same bytes and nothing else.

Ours is what the relay does: digests of all tensors, then ``Collective.load``, which announces to
every agent every bucket, broadcasts it and waits for the outcome. It counts from the start of the
digests until the last receiver has the last byte. The broadcasts go from the same memory of the
same process into the same memory of the same receivers, in turns with ours, over the same groups:
one for every engine, all at once, as the relay has them by default, and for comparison one that is
shared. A group has as many broadcasts in flight on both sides.
"""

import asyncio
import gc
import itertools
import json
import statistics
import threading
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

import torch.distributed as dist
import zmq
import zmq.asyncio

from benchmarks.broker.process import Driver, drivers, work_folder
from benchmarks.weightbus.figures import best, share
from benchmarks.weightbus.model import BUCKET_BYTES, MIB, Sizes, snapshot_of, written_slots
from benchmarks.weightbus.receiver import TIMEOUT_S, join_group, raw_broadcasts, receive
from slipstream.weightbus.config import WeightBusSection
from slipstream.weightbus.net.rendezvous import open_store
from slipstream.weightbus.net.router import MessageRouter
from slipstream.weightbus.relay.member import Member
from slipstream.weightbus.relay.publication import Publication
from slipstream.weightbus.relay.transports.base import RelayState
from slipstream.weightbus.relay.transports.collective import Collective
from slipstream.weightbus.version.shared_memory import SharedSlots
from slipstream.wire.messages.codec import decode_agent_message
from slipstream.wire.messages.weightbus import CommandOutcome, Join

RAW_BUCKETS = (4 * MIB, 8 * MIB, 16 * MIB, 32 * MIB, 64 * MIB, 128 * MIB)
OUR_BUCKETS = tuple(sorted({BUCKET_BYTES, 16 * MIB, 32 * MIB, 64 * MIB, 128 * MIB}))


@dataclass(frozen=True, slots=True)
class Turn:
    """One publish: seconds of the wire phase and of the digests, CPU seconds of all and of them."""

    seconds: float
    digest_s: float
    cpu_s: float
    digest_cpu_s: float


@dataclass(slots=True)
class WireFigures:
    """Rounds with so many receivers, by bucket size."""

    num_bytes: int
    receivers: int
    raw: dict[int, list[float]] = field(default_factory=dict)  # a group for every receiver
    raw_cpu: dict[int, list[float]] = field(default_factory=dict)
    ours: dict[int, list[Turn]] = field(default_factory=dict)  # the same
    raw_shared: dict[int, list[float]] = field(default_factory=dict)  # one group of all
    ours_shared: list[Turn] = field(default_factory=list)  # the same

    def ours_s(self, bucket_bytes: int = BUCKET_BYTES) -> float:
        return statistics.median(turn.seconds for turn in self.ours[bucket_bytes])

    @property
    def by_default(self) -> list[Turn]:
        """The relay's defaults: its bucket size, and a group for every engine."""
        return self.ours[BUCKET_BYTES]

    @property
    def raw_best(self) -> tuple[int, float]:
        return best(self.raw)

    @property
    def share(self) -> float:
        """Median over the rounds, each compared with the raw broadcasts of the same round."""
        return share_of(self.raw[self.raw_best[0]], self.by_default)

    @property
    def share_shared(self) -> float:
        """The same of one group that all share."""
        return share_of(self.raw_shared[best(self.raw_shared)[0]], self.ours_shared)

    @property
    def digest_share(self) -> float:
        return statistics.median(turn.digest_cpu_s / turn.cpu_s for turn in self.by_default)


def share_of(raw: Sequence[float], turns: Sequence[Turn]) -> float:
    """Return the median share of the raw speed, each turn compared with that of its round."""
    return statistics.median(share(r, t.seconds) for r, t in zip(raw, turns, strict=True))


_group_numbers = itertools.count(1)  # torch wants a new name for each


@dataclass(frozen=True, slots=True)
class _RawGroup:
    """Rank 0 of a group in which nothing but broadcasts happens, and the other members."""

    name: str
    group: dist.ProcessGroup
    receivers: Sequence[str]


class _Relay:
    """The relay's end of the sockets and groups."""

    def __init__(self, socket: zmq.asyncio.Socket, names: Sequence[str]) -> None:
        self._router = MessageRouter(socket)
        self._answers: dict[str, asyncio.Queue[dict[str, float]]] = {
            name: asyncio.Queue(4) for name in names
        }
        self.members = [self._member(name) for name in names]

    def _member(self, name: str) -> Member:
        join = Join(name=name, incarnation="a", device="cpu", torch_version="")
        return Member(
            name.encode(),
            join,
            self._router,
            name=name,
            transport="collective",
            timeout_s=TIMEOUT_S,
        )

    async def read(self) -> None:
        by_name = {member.name: member for member in self.members}

        def take(frames: list[zmq.Frame]) -> None:
            peer, *body = (frame.bytes for frame in frames)
            name, frame = peer.decode(), b"".join(body)
            if frame.startswith(b"!"):
                self._answers[name].put_nowait(json.loads(frame[1:]))
            else:
                message = decode_agent_message(frame)
                if isinstance(message, CommandOutcome):
                    by_name[name].take(message)

        await self._router.run(take)

    async def order(self, name: str, **order: object) -> None:
        self._router.send(name.encode(), b"!" + json.dumps(order).encode())

    async def answers(self) -> list[dict[str, float]]:
        waiting = (queue.get() for queue in self._answers.values())
        return list(await asyncio.wait_for(asyncio.gather(*waiting), TIMEOUT_S))

    async def ask(self, **order: object) -> list[dict[str, float]]:
        for name in self._answers:
            await self.order(name, **order)
        return await self.answers()

    async def join_raw(self, receivers: Sequence[str]) -> _RawGroup:
        size, group_name = len(receivers) + 1, f"raw-{next(_group_numbers)}"
        store = open_store("127.0.0.1", world_size=size, timeout_s=TIMEOUT_S)
        for rank, name in enumerate(receivers, 1):
            await self.order(
                name, do="join", port=store.port, group=group_name, rank=rank, world_size=size
            )
        group = await asyncio.to_thread(join_group, store, group_name, rank=0, world_size=size)
        for name in receivers:
            await self._answers[name].get()
        return _RawGroup(group_name, group, receivers)


@asynccontextmanager
async def _relay(folder: Path, sizes: Sizes, receivers: int) -> AsyncIterator[_Relay]:
    context = zmq.asyncio.Context()
    socket = context.socket(zmq.ROUTER)
    endpoint = f"ipc://{folder}/bus"
    socket.bind(endpoint)
    names = [f"r{index}" for index in range(receivers)]
    relay = _Relay(socket, names)
    reading = asyncio.create_task(relay.read())
    try:
        with drivers(*(Driver(receive, endpoint, name, sizes) for name in names)):
            await relay.answers()  # they are there
            yield relay
            for name in names:
                await relay.order(name, do="end")
    finally:
        reading.cancel()
        with suppress(asyncio.CancelledError):
            await reading
        context.destroy(linger=0)


async def _measure(
    folder: Path, sizes: Sizes, receivers: int, rounds: int, raw_buckets: Sequence[int]
) -> WireFigures:
    made = written_slots(sizes, slots=1)
    layout = sizes.layout()
    memory = SharedSlots.open(made.paths, layout)
    figures = WireFigures(layout.num_bytes, receivers)
    async with _relay(folder, sizes, receivers) as relay:
        publication = Publication(snapshot_of(sizes, memory, bucket_bytes=BUCKET_BYTES, step=0))
        each = await _Groups.of([[member] for member in relay.members], relay, publication)
        shared = await _Groups.of([relay.members], relay, publication) if receivers > 1 else None
        for number in range(-1, rounds):  # the first round warms up
            turn = _Round(sizes, memory, relay, number)
            for size in raw_buckets:
                seconds, cpu_s = await turn.raw(each.raw, size)
                if number >= 0:
                    figures.raw.setdefault(size, []).append(seconds)
                    figures.raw_cpu.setdefault(size, []).append(cpu_s)
            for size in OUR_BUCKETS:
                done = await turn.ours(each.ours, size)
                if number >= 0:
                    figures.ours.setdefault(size, []).append(done)
            if shared is not None:
                for size in raw_buckets:
                    seconds, _ = await turn.raw(shared.raw, size)
                    if number >= 0:
                        figures.raw_shared.setdefault(size, []).append(seconds)
                done = await turn.ours(shared.ours, BUCKET_BYTES)
                if number >= 0:
                    figures.ours_shared.append(done)
        sums = {answer["sum"] for answer in await relay.ask(do="sum")}
        if len(sums) != 1:
            raise RuntimeError("the receivers hold different bytes")
        for groups in (each, shared):
            for collective, _ in groups.ours if groups is not None else ():
                await collective.close()
    made.close()
    memory.close()
    return figures


@dataclass(frozen=True, slots=True)
class _Groups:
    """The same groups twice: for broadcasts alone, and for publishes."""

    raw: Sequence[_RawGroup]
    ours: Sequence[tuple[Collective, Sequence[Member]]]

    @classmethod
    async def of(
        cls, parties: Sequence[Sequence[Member]], relay: _Relay, publication: Publication
    ) -> Self:
        raw = [await relay.join_raw([member.name for member in party]) for party in parties]
        ours = [
            (Collective(WeightBusSection(timeout_s=TIMEOUT_S), RelayState()), party)
            for party in parties
        ]
        for collective, party in ours:
            await collective.prepare(publication, party)
        return cls(raw, ours)


class _Round:
    def __init__(self, sizes: Sizes, memory: SharedSlots, relay: _Relay, number: int) -> None:
        self._sizes, self._memory = sizes, memory
        self._relay, self._number = relay, number

    async def raw(self, groups: Sequence[_RawGroup], bucket_bytes: int) -> tuple[float, float]:
        before = sum(one["cpu_s"] for one in await self._relay.ask(do="cpu"))
        began_cpu_s, began_s = time.process_time(), time.monotonic()
        for one in groups:
            for name in one.receivers:
                await self._relay.order(name, do="raw", group=one.name, bucket_bytes=bucket_bytes)
        memory = self._memory.slot(0)
        sending = [
            threading.Thread(target=raw_broadcasts, args=(memory, one.group, bucket_bytes))
            for one in groups
        ]
        for thread in sending:
            thread.start()
        for thread in sending:
            thread.join()  # without the loop: nothing but broadcasts
        own_cpu_s = time.process_time() - began_cpu_s
        answers = await self._relay.answers()
        seconds = max(one["ended_s"] for one in answers) - began_s
        return seconds, own_cpu_s + sum(one["cpu_s"] for one in answers) - before

    async def ours(
        self, groups: Sequence[tuple[Collective, Sequence[Member]]], bucket_bytes: int
    ) -> Turn:
        snapshot = snapshot_of(
            self._sizes, self._memory, bucket_bytes=bucket_bytes, step=self._number + 1
        )
        publication = Publication(snapshot)
        await self._relay.ask(do="layout", bucket_bytes=bucket_bytes)
        before = sum(one["cpu_s"] for one in await self._relay.ask(do="cpu"))
        began_cpu_s, began_s = time.process_time(), time.monotonic()
        publication.begin_digests()  # while the bytes move
        await asyncio.gather(*(one.load(publication, members) for one, members in groups))
        await publication.manifest()
        seconds, own_cpu_s = time.monotonic() - began_s, time.process_time() - began_cpu_s
        answers = await self._relay.ask(do="cpu")
        began_cpu_s, began_s = time.process_time(), time.monotonic()
        await asyncio.to_thread(snapshot.digests, "xxh3")  # the same by itself
        return Turn(
            seconds=seconds,
            digest_s=time.monotonic() - began_s,
            cpu_s=own_cpu_s + sum(one["cpu_s"] for one in answers) - before,
            digest_cpu_s=time.process_time() - began_cpu_s,
        )


def measure_wire(
    sizes: Sizes, *, receivers: int, rounds: int, raw_buckets: Sequence[int] = RAW_BUCKETS
) -> WireFigures:
    """Publish over a collective in turns with raw broadcasts."""
    gc.freeze()  # as the relay does
    with work_folder() as folder:
        return asyncio.run(_measure(folder, sizes, receivers, rounds, raw_buckets))
