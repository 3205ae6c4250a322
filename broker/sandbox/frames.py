"""Messages on a stream of bytes: each is its length in 4 bytes, big-endian, and msgpack."""

from collections.abc import Iterator

import msgspec

from slipstream.wire.errors import ProtocolError

LENGTH_BYTES = 4
MAX_FRAME_BYTES = 1 << 30
_encoder = msgspec.msgpack.Encoder()


def frame_of(message: msgspec.Struct) -> bytes:
    """Return a message as it travels."""
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
