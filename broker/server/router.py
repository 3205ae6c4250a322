"""A ROUTER socket on the event loop: messages are handed over at once, many per wake-up."""

import asyncio
from collections.abc import Callable, Sequence
from typing import NamedTuple

import zmq

from slipstream.broker.listening.curve import ping, require_keys
from slipstream.broker.listening.gate import NO_LIMIT, Limit
from slipstream.broker.listening.router import ListeningRouter
from slipstream.wire.messages.codec import Frame

_BURST = 64  # messages handed over before other work gets its turn
_SEND_LIMIT = 4_000  # answers that wait for one peer; it requested every one
_NOW = int(zmq.NOBLOCK)  # plain numbers: joining flags of an enum costs more than a small send
_NOW_AND_MORE = int(zmq.NOBLOCK | zmq.SNDMORE)
_LARGE_BYTES = 8 * 1024
_HEARTBEAT_MS = 10_000
_GONE_AFTER_MS = 60_000  # a connection silent for so long is closed
_ANSWER_TO_NOTHING = (b"", b"")  # an unused request id, and no body


class Peer(NamedTuple):
    """One connection. ``key`` is the public key that it proved; empty on a Unix socket."""

    router: "EventLoopRouter"
    routing_id: bytes
    key: str = ""

    def send(self, frames: Sequence[Frame]) -> bool:
        """Send one message; False if the peer is gone or does not read."""
        return self.router.send([self.routing_id, *frames])

    def is_there(self) -> bool:
        """True if the connection is up: an answer to no request can be sent."""
        return self.send(_ANSWER_TO_NOTHING)


OnMessage = Callable[[Peer, Sequence[zmq.Frame]], None]


class EventLoopRouter:
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
        limit: Limit = NO_LIMIT,
    ) -> None:
        """Bind a socket.

        ``on_message`` gets each message without its routing id. With a ``secret_key`` connections
        have to prove a key of their own.

        Raises:
            ConfigError: the address cannot be listened at.
        """

        def prepare(socket: "zmq.Socket[bytes]") -> None:
            socket.setsockopt(zmq.ROUTER_MANDATORY, 1)  # an answer to an unknown peer is an error
            socket.setsockopt(zmq.SNDHWM, _SEND_LIMIT)
            if secret_key:
                require_keys(socket, secret=secret_key, domain="slipstream")
                ping(socket, every_ms=_HEARTBEAT_MS, dead_after_ms=_GONE_AFTER_MS)

        self._on_message = on_message
        self._is_secure = bool(secret_key)
        self._loop = asyncio.get_running_loop()
        self._check_again: asyncio.Handle | None = None
        self._is_paused = False
        self._listening = ListeningRouter(
            context, endpoint, setting="broker.listen", limit=limit, prepare=prepare
        )
        self._socket = self._listening.socket
        self.endpoint = self._listening.endpoint
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
        self._listening.close()

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


class RouterGroup:
    """All sockets of one server."""

    def __init__(self) -> None:
        self._routers: list[EventLoopRouter] = []

    def __bool__(self) -> bool:
        return bool(self._routers)

    @property
    def endpoints(self) -> list[str]:
        """Addresses of the sockets, in the order of opening."""
        return [router.endpoint for router in self._routers]

    def add(self, router: EventLoopRouter) -> None:
        """Take in a socket."""
        self._routers.append(router)

    def hold(self, is_flooded: bool) -> None:
        """Receive nothing while the store lags far behind, and again afterwards."""
        for router in self._routers:
            if is_flooded:
                router.pause()
            else:
                router.resume()

    def close(self) -> None:
        """Close the sockets."""
        for router in self._routers:
            router.close()
        self._routers.clear()
