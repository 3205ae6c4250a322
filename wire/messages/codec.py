"""The one encoder and decoder per message family. Nothing else turns bytes into messages."""

from collections.abc import Sequence
from typing import TypeVar

import msgspec

from slipstream.wire.errors import ProtocolError
from slipstream.wire.messages.broker import Answer, Message, Request
from slipstream.wire.messages.relay import RelayAnswer, RelayMessage, RelayRequest
from slipstream.wire.messages.trajectory import TrajectoryPayload, Transcript
from slipstream.wire.messages.weightbus import (
    AgentMessage,
    BucketAnswer,
    BusMessage,
    Command,
    FetchBucket,
)

T = TypeVar("T")
_UNREADABLE = (msgspec.DecodeError, UnicodeDecodeError, RecursionError, OverflowError)
Frame = bytes | memoryview

_encoder = msgspec.msgpack.Encoder()
_requests: msgspec.msgpack.Decoder[Request] = msgspec.msgpack.Decoder(Request)
_answers: msgspec.msgpack.Decoder[Answer] = msgspec.msgpack.Decoder(Answer)
_commands: msgspec.msgpack.Decoder[Command] = msgspec.msgpack.Decoder(Command)
_agent_messages: msgspec.msgpack.Decoder[AgentMessage] = msgspec.msgpack.Decoder(AgentMessage)
_fetches = msgspec.msgpack.Decoder(FetchBucket)
_bucket_answers = msgspec.msgpack.Decoder(BucketAnswer)
_relay_requests: msgspec.msgpack.Decoder[RelayRequest] = msgspec.msgpack.Decoder(RelayRequest)
_relay_answers: msgspec.msgpack.Decoder[RelayAnswer] = msgspec.msgpack.Decoder(RelayAnswer)
_payloads = msgspec.msgpack.Decoder(TrajectoryPayload)
_transcripts = msgspec.msgpack.Decoder(Transcript)


def encode(message: Message | BusMessage | RelayMessage | TrajectoryPayload | Transcript) -> bytes:
    """Return the bytes of any message of this project."""
    return _encoder.encode(message)


def decode_request(frame: Frame) -> Request:
    """Return what a client asks of the broker."""
    return _decode(_requests, frame, "request")


def decode_answer(frame: Frame) -> Answer:
    """Return what the broker answers."""
    return _decode(_answers, frame, "answer of the broker")


def decode_command(frame: Frame) -> Command:
    """Return a command of the relay to an agent."""
    return _decode(_commands, frame, "weight bus command")


def decode_agent_message(frame: Frame) -> AgentMessage:
    """Return a message of an agent to the relay."""
    return _decode(_agent_messages, frame, "weight bus message")


def decode_fetch(frame: Frame) -> FetchBucket:
    """Return an agent's request for a bucket."""
    return _decode(_fetches, frame, "request for a bucket")


def decode_bucket_answer(frame: Frame) -> BucketAnswer:
    """Return which bucket the relay sends."""
    return _decode(_bucket_answers, frame, "answer with a bucket")


def decode_relay_request(frame: Frame) -> RelayRequest:
    """Return what the learner asks of its relay."""
    return _decode(_relay_requests, frame, "request to the relay")


def decode_relay_answer(frame: Frame) -> RelayAnswer:
    """Return what the relay answers."""
    return _decode(_relay_answers, frame, "answer of the relay")


def decode_payload(frame: Frame) -> TrajectoryPayload:
    """Return the arrays of a trajectory; they share the frame's memory."""
    return _decode(_payloads, frame, "trajectory payload")


def decode_transcript(frame: Frame) -> Transcript:
    """Return the text of a trajectory."""
    return _decode(_transcripts, frame, "transcript")


def decode_text(frame: Frame, what: str) -> str:
    """Return a frame that is text; ``what`` names it in the error."""
    try:
        return str(frame, "utf-8")
    except UnicodeDecodeError as error:
        raise ProtocolError(f"not a valid {what}: {error}") from error


def _decode(decoder: msgspec.msgpack.Decoder[T], frame: Frame, what: str) -> T:
    try:
        return decoder.decode(frame)
    except _UNREADABLE as error:
        raise ProtocolError(f"not a valid {what}: {error}") from error


def expect_frames(frames: Sequence[Frame], count: int, what: str) -> None:
    """Reject a message that came with the wrong number of attached frames."""
    if len(frames) != count:
        raise ProtocolError(f"{what} needs {count} attached frames, got {len(frames)}")
