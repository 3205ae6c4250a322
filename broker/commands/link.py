"""A worker's connection to a command server: one request, one answer, whatever dies meanwhile.

Every request may be repeated, so it is sent again over each new connection, and when its answer
does not come.
"""

import asyncio
import time
from collections.abc import Sequence
from contextlib import suppress
from itertools import count
from pathlib import Path

import zmq
import zmq.asyncio
from zmq.utils.monitor import parse_monitor_message

from slipstream.broker.listening.curve import ping, prove_key
from slipstream.wire.errors import PeerLostError, RefusedError
from slipstream.wire.files.keys import read_client_key
from slipstream.wire.messages.codec import Frame, decode_worker_answer, encode
from slipstream.wire.messages.commands import WorkerAnswer, WorkerRefused, WorkerRequest
from slipstream.wire.messages.pieces import cut, joined
from slipstream.wire.settings.sections import RunSection

_REPEAT_S = 20.0  # beyond the wait that a request asks for
_PING_MS, _DEAD_AFTER_MS = 2_000, 10_000
Answered = tuple[WorkerAnswer, list[Frame]]


class CommandLink:
    """A DEALER socket. Use it in one event loop, where it was made; close it."""

    def __init__(self, run: RunSection) -> None:
        """Begin to connect to the command server of a run.

        Raises:
            ConfigError: the key of this host cannot be read.
        """
        self._outage_s = run.outage_s
        self._context = zmq.asyncio.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.RECONNECT_IVL, 50)
        self._socket.setsockopt(zmq.RECONNECT_IVL_MAX, 1_000)
        ping(self._socket, every_ms=_PING_MS, dead_after_ms=_DEAD_AFTER_MS)
        if run.broker:
            key = read_client_key(Path(run.key_file))
            prove_key(self._socket, key, server_key=key.broker)
        self._monitor = self._socket.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED)
        self._socket.connect(run.broker_endpoint)
        self._ids = count(1)
        self._waiting: dict[bytes, asyncio.Future[Answered]] = {}
        self._again = asyncio.Event()
        self._tasks = [asyncio.create_task(job) for job in (self._receive(), self._watch())]

    def close(self) -> None:
        """Close the connection."""
        for task in self._tasks:
            task.cancel()
        self._socket.disable_monitor()
        self._monitor.close(0)
        self._context.destroy(0)

    async def ask(self, request: WorkerRequest, *frames: Frame, wait_s: float = 0.0) -> Answered:
        """Return the answer to a request, which may wait for ``wait_s``.

        Raises:
            RefusedError: the server refuses it.
            PeerLostError: no server answers within run.outage_s.
        """
        give_up_s = time.monotonic() + self._outage_s + wait_s
        pieces = cut([encode(request), *frames])
        while time.monotonic() < give_up_s:
            answer = await self._asked(pieces, wait_s + _REPEAT_S)
            if answer is None:
                continue
            if isinstance(answer[0], WorkerRefused):
                raise RefusedError(f"the command server refused it: {answer[0].reason}")
            return answer
        raise PeerLostError(
            f"the command server did not answer {type(request).__name__} within "
            f"{self._outage_s:.0f} s (run.outage_s)"
        )

    async def _asked(self, pieces: Sequence[Frame], wait_s: float) -> Answered | None:
        """Return the answer; None if it did not come, or came over a former connection."""
        request_id = next(self._ids).to_bytes(8, "big")
        answered = asyncio.get_running_loop().create_future()
        self._waiting[request_id] = answered
        reconnected = asyncio.ensure_future(self._again.wait())
        try:
            async with asyncio.timeout(wait_s):
                await self._socket.send_multipart([request_id, *pieces])
                await asyncio.wait({answered, reconnected}, return_when=asyncio.FIRST_COMPLETED)
                return answered.result() if answered.done() else None
        except TimeoutError:
            return None
        finally:
            reconnected.cancel()
            self._waiting.pop(request_id, None)

    async def _receive(self) -> None:
        while True:
            request_id, *pieces = await self._socket.recv_multipart(copy=False)
            future = self._waiting.get(request_id.bytes)
            if future is None or future.done():
                continue
            body, *attached = joined([piece.buffer for piece in pieces])
            future.set_result((decode_worker_answer(body), attached))

    async def _watch(self) -> None:
        """Have requests sent again over a new connection."""
        with suppress(asyncio.CancelledError):
            while True:
                parse_monitor_message(await self._monitor.recv_multipart())
                self._again.set()
                self._again = asyncio.Event()
