"""How a role talks to the broker: one request, one answer, with deadlines."""

import asyncio
import logging
from collections.abc import Sequence
from itertools import count
from typing import Self, TypeVar

import zmq
import zmq.asyncio

from wire.codec import Frame, decode_answer, encode
from wire.control import Answer, Hello, Refusal, Request, Role, Welcome
from wire.errors import ConfigError, PeerLostError, ProtocolError, RefusedError

_log = logging.getLogger(__name__)
A = TypeVar("A", bound=Answer)
_SEND_LIMIT = 1_000


class BrokerClient:
    """A DEALER socket with many requests in flight. Use it from one event loop."""

    def __init__(self, endpoint: str, *, timeout_s: float = 60.0) -> None:
        self._endpoint = endpoint
        self._timeout_s = timeout_s
        self._context = zmq.asyncio.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.SNDHWM, _SEND_LIMIT)
        self._ids = count(1)
        self._pending: dict[bytes, asyncio.Future[tuple[Answer, list[Frame]]]] = {}
        self._receiver: asyncio.Task[None] | None = None

    @classmethod
    async def connect(
        cls,
        endpoint: str,
        *,
        role: Role,
        name: str,
        packages: dict[str, str] | None = None,
        tokenizer: str = "",
        timeout_s: float = 60.0,
    ) -> tuple[Self, Welcome]:
        """Return a client that the broker welcomed; ``tokenizer`` is a tokenizer_hash.

        Raises:
            PeerLostError: no broker answers within ``timeout_s``.
            ConfigError: the broker does not want this client: another wire revision, another
                tokenizer.
        """
        client = cls(endpoint, timeout_s=timeout_s)
        client._socket.connect(endpoint)
        client._receiver = asyncio.create_task(client._receive())
        hello = Hello(role=role, name=name, packages=packages or {}, tokenizer=tokenizer)
        try:
            welcome, _ = await client.ask(hello, Welcome)
        except RefusedError as error:
            client.close()
            raise ConfigError(str(error)) from error
        except BaseException:
            client.close()
            raise
        return client, welcome

    async def ask(
        self,
        request: Request,
        kind: type[A],
        *,
        frames: Sequence[Frame] = (),
        extra_wait_s: float = 0.0,
    ) -> tuple[A, list[Frame]]:
        """Send a request and return its answer, which must be of the given kind.

        Raises:
            RefusedError: the broker refused, with its reason.
            PeerLostError: no answer in time.
        """
        answer, attached = await self.ask_any(request, frames=frames, extra_wait_s=extra_wait_s)
        if not isinstance(answer, kind):
            raise ProtocolError(f"{type(request).__name__} was answered by {answer!r}")
        return answer, attached

    async def ask_any(
        self, request: Request, *, frames: Sequence[Frame] = (), extra_wait_s: float = 0.0
    ) -> tuple[Answer, list[Frame]]:
        """Send a request that has answers of several kinds; a refusal is raised."""
        request_id = next(self._ids).to_bytes(8, "big")
        future: asyncio.Future[tuple[Answer, list[Frame]]] = (
            asyncio.get_running_loop().create_future()
        )
        self._pending[request_id] = future
        what = type(request).__name__
        try:
            async with asyncio.timeout(self._timeout_s + extra_wait_s):
                await self._socket.send_multipart([request_id, encode(request), *frames])
                answer, attached = await future
        except TimeoutError as error:
            raise PeerLostError(
                f"the broker at {self._endpoint} did not answer {what} "
                f"within {self._timeout_s + extra_wait_s:.0f} s"
            ) from error
        finally:
            self._pending.pop(request_id, None)
        if isinstance(answer, Refusal):
            raise RefusedError(f"the broker refused {what}: {answer.reason}")
        return answer, attached

    async def _receive(self) -> None:
        while True:
            request_id, body, *attached = await self._socket.recv_multipart(copy=False)
            future = self._pending.get(request_id.bytes)
            if future is None or future.done():
                continue  # its deadline has passed
            try:
                answer = decode_answer(body.buffer)
            except ProtocolError as error:
                future.set_exception(error)
            else:
                future.set_result((answer, [frame.buffer for frame in attached]))

    def close(self) -> None:
        """Drop the connection."""
        if self._receiver is not None:
            self._receiver.cancel()
        self._socket.close()
        self._context.term()
