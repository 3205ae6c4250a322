"""Fetches the buckets of a version from the relay's bulk socket."""

import asyncio

import zmq
import zmq.asyncio

from slipstream.weightbus.net.curve import connect
from slipstream.wire.errors import ProtocolError, PublishError
from slipstream.wire.files.keys import ClientKey
from slipstream.wire.messages.codec import Frame, decode_bucket_answer, encode
from slipstream.wire.messages.versions import PolicyVersion
from slipstream.wire.messages.weightbus import FetchBucket, RelayAddress


class BucketFetcher:
    """One connection to a relay. Use it inside one event loop."""

    def __init__(self, context: zmq.asyncio.Context, *, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._socket = context.socket(zmq.DEALER)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._address: RelayAddress | None = None
        self._key: ClientKey | None = None
        self._waiting: dict[tuple[PolicyVersion, int], asyncio.Future[Frame]] = {}
        self._reader = asyncio.create_task(self._read())

    def connect(self, address: RelayAddress, key: ClientKey | None) -> None:
        """Connect to another address, or reconnect to the same."""
        if self._address is not None:
            self._socket.disconnect(self._address.bulk_endpoint)
        self._address, self._key = address, key
        endpoint = address.bulk_endpoint
        connect(self._socket, endpoint, server_key=address.key, key=key, has_buckets=True)

    def reconnect(self) -> None:
        """Connect again to a relay that requires a key: it may have refused ours before."""
        if self._address is not None and self._address.key:
            self.connect(self._address, self._key)

    def close(self) -> None:
        """Close the connection; pending requests get no answer."""
        self._reader.cancel()
        self._socket.close()

    async def fetch(self, version: PolicyVersion, index: int) -> Frame:
        """Return the bytes of a bucket.

        Raises:
            PublishError: the relay no longer serves it, or did not answer in time.
        """
        key = (version, index)
        future: asyncio.Future[Frame] = asyncio.get_running_loop().create_future()
        self._waiting[key] = future
        try:
            await self._socket.send(encode(FetchBucket(version=version, index=index)))
            async with asyncio.timeout(self._timeout_s):
                return await future
        except TimeoutError as error:
            raise PublishError(
                f"bucket {index} of {version.label} did not arrive in {self._timeout_s:g} s "
                "(weightbus.timeout_s)"
            ) from error
        finally:
            self._waiting.pop(key, None)

    def drop(self, why: str) -> None:
        """Fail all pending requests: no answer will arrive."""
        for future in self._waiting.values():
            if not future.done():
                future.set_exception(PublishError(why))

    async def _read(self) -> None:
        while True:
            head, *frames = await self._socket.recv_multipart(copy=False)
            try:
                answer = decode_bucket_answer(head.buffer)
            except ProtocolError:
                continue  # the request fails at its deadline
            future = self._waiting.get((answer.version, answer.index))
            if future is None or future.done():
                continue
            if answer.error or len(frames) != 1:
                what = f"bucket {answer.index} of {answer.version.label}"
                future.set_exception(PublishError(f"{what}: {answer.error or 'no bytes'}"))
            else:
                future.set_result(frames[0].buffer)
