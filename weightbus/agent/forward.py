"""An agent's door for other engines: serves the buckets that it has received and verified.

The relay decides which engines get which version (Admit). A request for a missing bucket waits.
Requests and copies of buckets on their way are bounded in number, and waiting in time.
"""

import asyncio
import logging
import weakref
from collections.abc import Callable

import numpy as np
import zmq
import zmq.asyncio

from slipstream.weightbus.agent.staging import Staging
from slipstream.weightbus.net.curve import ForwardListener
from slipstream.weightbus.net.proofs import DoorRefusals
from slipstream.weightbus.net.traffic import Traffic
from slipstream.wire.errors import ProtocolError, PublishError
from slipstream.wire.messages.codec import decode_fetch, encode
from slipstream.wire.messages.versions import PolicyVersion
from slipstream.wire.messages.weightbus import BucketAnswer, BulkDoor, FetchBucket
from slipstream.wire.process.rate_limited_log import RateLimitedLog

_log = logging.getLogger(__name__)
_malformed = RateLimitedLog(_log)
MAX_REQUESTS = 64  # being answered at a time; more are refused
_MAX_COPIES = 16  # buckets that no peer has taken yet


class Forwarder:
    """Serves what is in ``staging``. Use it inside one event loop."""

    def __init__(
        self,
        listen: str,
        staging: Staging,
        *,
        patience_s: float,
        traffic: Traffic,
        is_relay_heard: Callable[[], bool],
        is_plain: bool = False,
    ) -> None:
        """Make a key; ``open`` listens at ``listen``, tcp://ADDRESS:PORT, unencrypted if plain.

        A request waits at most ``patience_s``. No request is served while the relay is silent.
        """
        self._listener = ForwardListener(listen, is_plain=is_plain, refusals=DoorRefusals(traffic))
        self._staging = staging
        self._patience_s = patience_s
        self._traffic = traffic
        self._is_relay_heard = is_relay_heard
        self._version: PolicyVersion | None = None  # the only version served
        self._socket: zmq.asyncio.Socket | None = None
        self._copies = asyncio.Semaphore(_MAX_COPIES)

    def open(self, context: zmq.asyncio.Context) -> BulkDoor:
        """Listen; return the door for others. No key is admitted yet.

        Raises:
            ConfigError: the address cannot be bound.
        """
        self._socket, door = self._listener.open(context)
        _log.info("other engines may get buckets at %s", door.endpoint)
        return door

    def admit(self, version: PolicyVersion, keys: tuple[str, ...]) -> None:
        """Serve only this version, and only to the holders of these keys."""
        self._version = version
        self._listener.admit({key: key for key in keys})

    def close(self) -> None:
        """Stop listening."""
        self._listener.close()
        self._socket = None

    async def run(self) -> None:
        """Answer requests at the open door until cancelled."""
        if (socket := self._socket) is None:
            return
        num_open = 0
        async with asyncio.TaskGroup() as group:
            while True:
                peer, *frames = await socket.recv_multipart(copy=False)
                if (received := self._listener.request(peer, frames)) is None:
                    continue
                key, body = received
                try:
                    request = decode_fetch(body)
                except ProtocolError as error:
                    _malformed.say("malformed request for a bucket: %s", error)
                    continue
                if why := self._why_not(key, request):
                    await self._refuse(socket, peer.bytes, request, why)
                elif num_open >= MAX_REQUESTS:
                    await self._refuse(socket, peer.bytes, request, "too many requests wait")
                else:
                    num_open += 1
                    task = group.create_task(self._answer(socket, peer.bytes, key, request))

                    def ended(_task: "asyncio.Task[None]") -> None:
                        nonlocal num_open
                        num_open -= 1

                    task.add_done_callback(ended)

    def _why_not(self, key: str, request: FetchBucket) -> str:
        """Return why a key does not get a bucket; empty if it does."""
        if self._listener.name_of(key) is None or request.version != self._version:
            return "the relay did not admit this"
        if not self._is_relay_heard():
            return "the relay that admitted this is silent"
        return ""

    async def _answer(
        self, socket: zmq.asyncio.Socket, peer: bytes, key: str, request: FetchBucket
    ) -> None:
        try:
            async with asyncio.timeout(self._patience_s):
                place = await self._staging.held.until(request.version, request.index)
                await self._copies.acquire()
        except TimeoutError:
            why = f"it is not here after {self._patience_s:g} s"
            await self._refuse(socket, peer, request, why)
            return
        except PublishError as error:
            await self._refuse(socket, peer, request, str(error))
            return
        # Copy: the memory may be written again while the bytes are on their way.
        copy = np.empty(place.num_bytes, dtype=np.uint8)
        loop = asyncio.get_running_loop()
        # ZeroMQ drops the copy once it is sent.
        weakref.finalize(copy, _release, loop, self._copies).atexit = False
        await asyncio.to_thread(self._staging.read_into, copy.data, place.start)
        why = self._why_not(key, request)  # the key may have been revoked meanwhile
        if not why and not self._staging.held.holds(request.version, request.index):
            why = "another version took its place"
        if why:
            await self._refuse(socket, peer, request, why)
            return
        self._traffic.bucket_requests += 1
        self._traffic.copied_bytes += copy.nbytes
        self._traffic.sent_bytes += copy.nbytes
        answer = encode(BucketAnswer(version=request.version, index=request.index))
        await socket.send_multipart([peer, answer, copy.data], copy=False)

    async def _refuse(
        self, socket: zmq.asyncio.Socket, peer: bytes, request: FetchBucket, why: str
    ) -> None:
        self._traffic.refused_requests += 1
        answer = BucketAnswer(version=request.version, index=request.index, error=why)
        await socket.send_multipart([peer, encode(answer)])


def _release(loop: asyncio.AbstractEventLoop, copies: asyncio.Semaphore) -> None:
    """Free the place of a copy; any thread."""
    if not loop.is_closed():
        loop.call_soon_threadsafe(copies.release)
