"""The one encoder and decoder per message family. Nothing else turns bytes into messages."""

from collections.abc import Callable, Sequence
from typing import TypeVar

import msgspec

from wire.bus import AgentMessage, BusMessage, Command
from wire.control import Answer, Message, Request
from wire.errors import ProtocolError
from wire.trajectory import TrajectoryPayload, Transcript

T = TypeVar("T")
Frame = bytes | memoryview

_encoder = msgspec.msgpack.Encoder()


def encode(message: Message | BusMessage | TrajectoryPayload | Transcript) -> bytes:
    """Return the bytes of any message of this project."""
    return _encoder.encode(message)


def _decoder_of(family: object, what: str) -> Callable[[Frame], T]:
    decoder: msgspec.msgpack.Decoder[T] = msgspec.msgpack.Decoder(family)  # type: ignore[arg-type]

    def decode(frame: Frame) -> T:
        try:
            return decoder.decode(frame)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise ProtocolError(f"not a valid {what}: {error}") from error

    return decode


decode_request: Callable[[Frame], Request] = _decoder_of(Request, "request")
decode_answer: Callable[[Frame], Answer] = _decoder_of(Answer, "answer of the broker")
decode_command: Callable[[Frame], Command] = _decoder_of(Command, "weight bus command")
decode_agent_message: Callable[[Frame], AgentMessage] = _decoder_of(
    AgentMessage, "weight bus message"
)
decode_payload: Callable[[Frame], TrajectoryPayload] = _decoder_of(
    TrajectoryPayload, "trajectory payload"
)
decode_transcript: Callable[[Frame], Transcript] = _decoder_of(Transcript, "transcript")


def expect_frames(frames: Sequence[Frame], count: int, what: str) -> None:
    """Reject a message that came with the wrong number of attached frames."""
    if len(frames) != count:
        raise ProtocolError(f"{what} needs {count} attached frames, got {len(frames)}")
