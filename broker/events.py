"""What can happen to an item. The ledger's state is the sum of these events, in order."""

from typing import Literal, TypeAlias

import msgspec

from wire.status import EvalPoint
from wire.trajectory import ItemKind, Prompt, Score, TrajectoryHeader
from wire.versions import PolicyVersion

DropReason = Literal[
    "zero_variance",  # no gradient in it
    "overlong_prompt",
    "bad_prompt",  # its chat template refuses it
    "overlong_response",
    "lease_exhausted",  # nobody managed to answer
    "reward_unavailable",  # nobody managed to score
    "end_of_data",  # too few groups were left to fill a step
    "run_ended",  # not needed for the last step
]


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


class StopPlanned(Event, frozen=True):
    """The run ends after ``last_step`` learner steps, before the number that was planned."""

    last_step: int
    reason: str


class WaitingGroup(msgspec.Struct, frozen=True, kw_only=True):
    """A prompt that was taken from its source and neither trained nor dropped."""

    group_id: int
    position: int
    prompt: Prompt


class LedgerSnapshot(msgspec.Struct, frozen=True, kw_only=True):
    """What a checkpoint keeps of the ledger. Answers in flight are not part of it."""

    version: PolicyVersion
    prompts: str  # fingerprint of the training prompts and their order
    problems: str  # fingerprint of the held-out problems
    cursor: int
    next_group_id: int
    next_lease_id: int
    issued: int
    trained: int
    dropped: dict[str, int]
    lapsed_leases: dict[str, int]
    staleness: dict[int, int]
    eval_points: tuple[EvalPoint, ...]
    open_rounds: tuple[int, ...]  # steps whose evaluation was not complete
    waiting: tuple[WaitingGroup, ...]


class Restored(Event, frozen=True):
    """The run goes on from a checkpoint: first event of its new life."""

    snapshot: LedgerSnapshot


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
    | StopPlanned
    | Restored
    | TakenOver
    | Delivered
    | Trained
)

_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[LedgerEvent] = msgspec.msgpack.Decoder(LedgerEvent)


_snapshots: msgspec.msgpack.Decoder[LedgerSnapshot] = msgspec.msgpack.Decoder(LedgerSnapshot)


def encode_snapshot(snapshot: LedgerSnapshot) -> bytes:
    """Return a snapshot as a checkpoint keeps it."""
    return _encoder.encode(snapshot)


def decode_snapshot(data: bytes) -> LedgerSnapshot:
    """Return a snapshot from a checkpoint; raises msgspec.DecodeError if it is none."""
    return _snapshots.decode(data)


def encode_event(event: LedgerEvent) -> bytes:
    """Return an event as the store keeps it."""
    return _encoder.encode(event)


def decode_event(data: bytes) -> LedgerEvent:
    """Return an event from the store."""
    return _decoder.decode(data)
