"""Fetches the buckets of a version from the relay's bulk socket."""

import asyncio

import zmq
import zmq.asyncio

from wire.bus import FetchBucket
from wire.codec import Frame, decode_bucket_answer, encode
from wire.errors import ProtocolError, PublishError
from wire.versions import PolicyVersion


class BucketFetcher:
    """One connection to a relay. Use it inside one event loop."""

    def __init__(self, context: zmq.asyncio.Context, *, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self.socket = context.socket(zmq.DEALER)
        self.socket.setsockopt(zmq.LINGER, 0)
        self._waiting: dict[tuple[PolicyVersion, int], asyncio.Future[Frame]] = {}
        self._reader = asyncio.create_task(self._read())

    def close(self) -> None:
        """End whatever waits."""
        self._reader.cancel()
        self.socket.close()

    async def fetch(self, version: PolicyVersion, index: int) -> Frame:
        """Return the bytes of a bucket.

        Raises:
            PublishError: the relay does not serve it any more, or not in time.
        """
        key = (version, index)
        future: asyncio.Future[Frame] = asyncio.get_running_loop().create_future()
        self._waiting[key] = future
        try:
            await self.socket.send(encode(FetchBucket(version=version, index=index)))
            return await asyncio.wait_for(future, self._timeout_s)
        except TimeoutError as error:
            raise PublishError(
                f"bucket {index} of {version.label} did not come in {self._timeout_s:g} s "
                "(weightbus.timeout_s)"
            ) from error
        finally:
            self._waiting.pop(key, None)

    def drop(self, why: str) -> None:
        """Fail whoever waits: no answer will come."""
        for future in self._waiting.values():
            if not future.done():
                future.set_exception(PublishError(why))

    async def _read(self) -> None:
        while True:
            head, *frames = await self.socket.recv_multipart(copy=False)
            try:
                answer = decode_bucket_answer(head.buffer)
            except ProtocolError:
                continue  # whoever waits for it runs into its deadline
            future = self._waiting.get((answer.version, answer.index))
            if future is None or future.done():
                continue
            if answer.error or len(frames) != 1:
                what = f"bucket {answer.index} of {answer.version.label}"
                future.set_exception(PublishError(f"{what}: {answer.error or 'no bytes'}"))
            else:
                future.set_result(frames[0].buffer)
