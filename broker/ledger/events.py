"""Events of an item. The ledger's state is the sum of these events, in order."""

from typing import Literal, TypeAlias

import msgspec

from slipstream.wire.messages.status import EvalPoint
from slipstream.wire.messages.trajectory import ItemKind, Prompt, Score, TrajectoryHeader
from slipstream.wire.messages.versions import PolicyVersion

DropReason = Literal[
    "zero_variance",  # no gradient in it
    "overlong_prompt",
    "bad_prompt",  # its chat template refuses it
    "overlong_response",
    "lease_exhausted",  # no attempt to answer succeeded
    "poison",  # every process that tried to answer died
    "reward_unavailable",  # no attempt to score succeeded
    "unfinished",  # the learner ended again and again with its batch in hand
    "stale",  # past its deadline, in drop mode
    "orphaned",  # sampled by weights that a take-over from a checkpoint abandoned
    "nonfinite",  # its learner step had no finite loss or gradient
    "invalid",  # its payload does not match its header
    "revoked",  # answered with a key that was revoked with --discard
    "end_of_data",  # too few groups were left to fill a step
    "run_ended",  # not needed for the last step
]


class Event(msgspec.Struct, frozen=True, kw_only=True, tag_field="e", tag=str.lower):
    """Base of all events."""


class Issued(Event, frozen=True):
    """A prompt became an item; ``Leased`` follows at once."""

    group_id: int
    item: ItemKind
    prompt: Prompt
    cursor: int  # position in the prompt source (train) or in the evaluation round (eval)
    size: int  # siblings
    eval_step: int = -1


class Leased(Event, frozen=True):
    """A generator owns the missing siblings of a group."""

    lease_id: int
    group_id: int
    holder: str
    adopted_step: int
    bound: int = -1  # in force, in learner steps, where a controller has lowered it


LeaseEnd = Literal[
    "lapsed",  # no heartbeat
    "restarted",  # its holder restarted
    "failed",  # its holder handed it back
    "stranded",  # its holder handed it back: what ran its trajectories elsewhere is gone
    "left",  # its holder ended in order
    "lost",  # the answer that granted it never arrived
    "orphaned",  # its work was of weights that a take-over abandoned
]
FAULTS: tuple[LeaseEnd, ...] = ("lapsed", "restarted", "failed")  # count as an attempt
STRANDINGS_PER_ATTEMPT = 10  # else a group that ends whatever runs it would be retried for ever
DEATHS: tuple[LeaseEnd, ...] = ("lapsed", "restarted")


class LeaseEnded(Event, frozen=True):
    """A lease ended before all siblings came."""

    lease_id: int
    reason: LeaseEnd
    detail: str = ""  # reason given by the holder


class Generated(Event, frozen=True):
    """One sibling is finished and its payload is stored."""

    header: TrajectoryHeader
    num_bytes: int = 0  # size of its payload and transcript


class ScoringFailed(Event, frozen=True):
    """An attempt to score one sibling ended without a reward."""

    group_id: int
    sibling: int
    reason: str
    by: str = ""  # the holder that tried
    function: str = ""
    version: str = ""
    excerpt: str = ""  # the beginning of the answer


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
    num_problems: int


class EvalRoundClosed(Event, frozen=True):
    """Every item of the round has ended."""

    step: int
    point: EvalPoint


class TakenOver(Event, frozen=True):
    """A learner owns the run under a new epoch, maybe from an earlier step than the last one did.

    Batches of that step and later ones are bound again as they were; where their payloads are gone,
    their prompts are to be answered again.
    """

    version: PolicyVersion
    checkpoint: str = ""
    learner: str = ""  # the incarnation it was granted to
    cut_off: int = -1  # the step whose batch the learner before it had in hand when it ended


class BatchesHeld(Event, frozen=True):
    """The learner has the batches of these steps in hand, and of no others."""

    steps: tuple[int, ...]


class Requeued(Event, frozen=True):
    """A group of a lost step whose payload is gone is to be generated again, under another id."""

    group_id: int
    of: int  # its id so far
    position: int
    prompt: Prompt
    size: int


class Retried(Event, frozen=True):
    """The prompt of a dead letter (a group dropped unanswered or unscored) is issued again."""

    group_id: int
    of: int  # the group that was dropped
    size: int  # siblings


class LetterDropped(Event, frozen=True):
    """A dead letter is forgotten."""

    group_id: int


class LearnerLeft(Event, frozen=True):
    """The run is complete and its learner is done: all clients may leave."""


class StopPlanned(Event, frozen=True):
    """The run ends after ``last_step`` learner steps, before the number that was planned."""

    last_step: int
    reason: str


class Delivered(Event, frozen=True):
    """A batch is bound to a learner step."""

    step: int
    group_ids: tuple[int, ...]


class Unbound(Event, frozen=True):
    """The batch of a step is taken apart: its groups wait again."""

    step: int


class Trained(Event, frozen=True):
    """A learner step was committed."""

    version: PolicyVersion
    metrics: dict[str, float]


class Evicted(Event, frozen=True):
    """The payloads of a trained step are kept no longer, though no checkpoint holds it yet."""

    step: int


class HistoryCut(Event, frozen=True):
    """Steps before this one are forgotten: no learner can go back to them."""

    step: int


class Sealed(Event, frozen=True):
    """A durable checkpoint holds every step before ``step``."""

    step: int
    oldest_kept: int  # step of the oldest checkpoint that a learner could resume from


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
    | TakenOver
    | BatchesHeld
    | Requeued
    | Retried
    | LetterDropped
    | LearnerLeft
    | Delivered
    | Unbound
    | Trained
    | Evicted
    | HistoryCut
    | Sealed
)

_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[LedgerEvent] = msgspec.msgpack.Decoder(LedgerEvent)


def encode_event(event: LedgerEvent) -> bytes:
    """Return an event as the store keeps it."""
    return _encoder.encode(event)


def decode_event(data: bytes) -> LedgerEvent:
    """Return an event from the store."""
    return _decoder.decode(data)
