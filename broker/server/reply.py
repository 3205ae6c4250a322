"""Answer of a handler to a request."""

from collections.abc import Coroutine, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from slipstream.broker.store.base import StoredTrajectory
from slipstream.wire.errors import ProtocolError, RefusedError, SupersededError
from slipstream.wire.messages.broker import Answer
from slipstream.wire.messages.codec import Frame
from slipstream.wire.messages.trajectory import TrajectoryKey
from slipstream.wire.process.safe_text import one_line

_MAX_TEXT = 500  # characters of a client's text in the log


@dataclass(frozen=True, slots=True)
class BrokerReply:
    """An answer, the frames that follow it, and payloads to store before it is sent."""

    answer: Answer
    frames: Sequence[Frame] = ()
    put: dict[TrajectoryKey, StoredTrajectory] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Later:
    """An answer that waits for the store."""

    job: Coroutine[None, None, BrokerReply]


Outcome: TypeAlias = BrokerReply | Later


class HelloFirstError(RefusedError):
    """No hello came on this connection."""


# Errors of a bug that one message exposed must not end the whole run.
_BUGS = (LookupError, ValueError, TypeError, ArithmeticError)
ANSWERED = (ProtocolError, RefusedError, SupersededError, *_BUGS)


def log_text(text: str) -> str:
    """Return a client's text as one short line of a log."""
    return one_line(text, most=_MAX_TEXT)
