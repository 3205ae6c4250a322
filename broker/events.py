"""What can happen to an item. The ledger's state is the sum of these events, in order."""

from typing import Literal, TypeAlias

import msgspec

from wire.trajectory import ItemKind, Prompt, Score, TrajectoryHeader
from wire.versions import PolicyVersion

DropReason = Literal["zero_variance", "lease_exhausted", "reward_unavailable"]


class Event(msgspec.Struct, frozen=True, kw_only=True, tag_field="e", tag=str.lower):
    """Base of all events."""


class Issued(Event, frozen=True):
    """A prompt became an item; it is ``leased`` in the same breath."""

    group_id: int
    item: ItemKind
    prompt: Prompt
    cursor: int  # position in the prompt source (train) or in the evaluation round (eval)
    eval_step: int = -1


class Leased(Event, frozen=True):
    """A generator owns the missing siblings of a group."""

    lease_id: int
    group_id: int
    holder: str
    adopted_step: int


class LeaseEnded(Event, frozen=True):
    """A lease lapsed or was handed back before all siblings came."""

    lease_id: int
    reason: str


class Generated(Event, frozen=True):
    """One sibling is finished and its payload is stored."""

    header: TrajectoryHeader


class ScoringFailed(Event, frozen=True):
    """An attempt to score one sibling ended without a reward."""

    group_id: int
    sibling: int
    reason: str


class Scored(Event, frozen=True):
    """One sibling has its reward."""

    score: Score


class Dropped(Event, frozen=True):
    """A group ends untrained; another prompt takes its place."""

    group_id: int
    reason: DropReason


class EvalRoundOpened(Event, frozen=True):
    """Held-out problems are to be answered by the policy of this step or a newer one."""

    step: int


class EvalRoundClosed(Event, frozen=True):
    """Every item of the round has ended."""

    step: int


class TakenOver(Event, frozen=True):
    """A learner owns the run under a new epoch."""

    version: PolicyVersion


class Delivered(Event, frozen=True):
    """A batch is bound to a learner step."""

    step: int
    group_ids: tuple[int, ...]


class Trained(Event, frozen=True):
    """A learner step was committed."""

    version: PolicyVersion
    metrics: dict[str, float]


LedgerEvent: TypeAlias = (
    Issued
    | Leased
    | LeaseEnded
    | Generated
    | ScoringFailed
    | Scored
    | Dropped
    | EvalRoundOpened
    | EvalRoundClosed
    | TakenOver
    | Delivered
    | Trained
)

_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[LedgerEvent] = msgspec.msgpack.Decoder(LedgerEvent)


def encode_event(event: LedgerEvent) -> bytes:
    """Return an event as the store keeps it."""
    return _encoder.encode(event)


def decode_event(data: bytes) -> LedgerEvent:
    """Return an event from the store."""
    return _decoder.decode(data)
