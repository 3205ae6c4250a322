"""The relay's bulk socket: answers requests for the bytes of buckets."""

import asyncio
import logging

import msgspec
import zmq
import zmq.asyncio

from slipstream.weightbus.net.curve import RemoteListener
from slipstream.weightbus.net.traffic import Traffic
from slipstream.weightbus.relay.deltas import Deltas
from slipstream.weightbus.relay.publication import Publication
from slipstream.weightbus.relay.served import Versions
from slipstream.wire.errors import ProtocolError
from slipstream.wire.messages.codec import Frame, decode_fetch, encode
from slipstream.wire.messages.weightbus import BucketAnswer, FetchBucket
from slipstream.wire.process.rate_limited_log import RateLimitedLog

_log = logging.getLogger(__name__)
_malformed = RateLimitedLog(_log)
_MAX_WAITING = 4_096  # requests; further ones get whole buckets


async def serve_buckets(
    socket: zmq.asyncio.Socket,
    versions: Versions,
    deltas: Deltas,
    listener: RemoteListener | None,
    traffic: Traffic,
) -> None:
    """Answer requests for buckets at a ROUTER until cancelled.

    ``listener`` checks the keys of other hosts; None on a Unix socket. ``traffic`` counts answers.
    """

    async def answer_later(peer: bytes, key: str, request: FetchBucket) -> None:
        answer, frames = await _with_deltas(request, versions, deltas)
        if listener is None or listener.name_of(key) is not None:  # not revoked meanwhile
            await _send(socket, peer, answer, frames, traffic)

    async with asyncio.TaskGroup() as group:
        waiting: set[asyncio.Task[None]] = set()  # answers whose deltas are being computed
        while True:
            peer, *frames = await socket.recv_multipart(copy=False)
            key, body = "", b""
            if listener is None:
                body = b"".join(frame.buffer for frame in frames)
            elif (received := listener.admitted_request(peer, frames)) is not None:
                key, body = received
            else:
                continue  # its key was revoked, or never admitted
            try:
                request = decode_fetch(body)
            except ProtocolError as error:
                _malformed.say("malformed request on the bulk socket: %s", error)
                continue
            if request.base is msgspec.UNSET or len(waiting) >= _MAX_WAITING:
                await _send(socket, peer.bytes, *whole(request, versions), traffic)
                continue
            task = group.create_task(answer_later(peer.bytes, key, request))
            waiting.add(task)
            task.add_done_callback(waiting.discard)


async def _with_deltas(
    request: FetchBucket, versions: Versions, deltas: Deltas
) -> tuple[BucketAnswer, list[Frame]]:
    """Return the answer to a request with a base, once its deltas are ready or will not come."""
    publication = bucket_of(request, versions)
    found = await deltas.delta(request, publication) if publication is not None else None
    if found is None or bucket_of(request, versions) is not publication:
        return whole(request, versions)
    answer = BucketAnswer(
        version=request.version,
        index=request.index,
        base=found.base,
        num_steps=found.num_steps,
        whole=tuple(sorted(found.whole)),
    )
    return answer, found.frames


def bucket_of(request: FetchBucket, versions: Versions) -> Publication | None:
    """Return the version with the requested bucket; None if it is not served."""
    publication = versions.find(request.version)
    if publication is None or not publication.snapshot.has(request.index):
        return None
    return publication


def whole(request: FetchBucket, versions: Versions) -> tuple[BucketAnswer, list[Frame]]:
    """Return the answer with all bytes of a bucket, without copying them."""
    publication = bucket_of(request, versions)
    error = "" if publication is not None else "it is no longer served"
    answer = BucketAnswer(version=request.version, index=request.index, error=error)
    if publication is None:
        return answer, []
    return answer, [publication.snapshot.bucket(request.index).numpy().data]


async def _send(
    socket: zmq.asyncio.Socket,
    peer: bytes,
    answer: BucketAnswer,
    frames: list[Frame],
    traffic: Traffic,
) -> None:
    if answer.error:
        traffic.refused_requests += 1
    else:
        traffic.bucket_requests += 1
        traffic.sent_bytes += sum(memoryview(frame).nbytes for frame in frames)
    await socket.send_multipart([peer, encode(answer), *frames], copy=False)
