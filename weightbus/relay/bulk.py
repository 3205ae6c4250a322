"""The relay's bulk socket: the bytes of buckets, to whoever asks for one."""

import logging

import zmq
import zmq.asyncio

from slipstream.weightbus.net.curve import FarDoor
from slipstream.weightbus.relay.served import Versions
from slipstream.wire.errors import ProtocolError
from slipstream.wire.messages.codec import decode_fetch, encode
from slipstream.wire.messages.weightbus import BucketAnswer, FetchBucket

_log = logging.getLogger(__name__)


async def serve_buckets(
    socket: zmq.asyncio.Socket, versions: Versions, door: FarDoor | None
) -> None:
    """Answer requests for buckets until cancelled.

    Args:
        socket: a ROUTER.
        versions: what there is.
        door: knows who may ask; None on a Unix socket.
    """
    while True:
        peer, *frames = await socket.recv_multipart(copy=False)
        if door is not None and door.name_of(proved(peer)) is None:
            continue  # it was revoked
        try:
            request = decode_fetch(b"".join(frame.buffer for frame in frames))
        except ProtocolError as error:
            _log.warning("malformed request on the bulk socket: %s", error)
            continue
        data = _find(request, versions)
        answer = BucketAnswer(
            version=request.version,
            index=request.index,
            error="" if data is not None else "it is not served any more",
        )
        parts = [peer.bytes, encode(answer)] + ([data] if data is not None else [])
        await socket.send_multipart(parts, copy=False)


def proved(frame: zmq.Frame) -> str:
    """Return the public key (Z85) that the sender of a frame proved."""
    return str(frame.get("User-Id"))


def _find(request: FetchBucket, versions: Versions) -> memoryview | None:
    """Return a bucket where it lies."""
    publication = versions.find(request.version)
    if publication is None or not 0 <= request.index < len(publication.snapshot.layout.buckets):
        return None
    return publication.snapshot.bucket(request.index).numpy().data
