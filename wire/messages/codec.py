"""The one encoder and decoder per message family. Nothing else turns bytes into messages."""

from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from slipstream.wire.errors import ProtocolError
from slipstream.wire.messages.bounds import Body, Several
from slipstream.wire.messages.broker import Answer, Message, Request
from slipstream.wire.messages.commands import (
    CommandMessage,
    Operation,
    Outcome,
    Sample,
    WorkerAnswer,
    WorkerRequest,
)
from slipstream.wire.messages.followers import FollowerMessage, ToFollower, ToLeader
from slipstream.wire.messages.manifest import WeightManifest
from slipstream.wire.messages.part_relays import HeadCommand, PartMessage, PartReport
from slipstream.wire.messages.relay import RelayAnswer, RelayMessage, RelayRequest
from slipstream.wire.messages.trajectory import TrajectoryPayload, Transcript
from slipstream.wire.messages.weightbus import (
    AgentMessage,
    BucketAnswer,
    BusMessage,
    Command,
    FetchBucket,
)
from slipstream.wire.unreadable import UNREADABLE

Frame = bytes | memoryview

_encoder = msgspec.msgpack.Encoder()


def encode(
    message: Message
    | BusMessage
    | CommandMessage
    | FollowerMessage
    | PartMessage
    | RelayMessage
    | TrajectoryPayload
    | Transcript
    | Sequence[str],
) -> bytes:
    """Return the bytes of any message of this project."""
    return _encoder.encode(message)


def encode_manifest(manifest: WeightManifest) -> msgspec.Raw:
    """Return a manifest as part of an ``EncodedReceive``."""
    return msgspec.Raw(_encoder.encode(manifest))


def _decoder(kind: object, what: str) -> Callable[[Frame], Any]:
    """Return the decoder of one kind of message; ``what`` names it in errors."""
    decoder: msgspec.msgpack.Decoder[Any] = msgspec.msgpack.Decoder(kind)

    def decode(frame: Frame) -> Any:  # noqa: ANN401 typed where it is assigned
        try:
            return decoder.decode(frame)
        except UNREADABLE as error:
            raise ProtocolError(f"not a valid {what}: {error}") from error

    return decode


# Each raises ProtocolError. The arrays of a payload share the frame's memory.
decode_request: Callable[[Frame], Request] = _decoder(Request, "request")
decode_answer: Callable[[Frame], Answer] = _decoder(Answer, "answer of the broker")
decode_command: Callable[[Frame], Command] = _decoder(Command, "weight bus command")
decode_agent_message: Callable[[Frame], AgentMessage] = _decoder(AgentMessage, "weight bus message")
decode_fetch: Callable[[Frame], FetchBucket] = _decoder(FetchBucket, "request for a bucket")
decode_bucket_answer: Callable[[Frame], BucketAnswer] = _decoder(
    BucketAnswer, "answer with a bucket"
)
decode_relay_request: Callable[[Frame], RelayRequest] = _decoder(
    RelayRequest, "request to the relay"
)
decode_relay_answer: Callable[[Frame], RelayAnswer] = _decoder(RelayAnswer, "answer of the relay")
decode_part_report: Callable[[Frame], PartReport] = _decoder(PartReport, "report of a part relay")
decode_head_command: Callable[[Frame], HeadCommand] = _decoder(
    HeadCommand, "command of the head relay"
)
decode_to_leader: Callable[[Frame], ToLeader] = _decoder(ToLeader, "message of a follower")
decode_to_follower: Callable[[Frame], ToFollower] = _decoder(ToFollower, "message of node 0")
decode_worker_request: Callable[[Frame], WorkerRequest] = _decoder(
    WorkerRequest, "request to a command server"
)
decode_worker_answer: Callable[[Frame], WorkerAnswer] = _decoder(
    WorkerAnswer, "answer of a command server"
)
decode_operation: Callable[[Frame], Operation] = _decoder(Operation, "command")
decode_sample: Callable[[Frame], Sample] = _decoder(Sample, "command of an engine")
decode_outcome: Callable[[Frame], Outcome] = _decoder(Outcome, "outcome of a command")
decode_payload: Callable[[Frame], TrajectoryPayload] = _decoder(
    TrajectoryPayload, "trajectory payload"
)
decode_transcript: Callable[[Frame], Transcript] = _decoder(Transcript, "transcript")

decode_texts: Callable[[Frame], tuple[str, ...]] = _decoder(Several[Body], "list of texts")


def decode_text(frame: Frame, what: str) -> str:
    """Return a frame that is text; ``what`` names it in the error."""
    try:
        return str(frame, "utf-8")
    except UnicodeDecodeError as error:
        raise ProtocolError(f"not a valid {what}: {error}") from error


def expect_frames(frames: Sequence[Frame], count: int, what: str) -> None:
    """Reject a message that came with the wrong number of attached frames."""
    if len(frames) != count:
        raise ProtocolError(f"{what} needs {count} attached frames, got {len(frames)}")
