"""Messages between a generator and an environment server, over CURVE.

What a trajectory's process and its generator say to each other goes through as it is. Requests of
an agent that drives itself come to the server's own endpoint and are carried to the generator's.
"""

from typing import Annotated, TypeAlias

import msgspec

from slipstream.generators.environments.messages import (
    MAX_OBSERVATION_BYTES,
    Begin,
    Replied,
    Turned,
    Unable,
)
from slipstream.wire.errors import ProtocolError
from slipstream.wire.unreadable import UNREADABLE

REVISION = 1
MAX_BYTES = MAX_OBSERVATION_BYTES + (1 << 20)  # of a message; larger requests of agents are refused
SIGN_S = 1.0  # between two signs of life of a generator
Number = Annotated[int, msgspec.Meta(ge=0)]
Name = Annotated[str, msgspec.Meta(min_length=1, max_length=64)]


class _Message(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind", tag=str.lower):
    """Base of all messages."""


# ---- generator to server -----------------------------------------------------


class Hello(_Message, frozen=True):
    """A generator's sign of life; the first one begins."""

    client: Name  # differs after each restart
    revision: int


class Open(_Message, frozen=True):
    """Begin a trajectory."""

    client: Name
    number: Number


class Tell(_Message, frozen=True):
    """Tell its process something; it answers each with one message."""

    client: Name
    number: Number
    said: Begin | Replied


class Close(_Message, frozen=True):
    """End a trajectory."""

    client: Name
    number: Number


class Answered(_Message, frozen=True):
    """A part of the answer to a request of an agent; status and type are with the first."""

    client: Name
    number: Number
    call: Number
    body: bytes
    status: int = 0
    content_type: str = ""
    is_last: bool = False


# ---- server to generator -----------------------------------------------------


class Welcome(_Message, frozen=True):
    """The answer to a Hello: what is served here."""

    server: Name  # differs after each restart
    version: str  # of the environment
    drives_itself: bool
    revision: int
    may_reward: bool = True


class Heard(_Message, frozen=True):
    """What a trajectory's process said."""

    number: Number
    said: Turned | Unable


class Failed(_Message, frozen=True):
    """A trajectory cannot go on, and why."""

    number: Number
    reason: str


class Asked(_Message, frozen=True):
    """A request of an agent, for the generator's endpoint."""

    number: Number
    call: Number
    path: Annotated[str, msgspec.Meta(max_length=200)]
    body: bytes


class Left(_Message, frozen=True):
    """The agent no longer waits for an answer."""

    number: Number
    call: Number


ToServer: TypeAlias = Hello | Open | Tell | Close | Answered
FromServer: TypeAlias = Welcome | Heard | Failed | Asked | Left
_encoder = msgspec.msgpack.Encoder()
_to_server: msgspec.msgpack.Decoder[ToServer] = msgspec.msgpack.Decoder(ToServer)
_from_server: msgspec.msgpack.Decoder[FromServer] = msgspec.msgpack.Decoder(FromServer)


def encoded(message: ToServer | FromServer) -> bytes:
    """Return a message as bytes."""
    return _encoder.encode(message)


def to_server(data: bytes) -> ToServer:
    """Return a message of a generator.

    Raises:
        ProtocolError: it is none.
    """
    try:
        return _to_server.decode(data)
    except UNREADABLE as error:
        raise ProtocolError(f"no message of a generator: {error}") from error


def from_server(data: bytes) -> FromServer:
    """Return a message of an environment server.

    Raises:
        ProtocolError: it is none.
    """
    try:
        return _from_server.decode(data)
    except UNREADABLE as error:
        raise ProtocolError(f"no message of an environment server: {error}") from error
