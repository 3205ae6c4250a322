"""The relay's bulk socket: answers requests for the bytes of buckets."""

import logging

import zmq
import zmq.asyncio

from slipstream.weightbus.net.curve import RemoteListener, proved
from slipstream.weightbus.net.traffic import Traffic
from slipstream.weightbus.relay.served import Versions
from slipstream.wire.errors import ProtocolError
from slipstream.wire.messages.codec import decode_fetch, encode
from slipstream.wire.messages.weightbus import BucketAnswer

_log = logging.getLogger(__name__)


async def serve_buckets(
    socket: zmq.asyncio.Socket,
    versions: Versions,
    listener: RemoteListener | None,
    traffic: Traffic,
) -> None:
    """Answer requests for buckets at a ROUTER until cancelled.

    ``listener`` checks the keys of other hosts; None on a Unix socket. ``traffic`` counts.
    """
    while True:
        peer, *frames = await socket.recv_multipart(copy=False)
        if listener is not None and listener.name_of(proved(peer)) is None:
            continue  # it was revoked
        try:
            request = decode_fetch(b"".join(frame.buffer for frame in frames))
        except ProtocolError as error:
            _log.warning("malformed request on the bulk socket: %s", error)
            continue
        data: memoryview | None = None  # not copied
        publication = versions.find(request.version)
        if publication is not None:
            snapshot = publication.snapshot
            if snapshot.has(request.index):
                data = snapshot.bucket(request.index).numpy().data
        answer = BucketAnswer(
            version=request.version,
            index=request.index,
            error="" if data is not None else "it is no longer served",
        )
        if data is None:
            traffic.refused_requests += 1
        else:
            traffic.bucket_requests += 1
            traffic.sent_bytes += data.nbytes
        parts = [peer.bytes, encode(answer)] + ([data] if data is not None else [])
        await socket.send_multipart(parts, copy=False)
