"""A ROUTER socket on the event loop: what has arrived is handed over at once, many to a wake-up."""

import asyncio
from collections.abc import Callable, Sequence
from typing import NamedTuple

import zmq

from wire.codec import Frame

_BURST = 64  # messages handed over before other work gets its turn
_SEND_LIMIT = 4_000  # answers that wait for one peer; it asked for every one of them
_NOW = int(zmq.NOBLOCK)  # plain numbers: joining flags of an enum costs more than a small send
_NOW_AND_MORE = int(zmq.NOBLOCK | zmq.SNDMORE)
_LARGE_BYTES = 8 * 1024
_HANDSHAKE_MS = 5_000  # whoever has connected has so long to prove its key
_BACKLOG = 1_024  # connections that wait to be taken


class Peer(NamedTuple):
    """One connection. ``key`` is the public key that it proved; empty on a Unix socket."""

    router: "Router"
    routing_id: bytes
    key: str = ""

    def send(self, frames: Sequence[Frame]) -> bool:
        """Send one message; False if nobody is there or reads it."""
        return self.router.send([self.routing_id, *frames])


OnMessage = Callable[[Peer, Sequence[zmq.Frame]], None]


class Router:
    """Receives and sends without waiting. Use it from one event loop.

    The socket's file descriptor tells of changes only (it is edge-triggered), so whoever has
    received or sent looks again.
    """

    def __init__(
        self,
        context: "zmq.Context[zmq.Socket[bytes]]",
        endpoint: str,
        *,
        max_message_bytes: int,
        on_message: OnMessage,
        secret_key: bytes = b"",
    ) -> None:
        """Bind a socket.

        Args:
            context: of the process.
            endpoint: where clients connect.
            max_message_bytes: a connection that sends a larger frame is closed.
            on_message: is given each message without its routing id.
            secret_key: of the broker; if given, connections have to prove a key of their own.
        """
        self._on_message = on_message
        self._is_secure = bool(secret_key)
        self._loop = asyncio.get_running_loop()
        self._look_again: asyncio.Handle | None = None
        self._is_paused = False
        self._socket = context.socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.MAXMSGSIZE, max_message_bytes)
        self._socket.setsockopt(zmq.ROUTER_MANDATORY, 1)  # an answer to nobody is an error
        self._socket.setsockopt(zmq.SNDHWM, _SEND_LIMIT)
        self._socket.setsockopt(zmq.HANDSHAKE_IVL, _HANDSHAKE_MS)
        self._socket.setsockopt(zmq.BACKLOG, _BACKLOG)
        if secret_key:
            self._socket.curve_secretkey = secret_key
            self._socket.curve_server = True
            self._socket.zap_domain = b"slipstream"
        self._socket.bind(endpoint)
        self.endpoint = self._socket.getsockopt_string(zmq.LAST_ENDPOINT)
        self._fd = int(self._socket.getsockopt(zmq.FD))
        self._loop.add_reader(self._fd, self._receive)
        self._look()

    def send(self, frames: Sequence[Frame]) -> bool:
        """Send one message; False if its peer is gone or reads nothing."""
        last = len(frames) - 1
        try:
            for i, frame in enumerate(frames):
                self._send_part(frame, _NOW if i == last else _NOW_AND_MORE)
        except zmq.ZMQError as error:
            if error.errno in {zmq.EHOSTUNREACH, zmq.EAGAIN}:
                return False
            raise
        finally:
            self._look()
        return True

    def _send_part(self, frame: Frame, flags: int) -> None:
        if len(frame) < _LARGE_BYTES:
            self._socket.send(frame, flags)
        elif isinstance(frame, memoryview) and _is_whole(frame.obj, len(frame)):
            self._socket.send(frame.obj, flags, copy=False)  # shared, not copied
        else:
            self._socket.send(frame, flags, copy=False)

    @property
    def is_paused(self) -> bool:
        """Tell whether nothing is received."""
        return self._is_paused

    def pause(self) -> None:
        """Receive nothing more: what peers send waits with them."""
        if not self._is_paused:
            self._is_paused = True
            self._loop.remove_reader(self._fd)  # what arrives would wake the loop all the time

    def resume(self) -> None:
        """Receive again."""
        if self._is_paused:
            self._is_paused = False
            self._loop.add_reader(self._fd, self._receive)
            self._look()

    def close(self) -> None:
        """Let go of the socket."""
        self._is_paused = True
        self._loop.remove_reader(self._fd)
        if self._look_again is not None:
            self._look_again.cancel()
        self._socket.close()

    def _look(self) -> None:
        if self._look_again is None:
            self._look_again = self._loop.call_soon(self._receive)

    def _receive(self) -> None:
        if self._look_again is not None:
            self._look_again.cancel()
            self._look_again = None
        for _ in range(_BURST):
            if self._is_paused:
                return
            try:
                frames = [self._socket.recv(_NOW, copy=False)]
            except zmq.Again:
                return
            while frames[-1].more:
                frames.append(self._socket.recv(_NOW, copy=False))
            key = str(frames[0].get("User-Id")) if self._is_secure else ""
            try:
                self._on_message(Peer(self, frames[0].bytes, key), frames[1:])
            except BaseException:
                self._look()  # nothing else would tell of what waits behind this message
                raise
        self._look()


def _is_whole(source: object, num_bytes: int) -> bool:
    """Tell whether a view of so many bytes is all of a frame that was received."""
    return isinstance(source, zmq.Frame) and len(source) == num_bytes
