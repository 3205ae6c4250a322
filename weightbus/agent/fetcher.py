"""Fetches the buckets of a version from bulk sockets: the relay's, and those that it names."""

import asyncio
import logging
import math
from collections import Counter
from collections.abc import Callable, Sequence
from itertools import zip_longest
from typing import TypeAlias

import msgspec
import zmq
import zmq.asyncio
from zmq.utils.monitor import recv_monitor_message

from slipstream.weightbus.net.curve import FETCH_AHEAD, connect_to_door, num_connections
from slipstream.weightbus.net.traffic import Traffic
from slipstream.weightbus.version.delta import BucketDelta, num_bytes_of
from slipstream.weightbus.version.digests import kind_of
from slipstream.wire.errors import ConfigError, ProtocolError, PublishError
from slipstream.wire.files.keys import ClientKey
from slipstream.wire.messages.codec import Frame, decode_bucket_answer, encode
from slipstream.wire.messages.manifest import WeightManifest
from slipstream.wire.messages.versions import PolicyVersion
from slipstream.wire.messages.weightbus import BucketAnswer, BulkDoor, FetchBucket, RelayAddress

_log = logging.getLogger(__name__)
_UNIX = "ipc://"
_HEAD_BYTES = 64 << 10  # an answer apart from its bucket; deltas are shorter than the bucket
_NO_DELTAS = msgspec.UNSET
Base: TypeAlias = PolicyVersion | msgspec.UnsetType | None  # type of FetchBucket.base
_GONE = {
    zmq.EVENT_DISCONNECTED: "its connection broke",
    zmq.EVENT_CONNECT_RETRIED: "it cannot be reached",
    zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL: "its handshake failed",
    zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL: "its handshake failed",
    zmq.EVENT_HANDSHAKE_FAILED_AUTH: "it refused our key",
}


class DoorFailedError(PublishError):
    """A door does not give a bucket; another door may."""


class _Connection:
    """One socket, and the requests that wait for answers on it."""

    def __init__(
        self,
        context: zmq.asyncio.Context,
        door: BulkDoor,
        key: ClientKey | None,
        on_break: Callable[[str], None] | None,
        max_bytes: int,
    ) -> None:
        self.waiting: dict[tuple[PolicyVersion, int], asyncio.Future[Frame | BucketDelta]] = {}
        self._socket = context.socket(zmq.DEALER)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._tasks: list[asyncio.Task[None]] = []
        self._monitor: zmq.asyncio.Socket | None = None
        try:
            if on_break is not None:
                self._monitor = self._socket.get_monitor_socket(sum(_GONE))
                self._tasks.append(asyncio.create_task(_watch(self._monitor, on_break)))
            self._proof = connect_to_door(self._socket, door, key, max_bytes=max_bytes)
        except ConfigError:
            self.close()
            raise
        self._tasks.append(asyncio.create_task(self._read()))

    def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        if self._monitor is not None:
            self._socket.disable_monitor()
            self._monitor.close(linger=0)
        self._socket.close()

    def fail(self, error: PublishError) -> None:
        for future in self.waiting.values():
            if not future.done():
                future.set_exception(error)

    async def fetch(
        self, version: PolicyVersion, index: int, base: Base, timeout_s: float
    ) -> Frame | BucketDelta:
        future: asyncio.Future[Frame | BucketDelta] = asyncio.get_running_loop().create_future()
        self.waiting[version, index] = future
        request = encode(FetchBucket(version=version, index=index, base=base))
        frames = [request] if self._proof is None else [self._proof.of(request), request]
        try:
            async with asyncio.timeout(timeout_s):
                await self._socket.send_multipart(frames)
                return await future
        except TimeoutError as error:
            raise DoorFailedError(
                f"bucket {index} of {version.label} did not arrive in {timeout_s:g} s "
                "(weightbus.timeout_s)"
            ) from error
        finally:
            self.waiting.pop((version, index), None)

    async def _read(self) -> None:
        while True:
            head, *frames = await self._socket.recv_multipart(copy=False)
            try:
                answer = decode_bucket_answer(head.buffer)
            except ProtocolError:
                continue  # the request fails at its deadline
            future = self.waiting.get((answer.version, answer.index))
            if future is None or future.done():
                continue
            try:
                future.set_result(_bucket(answer, [frame.buffer for frame in frames]))
            except DoorFailedError as error:
                future.set_exception(error)


