"""Messages between a reward worker and its children over a Unix socket pair.

A frame is its length in 4 bytes, big-endian, and one message as msgpack.
"""

from collections.abc import Iterator
from typing import TypeAlias

import msgspec

from slipstream.broker.rewards.outcomes import FunctionInfo, Outcome
from slipstream.wire.errors import ProtocolError
from slipstream.wire.messages.trajectory import Json, Transcript

_LENGTH_BYTES = 4
_MAX_FRAME_BYTES = 1 << 30


class NamedReward(msgspec.Struct, frozen=True, kw_only=True):
    """A reward function as the settings name it."""

    setting: str  # reward or reward.sources.NAME
    function: str
    options: dict[str, Json] = {}


class _Message(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind", tag=str.lower):
    """Base of all messages."""


class Load(_Message, frozen=True):
    """First message to a child: the functions to import."""

    rewards: tuple[NamedReward, ...]
    offered: dict[str, Json]  # arguments for functions that name them
    timeout_s: float  # for one call


class Call(_Message, frozen=True):
    """Run one function on these answers."""

    call_id: int
    function: int  # place in Load.rewards
    transcripts: tuple[Transcript, ...]


class Loaded(_Message, frozen=True):
    """The functions are there, in the order of Load."""

    functions: tuple[FunctionInfo, ...]
    are_async: tuple[bool, ...]


class LoadFailed(_Message, frozen=True):
    """One of them is not, and why."""

    message: str


class Answered(_Message, frozen=True):
    """The outcomes of a call, in the order of its transcripts."""

    call_id: int
    outcomes: tuple[Outcome, ...]
    failed: bool = False  # as a whole, and not by saying Unavailable


ToChild: TypeAlias = Load | Call
FromChild: TypeAlias = Loaded | LoadFailed | Answered

_encoder = msgspec.msgpack.Encoder()
to_child: msgspec.msgpack.Decoder[ToChild] = msgspec.msgpack.Decoder(ToChild)
from_child: msgspec.msgpack.Decoder[FromChild] = msgspec.msgpack.Decoder(FromChild)


def frame_of(message: ToChild | FromChild) -> bytes:
    """Return a message as it travels."""
    body = _encoder.encode(message)
    return len(body).to_bytes(_LENGTH_BYTES, "big") + body


class Unframer:
    """Cuts a stream of bytes into the bodies of frames."""

    def __init__(self) -> None:
        self._bytes = bytearray()

    def feed(self, data: bytes) -> Iterator[bytes]:
        """Yield the messages that are complete.

        Raises:
            ProtocolError: a frame announces an absurd length.
        """
        self._bytes += data
        while len(self._bytes) >= _LENGTH_BYTES:
            length = int.from_bytes(self._bytes[:_LENGTH_BYTES], "big")
            if length > _MAX_FRAME_BYTES:
                raise ProtocolError(f"a frame of {length} bytes, at most {_MAX_FRAME_BYTES}")
            end = _LENGTH_BYTES + length
            if len(self._bytes) < end:
                return
            body = bytes(self._bytes[_LENGTH_BYTES:end])
            del self._bytes[:end]
            yield body
