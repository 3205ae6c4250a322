"""A ROUTER socket on the event loop: messages are handed over at once, many per wake-up."""

import asyncio
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple

import zmq

from slipstream.broker.curve import ping, require_keys
from slipstream.broker.server.gate import ConnectionCount, Gate, TcpGate, UnixGate, listening_socket
from slipstream.wire.messages.codec import Frame
from slipstream.wire.messages.pieces import PIECE_BYTES

_BURST = 64  # messages handed over before other work gets its turn
_SEND_LIMIT = 4_000  # answers that wait for one peer; it requested every one
_NOW = int(zmq.NOBLOCK)  # plain numbers: joining flags of an enum costs more than a small send
_NOW_AND_MORE = int(zmq.NOBLOCK | zmq.SNDMORE)
_LARGE_BYTES = 8 * 1024
_HANDSHAKE_MS = 5_000  # a connection has so long to prove its key
_HEARTBEAT_MS = 10_000
_GONE_AFTER_MS = 60_000  # a connection silent for so long is closed
_BACKLOG = 128  # connections that wait to be taken
_ANSWER_TO_NOTHING = (b"", b"")  # an unused request id, and no body
_ENVELOPE_BYTES = 256  # more than CURVE adds to a piece


class Peer(NamedTuple):
    """One connection. ``key`` is the public key that it proved; empty on a Unix socket."""

    router: "Router"
    routing_id: bytes
    key: str = ""

    def send(self, frames: Sequence[Frame]) -> bool:
        """Send one message; False if the peer is gone or does not read."""
        return self.router.send([self.routing_id, *frames])

    def is_there(self) -> bool:
        """True if the connection is up: an answer to no request can be sent."""
        return self.send(_ANSWER_TO_NOTHING)


OnMessage = Callable[[Peer, Sequence[zmq.Frame]], None]


class Router:
    """Receives and sends without waiting. Use it from one event loop.

    The socket's file descriptor is edge-triggered: after every receive or send it is checked
    again.
    """

    def __init__(
        self,
        context: "zmq.Context[zmq.Socket[bytes]]",
        endpoint: str,
        *,
        on_message: OnMessage,
        secret_key: bytes = b"",
        max_connections: int = 1 << 20,
        setting: str = "",
    ) -> None:
        """Bind a socket.

        Args:
            context: of the process.
            endpoint: where clients connect.
            on_message: is given each message without its routing id.
            secret_key: of the broker; if given, connections have to prove a key of their own.
            max_connections: at a time; further ones wait.
            setting: that sets this limit.

        Raises:
            ConfigError: a TCP address cannot be listened at.
        """
        self._on_message = on_message
        self._is_secure = bool(secret_key)
        self._loop = asyncio.get_running_loop()
        self._check_again: asyncio.Handle | None = None
        self._is_paused = False
        self._socket = context.socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.MAXMSGSIZE, PIECE_BYTES + _ENVELOPE_BYTES)  # without a key, too
        self._socket.setsockopt(zmq.ROUTER_MANDATORY, 1)  # an answer to an unknown peer is an error
        self._socket.setsockopt(zmq.SNDHWM, _SEND_LIMIT)
        self._socket.setsockopt(zmq.HANDSHAKE_IVL, _HANDSHAKE_MS)
        self._socket.setsockopt(zmq.BACKLOG, _BACKLOG)
        if secret_key:
            require_keys(self._socket, secret=secret_key, domain="slipstream")
            ping(self._socket, every_ms=_HEARTBEAT_MS, dead_after_ms=_GONE_AFTER_MS)
        self.connections: ConnectionCount | None = None  # none are counted within a process
        self._cleanup = ExitStack()
        self._cleanup.callback(self._socket.close)
        with ExitStack() as undo:
            undo.push(self._cleanup)
            endpoint, gate = self._gate_of(endpoint)
            if gate is not None:
                self.connections = ConnectionCount(
                    self._socket, gate, max_connections, where=endpoint, setting=setting
                )
                self._cleanup.callback(self.connections.stop)
            self._socket.bind(endpoint)
            undo.pop_all()
        self.endpoint = self._socket.getsockopt_string(zmq.LAST_ENDPOINT)
        self._fd = int(self._socket.getsockopt(zmq.FD))
        self._loop.add_reader(self._fd, self._receive)
        self._check()

    def send(self, frames: Sequence[Frame]) -> bool:
        """Send one message; False if its peer is gone or reads nothing."""
        last = len(frames) - 1
        try:
            for i, frame in enumerate(frames):
                flags = _NOW if i == last else _NOW_AND_MORE
                if len(frame) < _LARGE_BYTES:
                    self._socket.send(frame, flags)
                    continue
                # A view of a whole frame as received is sent as that frame: shared, not copied.
                whole = frame.obj if isinstance(frame, memoryview) else frame
                is_received = isinstance(whole, zmq.Frame) and len(whole) == len(frame)
                self._socket.send(whole if is_received else frame, flags, copy=False)
        except zmq.ZMQError as error:
            if error.errno in {zmq.EHOSTUNREACH, zmq.EAGAIN}:
                return False
            raise
        finally:
            self._check()
        return True

    @property
    def is_paused(self) -> bool:
        """True while nothing is received."""
        return self._is_paused

    def pause(self) -> None:
        """Receive nothing more: messages wait at their peers."""
        if not self._is_paused:
            self._is_paused = True
            self._loop.remove_reader(self._fd)  # arrivals would wake the loop all the time

    def resume(self) -> None:
        """Receive again."""
        if self._is_paused:
            self._is_paused = False
            self._loop.add_reader(self._fd, self._receive)
            self._check()

    def close(self) -> None:
        """Close the socket."""
        self._is_paused = True
        self._loop.remove_reader(self._fd)
        if self._check_again is not None:
            self._check_again.cancel()
        self._cleanup.close()

    def _gate_of(self, endpoint: str) -> tuple[str, Gate | None]:
        """Return the address to bind, and the gate before it; none within a process."""
        if endpoint.startswith("ipc://"):
            unix = UnixGate(Path(endpoint.removeprefix("ipc://")))
            self._cleanup.callback(unix.close)
            return endpoint, unix
        if not endpoint.startswith("tcp://"):
            return endpoint, None
        listening = listening_socket(endpoint)
        tcp = TcpGate(listening)
        self._cleanup.callback(tcp.close)
        host, port = listening.getsockname()[:2]
        self._socket.setsockopt(zmq.USE_FD, listening.detach())  # from here on it is the socket's
        return f"tcp://[{host}]:{port}" if ":" in host else f"tcp://{host}:{port}", tcp

    def _check(self) -> None:
        if self._check_again is None:
            self._check_again = self._loop.call_soon(self._receive)

    def _receive(self) -> None:
        if self._check_again is not None:
            self._check_again.cancel()
            self._check_again = None
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
                self._check()  # no other event would follow for messages behind this one
                raise
        self._check()