def _bucket(answer: BucketAnswer, frames: list[Frame]) -> Frame | BucketDelta:
    if not answer.error and answer.base is not None:
        return BucketDelta(answer.base, answer.num_steps, frozenset(answer.whole), frames)
    if answer.error or len(frames) != 1:
        what = f"bucket {answer.index} of {answer.version.label}"
        raise DoorFailedError(f"{what}: {answer.error or 'no bytes'}")
    return frames[0]


class _OpenDoor:
    """The connections to one door.

    A door that ``heals`` is kept when a connection breaks, and raises ConfigError if it cannot be
    connected to.
    """

    def __init__(
        self,
        context: zmq.asyncio.Context,
        door: BulkDoor,
        key: ClientKey | None,
        *,
        num_connections: int,
        heals: bool,
        max_bytes: int,
    ) -> None:
        self.door = door
        self.max_bytes = max_bytes
        self.failure = ""
        self._connections: list[_Connection] = []
        on_break = None if heals else self._broke
        try:
            for _ in range(num_connections):
                self._connections.append(_Connection(context, door, key, on_break, max_bytes))
        except ConfigError as error:
            self.close()
            if heals:
                raise
            self.failure = str(error)  # another engine named this door: take the next one

    def close(self) -> None:
        self._broke("it was left")  # fails the fetches that still wait there
        for connection in self._connections:
            connection.close()

    def fail(self, error: PublishError) -> None:
        for connection in self._connections:
            connection.fail(error)

    async def fetch(
        self, version: PolicyVersion, index: int, base: Base, timeout_s: float
    ) -> Frame | BucketDelta:
        if self.failure:
            raise DoorFailedError(self.failure)
        connection = min(self._connections, key=lambda one: len(one.waiting))
        return await connection.fetch(version, index, base, timeout_s)

    def _broke(self, why: str) -> None:
        self.failure = why
        self.fail(DoorFailedError(why))


async def _watch(monitor: zmq.asyncio.Socket, on_break: Callable[[str], None]) -> None:
    """Report every connection that breaks or is refused."""
    while True:
        event = await recv_monitor_message(monitor)
        if why := _GONE.get(zmq.Event(event["event"])):
            on_break(why)


