"""A ROUTER socket in an event loop that takes all waiting messages at once.

zmq.asyncio makes a future for every message and every send, which costs more than the relay's work
on a message of one of a thousand engines.
"""

import asyncio
from collections.abc import Callable

import zmq
import zmq.asyncio

from slipstream.wire.messages.codec import Frame

_AT_A_TIME = 256  # messages; then other work has its turn


class MessageRouter:
    """Sends without waiting, and hands messages to a function. Use it inside one event loop."""

    def __init__(self, socket: zmq.asyncio.Socket) -> None:
        """Take over a socket; the caller closes it after ``run`` was cancelled."""
        self._socket: zmq.Socket[bytes] = zmq.Socket.shadow(socket.underlying)
        self._take: Callable[[list[zmq.Frame]], None] | None = None
        self._end: asyncio.Future[None] | None = None
        self._is_due = False

    async def run(self, take: Callable[[list[zmq.Frame]], None]) -> None:
        """Hand the frames of every message to ``take``, until cancelled or ``take`` raises."""
        loop = asyncio.get_running_loop()
        self._take, self._end = take, loop.create_future()
        descriptor = int(self._socket.getsockopt(zmq.FD))
        loop.add_reader(descriptor, self._look)
        try:
            self._look()
            await self._end
        finally:
            self._take = None
            loop.remove_reader(descriptor)

    def send(self, peer: bytes, *frames: Frame) -> None:
        """Send a message.

        Raises:
            zmq.ZMQError: the peer is gone, or takes no more messages (zmq.Again).
        """
        try:
            self._socket.send_multipart([peer, *frames], zmq.NOBLOCK)
        finally:
            self._look()  # sending consumes the descriptor's signal of arrived messages

    def _look(self) -> None:
        if not self._is_due and self._take is not None:
            self._is_due = True
            asyncio.get_running_loop().call_soon(self._take_all)

    def _take_all(self) -> None:
        self._is_due = False
        if self._take is None or self._end is None or self._end.done():
            return
        try:
            for _ in range(_AT_A_TIME):
                try:
                    received = self._socket.recv_multipart(zmq.NOBLOCK, copy=False)
                except zmq.Again:
                    return
                self._take(
                    received
                )  # a zmq.Again from ``take`` is an error: a message would be lost
        except Exception as error:  # noqa: BLE001 raised by ``run``
            self._end.set_exception(error)
            return
        self._look()
