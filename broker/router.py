"""A ROUTER socket on the event loop: what has arrived is handed over at once, many to a wake-up."""

import asyncio
from collections.abc import Callable, Sequence

import zmq

from wire.codec import Frame

_BURST = 64  # messages handed over before other work gets its turn
_SEND_LIMIT = 100_000  # answers that wait for one peer; it asked for every one of them
_NOW = int(zmq.NOBLOCK)  # plain numbers: joining flags of an enum costs more than a small send
_NOW_AND_MORE = int(zmq.NOBLOCK | zmq.SNDMORE)
_LARGE_BYTES = 8 * 1024
OnMessage = Callable[[Sequence[zmq.Frame]], None]


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
    ) -> None:
        self._on_message = on_message
        self._loop = asyncio.get_running_loop()
        self._look_again: asyncio.Handle | None = None
        self._is_paused = False
        self._socket = context.socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.MAXMSGSIZE, max_message_bytes)
        self._socket.setsockopt(zmq.ROUTER_MANDATORY, 1)  # an answer to nobody is an error
        self._socket.setsockopt(zmq.SNDHWM, _SEND_LIMIT)
        self._socket.bind(endpoint)
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
            self._on_message(frames)
        self._look()


def _is_whole(source: object, num_bytes: int) -> bool:
    """Tell whether a view of so many bytes is all of a frame that was received."""
    return isinstance(source, zmq.Frame) and len(source) == num_bytes