class BucketFetcher:
    """An agent's connections to the doors where buckets are. Use it inside one event loop."""

    def __init__(
        self,
        context: zmq.asyncio.Context,
        *,
        timeout_s: float,
        connections: int = 0,
        traffic: Traffic | None = None,
    ) -> None:
        """Connect to nothing yet.

        ``timeout_s`` limits one bucket at its last door, and half of it at the doors before. With 0
        ``connections`` there are as many to a door as ``num_connections`` says; doors of a part
        of the versions alone share them, as no more buckets are fetched at a time.
        """
        self._context = context
        self._max_bytes = _HEAD_BYTES  # largest frame that is expected
        self._timeout_s = timeout_s
        self._num_connections = connections
        self.traffic = traffic or Traffic()
        self.address: RelayAddress | None = None  # the relay's; None before ``connect``
        self._key: ClientKey | None = None
        self._relay: _OpenDoor | None = None
        self.engines: tuple[str, ...] = ()  # addresses that served buckets of the last version
        self._others: dict[BulkDoor, _OpenDoor] = {}

    def connect(self, address: RelayAddress, key: ClientKey | None) -> None:
        """Connect to another relay, or reconnect to the same.

        Raises:
            ConfigError: it requires a key, and no key is given.
        """
        if self._relay is not None:
            self._relay.fail(PublishError("the relay has moved"))
            self._relay.close()
            self._relay = None
        self.address, self._key = address, key
        self._relay = self._open(address.bulk, True)

    def reconnect(self) -> None:
        """Connect again to a relay that requires a key: it may have refused ours before."""
        if self.address is not None and self.address.key:
            self.connect(self.address, self._key)

    def close(self) -> None:
        """Close all connections; pending requests get no answer."""
        self._close_others(set())
        if self._relay is not None:
            self._relay.close()
            self._relay = None

    def drop(self, why: str) -> None:
        """Fail all pending requests: no answer is of use any more."""
        for door in (self._relay, *self._others.values()):
            if door is not None:
                door.fail(PublishError(why))

    def receiving(
        self,
        manifest: WeightManifest,
        sources: Sequence[Sequence[BulkDoor]] = (),
        first_part: int = 0,
    ) -> "Receiving":
        """Prepare to fetch a version; ``sources`` are those of ReceiveVersion.

        Raises:
            PublishError: there is no relay, a part has no door, a door proves no key, or others
                could forge its bytes.
        """
        largest = max((bucket.num_bytes for bucket in manifest.buckets), default=0)
        self._expect(largest + _HEAD_BYTES)
        if self._relay is None:
            raise PublishError("there is no relay to receive from")
        num_parts = 1 + max((bucket.part for bucket in manifest.buckets), default=0)
        wanted = [list(doors) for doors in sources] or [[self._relay.door]] * num_parts
        if len(wanted) < num_parts or not all(wanted):
            raise PublishError(f"a part of {manifest.version.label} has no door")
        self._close_others({door for doors in wanted for door in doors})
        self._refuse_forgeable(manifest, wanted)
        for door, num_of_it in Counter(door for doors in wanted for door in doors).items():
            if door != self._relay.door and door not in self._others:
                if not door.key and not door.endpoint.startswith(_UNIX):
                    raise PublishError(f"{door.endpoint} proves no key")
                self._others[door] = self._open(door, False, num_of_it / len(wanted))
        open_doors = {**self._others, self._relay.door: self._relay}
        return Receiving(
            manifest,
            [[open_doors[door] for door in doors] for doors in wanted],
            order=fetch_order([bucket.part for bucket in manifest.buckets], first_part),
            ahead=max(FETCH_AHEAD, self._connections_to(wanted[0][0])),
            timeout_s=self._timeout_s,
            traffic=self.traffic,
        )

    def _expect(self, max_bytes: int) -> None:
        """Let plain doors accept frames of up to this size."""
        if max_bytes <= self._max_bytes:
            return
        self._max_bytes = max_bytes
        self._close_others({door for door in self._others if not door.is_plain})
        if self.address is not None and self.address.is_bulk_plain:
            self.connect(self.address, self._key)

    def _refuse_forgeable(
        self, manifest: WeightManifest, wanted: Sequence[Sequence[BulkDoor]]
    ) -> None:
        kinds = {kind_of(spec.digest) for spec in manifest.tensors}
        engine = next((door for doors in wanted for door in doors if door.of_engine), None)
        if engine is not None and kinds != {"blake2b"}:
            raise PublishError(
                f"{engine.endpoint} is another generator's, which can make bytes that fit the "
                f"digests of {manifest.version.label} ({', '.join(sorted(kinds))}): with chains "
                'weightbus.digests is "blake2b" at the learner'
            )
        plain = next((door for doors in wanted for door in doors if door.is_plain), None)
        if plain is not None and "xxh3" in kinds:
            raise PublishError(
                f"{plain.endpoint} is not encrypted, and {manifest.version.label} has digests of "
                'which others can make bytes that fit: set weightbus.digests = "keyed" or '
                '"blake2b" at the learner'
            )

    def _open(self, door: BulkDoor, heals: bool, share: float = 1.0) -> _OpenDoor:
        """Connect to a door that has this share of the parts of a version."""
        number = self._connections_to(door)
        if not self._num_connections:
            number = max(1, math.ceil(number * share))
        return _OpenDoor(
            self._context,
            door,
            self._key,
            num_connections=number,
            heals=heals,
            max_bytes=self._max_bytes,
        )

    def _connections_to(self, door: BulkDoor) -> int:
        return num_connections(self._num_connections, is_far=bool(door.key))

    def _close_others(self, wanted: set[BulkDoor]) -> None:
        """Close doors that are not wanted, and those that failed."""
        for door, opened in list(self._others.items()):
            if opened.failure or door not in wanted:
                self._others.pop(door).close()


