"""Messages on a stream of bytes: each is its length in 4 bytes, big-endian, and msgpack.

Processes that run foreign code and the processes that start them exchange such messages.
"""

import argparse
import os
import resource
import signal
import socket
from collections.abc import Iterator
from typing import Generic, TypeVar

import msgspec

from slipstream.wire.errors import ProtocolError

T = TypeVar("T")
LENGTH_BYTES = 4
MAX_FRAME_BYTES = 1 << 30
_READ_BYTES = 1 << 16
_encoder = msgspec.msgpack.Encoder()


def frame_of(message: msgspec.Struct) -> bytes:
    """Return the frame of a message."""
    body = _encoder.encode(message)
    return len(body).to_bytes(LENGTH_BYTES, "big") + body


class Unframer:
    """Cuts a stream of bytes into the bodies of frames."""

    def __init__(self, *, max_bytes: int = MAX_FRAME_BYTES) -> None:
        """Take frames of at most ``max_bytes``."""
        self._bytes = bytearray()
        self._max_bytes = max_bytes

    def feed(self, data: bytes) -> Iterator[bytes]:
        """Yield the messages that are complete.

        Raises:
            ProtocolError: a frame announces an absurd length.
        """
        self._bytes += data
        while len(self._bytes) >= LENGTH_BYTES:
            length = int.from_bytes(self._bytes[:LENGTH_BYTES], "big")
            if length > self._max_bytes:
                raise ProtocolError(f"a frame of {length} bytes, at most {self._max_bytes}")
            end = LENGTH_BYTES + length
            if len(self._bytes) < end:
                return
            body = bytes(self._bytes[LENGTH_BYTES:end])
            del self._bytes[:end]
            yield body


class Link(Generic[T]):
    """One end of a connection: decodes the messages that arrive, and sends any message."""

    def __init__(
        self,
        connection: socket.socket,
        decoder: "msgspec.msgpack.Decoder[T]",
        *,
        max_bytes: int = MAX_FRAME_BYTES,
    ) -> None:
        """Take a connection, and a decoder for arriving frames of at most ``max_bytes``."""
        self.connection = connection
        self._decoder = decoder
        self._frames = Unframer(max_bytes=max_bytes)
        self._bodies: list[bytes] = []

    def fileno(self) -> int:
        """Return the descriptor, for selectors."""
        return self.connection.fileno()

    def close(self) -> None:
        """Close the connection, and forget what arrived over it."""
        self.connection.close()
        self._frames, self._bodies = Unframer(), []

    def send(self, message: msgspec.Struct) -> None:
        """Send a message."""
        self.connection.sendall(frame_of(message))

    def read(self) -> bool:
        """Read once; False if the other end has hung up."""
        data = self.connection.recv(_READ_BYTES)
        self._bodies += self._frames.feed(data)
        return bool(data)

    def next(self) -> T | None:
        """Return the next message that was read; None if no further one was."""
        return self._decoder.decode(self._bodies.pop(0)) if self._bodies else None

    def receive(self) -> T | None:
        """Wait for the next message; None once the other end has hung up."""
        while not self._bodies:
            if not self.read():
                return None
        return self.next()

    async def received(self) -> T | None:
        """Wait for the next message while other tasks run."""
        import asyncio  # 40 ms that programs without tasks need not wait for

        loop = asyncio.get_running_loop()
        while not self._bodies:
            readable = asyncio.Event()
            loop.add_reader(self.connection, readable.set)
            try:
                await readable.wait()
            finally:
                loop.remove_reader(self.connection)
            if not self.read():
                return None
        return self.next()


def connection_of(program: str) -> socket.socket:
    """Return the connection of this process, which a ``ChildProcess`` has started.

    The process leaves no core file and is not interrupted with its parent, and its own children do
    not inherit the connection.
    """
    parser = argparse.ArgumentParser(prog=f"python -m {program}")
    parser.add_argument("--link", type=int, required=True, metavar="DESCRIPTOR")
    descriptor: int = parser.parse_args().link
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.set_inheritable(descriptor, False)
    return socket.socket(fileno=descriptor)
