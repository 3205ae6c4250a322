"""Messages between a generator and an environment server, over CURVE.

Messages between a trajectory's process and its generator pass unchanged. Requests of an agent that
drives itself reach the server's own endpoint and are carried to the generator's.
"""

import asyncio
import hashlib
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import suppress
from typing import Annotated, TypeAlias

import msgspec
import zmq
import zmq.asyncio

from slipstream.generators.environments.messages import (
    MAX_OBSERVATION_BYTES,
    BeginTrajectory,
    Replied,
    Turned,
    Unable,
)
from slipstream.wire.errors import ProtocolError
from slipstream.wire.messages.bounds import Count, Name, Several, Text
from slipstream.wire.messages.codec import Frame
from slipstream.wire.messages.pieces import cut, joined_message
from slipstream.wire.messages.trajectory import Json
from slipstream.wire.unreadable import UNREADABLE

REVISION = 4
MAX_BYTES = MAX_OBSERVATION_BYTES + (1 << 20)  # largest message; refuses larger agent requests
MOST_CALLS = 256  # calls of one trajectory's agent at a time
MAX_PATH = 200  # characters, with the method
SIGN_S = 1.0  # between two signs of life of a generator
LOOK_S = SIGN_S / 4  # between two checks for silent peers
_MOST_AT_ONCE = 1_024  # messages between two looks, more than there are generators
ProcessName = Annotated[str, msgspec.Meta(min_length=1, max_length=64)]


class _Message(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind", tag=str.lower):
    """Base of all messages."""


# ---- generator to server -----------------------------------------------------


class EnvironmentHello(_Message, frozen=True, tag="hello"):
    """A generator's sign of life; the first one introduces it.

    Every revision reads this message and its answer, so that each side can name the other's.
    """

    client: ProcessName  # differs after each restart
    revision: Count
    open: Several[Count] = ()  # its trajectories there; its others end


class Open(_Message, frozen=True):
    """Begin a trajectory; answered by Opened."""

    client: ProcessName
    number: Count


class Tell(_Message, frozen=True):
    """Send a message to a trajectory's process, which answers each with one."""

    client: ProcessName
    number: Count
    message: BeginTrajectory | Replied


class Close(_Message, frozen=True):
    """End a trajectory."""

    client: ProcessName
    number: Count


class AgentAnswer(_Message, frozen=True):
    """A part of the answer to an agent's request; the first part has status and type."""

    client: ProcessName
    number: Count
    call: Count
    body: Annotated[bytes, msgspec.Meta(max_length=MAX_BYTES)]
    status: Count = 0
    content_type: Name = ""
    is_last: bool = False


# ---- server to generator -----------------------------------------------------


class EnvironmentWelcome(_Message, frozen=True, tag="welcome"):
    """The answer to an EnvironmentHello: the environment that is served here."""

    server: ProcessName  # differs after each restart
    version: Text  # version of the environment
    identity: Name  # identity of its name and options (``identity_of``)
    drives_itself: bool
    revision: Count
    may_reward: bool = True
    room: Count = 0  # number of further trajectories that fit
    open: Several[Count] = ()  # trajectories under way, among those that the generator named


class Opened(_Message, frozen=True):
    """A trajectory begins, or there is no room for it."""

    number: Count
    is_full: bool = False


class ProcessMessage(_Message, frozen=True):
    """A message of a trajectory's process."""

    number: Count
    message: Turned | Unable


class Failed(_Message, frozen=True):
    """A trajectory cannot continue, for this reason."""

    number: Count
    reason: Text


class AgentRequest(_Message, frozen=True):
    """A request of an agent, for the generator's endpoint."""

    number: Count
    call: Count
    path: Annotated[str, msgspec.Meta(max_length=MAX_PATH)]
    body: Annotated[bytes, msgspec.Meta(max_length=MAX_BYTES)]


class Left(_Message, frozen=True):
    """The agent no longer waits for an answer."""

    number: Count
    call: Count


ToServer: TypeAlias = EnvironmentHello | Open | Tell | Close | AgentAnswer
FromServer: TypeAlias = EnvironmentWelcome | Opened | ProcessMessage | Failed | AgentRequest | Left
_encoder = msgspec.msgpack.Encoder()
_to_server: msgspec.msgpack.Decoder[ToServer] = msgspec.msgpack.Decoder(ToServer)
_from_server: msgspec.msgpack.Decoder[FromServer] = msgspec.msgpack.Decoder(FromServer)


def identity_of(function: str, options: Mapping[str, Json]) -> str:
    """Return a short name of an environment and its options, independent of its folder."""
    file, _, name = function.rpartition(":")
    named = [file.rpartition("/")[2], name, options]
    encoder = msgspec.json.Encoder(order="deterministic")
    return hashlib.sha256(encoder.encode(named)).hexdigest()[:16]


def encoded(message: ToServer | FromServer) -> list[Frame]:
    """Return a message as frames."""
    return cut([_encoder.encode(message)])


def to_server(frames: Sequence[bytes]) -> ToServer:
    """Return a message of a generator.

    Raises:
        ProtocolError: the frames are no such message.
    """
    try:
        return _to_server.decode(joined_message(frames, most_bytes=MAX_BYTES))
    except UNREADABLE as error:
        raise ProtocolError(f"no message of a generator: {error}") from error


def from_server(frames: Sequence[bytes]) -> FromServer:
    """Return a message of an environment server.

    Raises:
        ProtocolError: the frames are no such message.
    """
    try:
        return _from_server.decode(joined_message(frames, most_bytes=MAX_BYTES))
    except UNREADABLE as error:
        raise ProtocolError(f"no message of an environment server: {error}") from error


async def waiting(socket: zmq.asyncio.Socket) -> AsyncIterator[list[bytes]]:
    """Wait up to ``LOOK_S`` for a message; yield the frames of all waiting messages.

    Connections take turns, and a flood of messages does not keep the caller from its checks for
    silent peers. Other tasks run between any two messages.
    """
    await socket.poll(int(LOOK_S * 1e3))
    with suppress(zmq.Again):
        for _ in range(_MOST_AT_ONCE):
            yield await socket.recv_multipart(flags=zmq.NOBLOCK)
            await asyncio.sleep(0)