class Receiving:
    """One version on its way: which door is asked for which bucket.

    A door that fails is replaced by the next one, for every bucket that is still missing.
    """

    def __init__(
        self,
        manifest: WeightManifest,
        doors: list[list[_OpenDoor]],
        *,
        order: list[int],
        ahead: int,
        timeout_s: float,
        traffic: Traffic,
    ) -> None:
        self.order = order  # indices of buckets, in the order of fetching
        self.ahead = ahead  # buckets to fetch at a time
        self._manifest = manifest
        self._doors = doors  # doors by part; the first is in use
        self._timeout_s = timeout_s
        self._traffic = traffic
        self._served: dict[int, _OpenDoor] = {}

    @property
    def engines(self) -> tuple[str, ...]:
        """Addresses of other engines that have served buckets of this version."""
        doors = {door.door for door in self._served.values() if door.door.of_engine}
        return tuple(sorted(door.endpoint for door in doors))

    async def fetch(self, index: int, base: Base = _NO_DELTAS) -> Frame | BucketDelta:
        """Return the bytes of a bucket from the first door that has them, or its deltas.

        ``base`` is that of FetchBucket. Only relays answer with deltas.

        Raises:
            PublishError: the last door gave neither.
        """
        doors = self._doors[self._manifest.buckets[index].part]
        while True:
            door, is_last = doors[0], len(doors) == 1
            try:
                timeout_s = self._timeout_s if is_last else self._timeout_s / 2
                data = await door.fetch(self._manifest.version, index, base, timeout_s)
            except DoorFailedError as error:
                if is_last:
                    raise
                self._leave(door, str(error))
                continue
            self._served[index] = door
            num_bytes = num_bytes_of(data)
            if is_last:
                self._traffic.relay_bytes += num_bytes
            else:
                self._traffic.forwarded_bytes += num_bytes
            return data

    def rejected(self, index: int, why: str) -> bool:
        """Leave the door whose bytes were wrong; False if there is no other."""
        self._traffic.rejected_buckets += 1
        door = self._served.pop(index)
        doors = self._doors[self._manifest.buckets[index].part]
        if doors[0] is door and len(doors) == 1:
            return False
        self._leave(door, f"bucket {index} was wrong: {why}")
        return True

    def _leave(self, door: _OpenDoor, why: str) -> None:
        """Leave a door in every part that has another one."""
        is_news = False
        for doors in self._doors:
            if doors[0] is door and len(doors) > 1:
                del doors[0]
                is_news = True
        if is_news:
            self._traffic.left_doors += 1
            _log.warning(
                "%s is left, %s comes from the next: %s",
                door.door.endpoint,
                self._manifest.version.label,
                why,
            )


def fetch_order(parts: Sequence[int], first_part: int) -> list[int]:
    """Return indices of buckets in the order of fetching: parts take turns from the first on."""
    by_part: dict[int, list[int]] = {}
    for index, part in enumerate(parts):
        by_part.setdefault(part, []).append(index)
    numbers = sorted(by_part)
    at = first_part % len(numbers) if numbers else 0
    turns = zip_longest(*(by_part[part] for part in numbers[at:] + numbers[:at]))
    return [index for turn in turns for index in turn if index is not None]
