"""Messages between the broker and the roles around it, one tagged type each.

Every exchange is a request by a role and one answer by the broker, matched by a request id
that travels in a frame of its own. Messages that change state are idempotent by their natural
keys (group, sibling, lease, step): a repeated one is answered from the present state.
"""

from typing import Annotated, Literal, TypeAlias

import msgspec

from slipstream.wire.messages.bounds import (
    Blob,
    ById,
    ByName,
    Count,
    Figure,
    Listed,
    Name,
    Number,
    Several,
    Text,
)
from slipstream.wire.messages.dead_letters import DeadLetter
from slipstream.wire.messages.images import Digest
from slipstream.wire.messages.ledger_view import LedgerView
from slipstream.wire.messages.status import EvalPoint, RunStatus
from slipstream.wire.messages.trajectory import ItemKind, Prompt, Score, TrajectoryHeader
from slipstream.wire.messages.versions import PolicyVersion
from slipstream.wire.messages.weightbus import MemberState, PublishRecord, RelayAddress

WIRE_REVISION = 13

# learner_part: of a learner's ranks but the first, which fetch payloads and decide nothing
Role = Literal[
    "generator", "learner", "learner_part", "relay", "reward_worker", "observer", "operator"
]
MANY: tuple[Role, ...] = ("generator", "reward_worker")  # roles with any number of processes
RefusalCode = Literal[
    "",
    "hello_first",  # this broker does not know the connection: send Hello, then the request again
    "superseded",  # another process has sent Hello under the same name
    "forbidden",  # not with this key, or not in this role
    "name_taken",  # a connected process has this name: send Hello again a little later
    "slow_down",  # more requests than a peer may have at a time: repeat a little later
]


class Message(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind", tag=str.lower):
    """Base of all control messages."""


# ---- any role ----------------------------------------------------------------


class Hello(Message, frozen=True):
    """First message of every client, and of every new connection; answered by Welcome."""

    role: Role
    name: Name  # stable over restarts of the same role, e.g. generator-0
    incarnation: Name = ""  # differs after every restart of the role
    reconnects: bool = False  # the same incarnation was welcome before; requests are sent again
    held: Several[Count] = ()  # leases of generation it still works on; all others are taken back
    wire_revision: Count = WIRE_REVISION
    packages: ByName[Text] = {}  # versions worth recording, by package
    tokenizer: Name = ""  # hash of the tokenizer that this role uses; empty uses none
    run_id: Name = ""  # run that it was welcome to before


class Welcome(Message, frozen=True):
    """The client is known. Every further request on the connection carries its session."""

    run_name: Name
    # 16 random bytes, which are worth nothing on another connection.
    session: Annotated[bytes, msgspec.Meta(max_length=64)]
    learner_step: Count
    heartbeat_s: Figure  # send a heartbeat at least this often
    run_id: Name = ""  # id in the run folder's identity.json


class RoleReport(Message, frozen=True):
    """A role's cumulative report, so losing one is fine; answered by Done."""

    phase_seconds: ByName[Figure]  # seconds by phase, e.g. generate, wait, adopt
    counters: ByName[Figure]  # monotonic counts, e.g. tokens
    adopted: PolicyVersion | None = None
    gauges: ByName[Figure] = {}  # readings of now, e.g. kv_use
    rewritten: Text = ""  # newest rewrite of a history: where it first differs


class Done(Message, frozen=True):
    """The request was carried out and is durable."""


class Refusal(Message, frozen=True):
    """The request was understood and refused."""

    reason: Text
    code: RefusalCode = ""


class GetLedger(Message, frozen=True):
    """Ask for the account of all items; answered by LedgerAnswer."""

    num_items: Count = 10  # how many of the oldest items to name


class LedgerAnswer(Message, frozen=True):
    """The account of all items."""

    view: LedgerView


class GetStatus(Message, frozen=True):
    """Ask for the state of the run; answered by StatusAnswer."""

    newest_steps: Number = -1  # how many learner steps to report; -1 is all that are kept


class StatusAnswer(Message, frozen=True):
    """The state of the run."""

    status: RunStatus


# ---- generators --------------------------------------------------------------


class LeasedGroup(msgspec.Struct, frozen=True, kw_only=True):
    """Generation work: the siblings that are still missing of one group."""

    group_id: Count
    lease_id: Number
    item: ItemKind
    position: Count  # position of the prompt in its source; decides the seed, with the sibling
    prompt: Prompt
    siblings: Several[Count]


class LeaseGroups(Message, frozen=True):
    """Ask for generation work; answered by GroupsLeased, at the latest after ``wait_s``."""

    adopted: PolicyVersion | None  # version of the engine; None gets no work yet
    max_sequences: Count  # siblings that it can start now
    wait_s: Figure


class GroupsLeased(Message, frozen=True):
    """Zero or more groups; ``finished`` means that no work will ever come again."""

    groups: Several[LeasedGroup]
    finished: bool = False


class Heartbeat(Message, frozen=True):
    """Keep these leases, of generation or scoring; answered by HeartbeatAnswer."""

    lease_ids: Several[Count]


class HeartbeatAnswer(Message, frozen=True):
    """The leases that this client no longer holds: stop working on them."""

    lost: Several[Count]


class SubmitTrajectory(Message, frozen=True):
    """One finished sibling; frames: payload, response as UTF-8. Answered by Done or Refusal.

    Where the header names turns, a third frame holds the text of each. The broker makes the
    transcript that is scored, from its own prompt and these texts.
    """

    header: TrajectoryHeader
    score: Score | None = None  # set if the generator has scored it


class ReleaseLease(Message, frozen=True):
    """Hand work back; answered by Done."""

    lease_id: Number
    reason: Text
    is_stranded: bool = False  # what ran it is gone, which is no fault of the group's


class RejectPrompt(Message, frozen=True):
    """No generator could answer this prompt: drop its group with a reason. Answered by Done."""

    lease_id: Number
    reason: Literal["overlong_prompt", "bad_prompt"]
    detail: Text


class StoreImage(Message, frozen=True):
    """An image of an observation; frame: its bytes. Answered by Done once it is on disk."""

    digest: Digest


class FetchImage(Message, frozen=True):
    """Ask for an image of the run; answered by ImageBytes, or refused with the reason."""

    digest: Digest


class ImageBytes(Message, frozen=True):
    """Frame: the bytes of the image."""


class Goodbye(Message, frozen=True):
    """This client ends: lease its work to others. Answered by Done."""

    is_stopped: bool = False  # a learner that was asked to end; others have nothing left to do


# ---- reward workers ----------------------------------------------------------


class ScoringItem(msgspec.Struct, frozen=True, kw_only=True):
    """One trajectory to score; its transcript is the frame at the same position."""

    group_id: Count
    sibling: Count
    lease_id: Number


class LeaseScoring(Message, frozen=True):
    """Ask for scoring work up to ``credits``; answered by ScoringLeased."""

    credits: Count  # trajectories that it can take on besides its present ones
    wait_s: Figure
    whole_groups: bool = False  # all siblings of a group at once, when they are all there


class ScoringLeased(Message, frozen=True):
    """Zero or more trajectories to score; frames: one transcript each."""

    items: Several[ScoringItem]
    finished: bool = False


class SubmitScores(Message, frozen=True):
    """Outcomes of scoring; answered by Done."""

    scores: Several[Score]


# ---- operators ---------------------------------------------------------------


class GetDeadLetters(Message, frozen=True):
    """Request the groups given up; answered by DeadLetters."""

    after: Number = -1  # groups with a greater id only
    limit: Count = 100


class DeadLetters(Message, frozen=True):
    """Groups given up, by id."""

    letters: Several[DeadLetter]
    total: Count
    forgotten: Count  # older ones that there was no room for


class RetryDeadLetters(Message, frozen=True):
    """Issue the prompts of these groups again, as new items; answered by DeadLettersHandled."""

    groups: Several[Count]


class DropDeadLetters(Message, frozen=True):
    """Forget these dead letters; answered by DeadLettersHandled."""

    groups: Several[Count]


class DeadLettersHandled(Message, frozen=True):
    """Groups handled, and groups not."""

    done: ById[Number]  # group -> the new item; -1 where it was forgotten
    refused: ById[Text]  # group -> why


# ---- learner -----------------------------------------------------------------


class TakeOver(Message, frozen=True):
    """A learner starts to train at ``step``; answered by TookOver with a new epoch.

    Batches of that step and later ones that were delivered before are delivered again as they were.
    """

    step: Count
    checkpoint: Text = ""  # checkpoint to resume from, for the record
    held: PolicyVersion | None = None  # version of the checkpoint; None: the run's first weights
    run_id: Name = ""  # run of the checkpoint, from its checkpoint.json


class TookOver(Message, frozen=True):
    """From now on this learner's versions are (epoch, step)."""

    version: PolicyVersion


class DeliveredTrajectory(msgspec.Struct, frozen=True, kw_only=True):
    """A header and its reward; the payload is fetched apart."""

    header: TrajectoryHeader
    reward: Figure
    parts: ByName[Figure] = {}  # named parts of the reward
    turn_rewards: Several[Figure] = ()  # reward of each chosen turn of the header; empty if unknown


class DeliveredGroup(msgspec.Struct, frozen=True, kw_only=True):
    """All siblings of one group, in order."""

    group_id: Count
    trajectories: Several[DeliveredTrajectory]


class RequestBatch(Message, frozen=True):
    """Ask for the batch that ``step`` trains; answered at the latest after ``wait_s``.

    Answered by BatchDelivered, BatchNotReady or RunComplete. The step is that of ``version``, or
    the one after it: a learner may fetch its next batch while it trains. Asked again, a step has
    the same batch.
    """

    version: PolicyVersion  # the learner's own
    step: Count
    wait_s: Figure


class BatchDelivered(Message, frozen=True):
    """These groups are bound to this learner step."""

    step: Count
    groups: Several[DeliveredGroup]


class BatchNotReady(Message, frozen=True):
    """Reason why there is no batch yet: missing groups and the holders of their leases."""

    waiting_for: Several[Count]
    reason: Text
    last_step: Count  # learner steps of the run, as far as is known by now


class RunComplete(Message, frozen=True):
    """All steps are trained and evaluated; the learner may leave."""

    evaluations: Several[EvalPoint] = ()


class FetchPayloads(Message, frozen=True):
    """Ask for payloads of delivered trajectories; answered by Payloads."""

    keys: Several[tuple[Count, Count]]  # (group_id, sibling)


class Payloads(Message, frozen=True):
    """Frames: one payload per trajectory, in the requested order."""

    num_frames: Count


class RejectBatch(Message, frozen=True):
    """The batch of ``step`` was not trained, and must not be as it is; answered by Done.

    The groups named are dropped for this reason and replaced, the others wait again.
    """

    version: PolicyVersion  # the learner's own
    step: Count
    reason: Literal["nonfinite", "invalid"]  # a nonfinite loss or gradient; an invalid payload
    groups: Several[Count]
    detail: Text


class SealSteps(Message, frozen=True):
    """A durable checkpoint holds every step before ``step``; answered by Done."""

    version: PolicyVersion  # the learner's own
    step: Count
    oldest_kept: Count  # step of the oldest checkpoint that is still there


class StepCommit(Message, frozen=True):
    """The step that ``version`` results from was trained; answered by StepCommitted."""

    version: PolicyVersion  # (epoch, steps completed)
    metrics: ByName[Figure]


class StepCommitted(Message, frozen=True):
    """The commit is durable. Evaluations decide which checkpoint is the best."""

    evaluations: Several[EvalPoint]
    last_step: Count  # the same as in BatchNotReady


class GetLedgerSnapshot(Message, frozen=True):
    """Ask for the ledger as of the learner's own version; answered by LedgerSnapshotAnswer."""

    version: PolicyVersion


class LedgerSnapshotAnswer(Message, frozen=True):
    """The broker's state for a checkpoint; opaque to the learner."""

    data: Blob


class PublishReport(Message, frozen=True):
    """The result of one publish; answered by Done."""

    record: PublishRecord


class EngineQuarantined(Message, frozen=True):
    """A generator's engine does not compute what the learner does; answered by Done."""

    version: PolicyVersion
    reason: Text


class RelayReport(Message, frozen=True):
    """Version of each engine and the relay's address; sent twice a second."""

    members: Listed[MemberState]
    door: RelayAddress | None = None  # address for generators on other hosts


class RelayHeard(Message, frozen=True):
    """Answer to RelayReport: keys that the relay may admit."""

    generator_keys: ByName[Name]  # public key -> name of the key


class FindRelay(Message, frozen=True):
    """Ask for the relay's address; sent by generators on other hosts."""


class RelayPlace(Message, frozen=True):
    """The relay's address, as it reported last."""

    is_known: bool  # a relay has reported
    door: RelayAddress | None = None  # none if it listens to its own host only


Request: TypeAlias = (
    Hello
    | RoleReport
    | GetStatus
    | GetLedger
    | LeaseGroups
    | Heartbeat
    | SubmitTrajectory
    | ReleaseLease
    | RejectPrompt
    | StoreImage
    | FetchImage
    | Goodbye
    | LeaseScoring
    | SubmitScores
    | GetDeadLetters
    | RetryDeadLetters
    | DropDeadLetters
    | TakeOver
    | RequestBatch
    | FetchPayloads
    | RejectBatch
    | StepCommit
    | SealSteps
    | GetLedgerSnapshot
    | PublishReport
    | EngineQuarantined
    | RelayReport
    | FindRelay
)
Answer: TypeAlias = (
    Welcome
    | Done
    | Refusal
    | StatusAnswer
    | LedgerAnswer
    | GroupsLeased
    | HeartbeatAnswer
    | ScoringLeased
    | DeadLetters
    | DeadLettersHandled
    | TookOver
    | BatchDelivered
    | BatchNotReady
    | RunComplete
    | StepCommitted
    | LedgerSnapshotAnswer
    | Payloads
    | ImageBytes
    | RelayHeard
    | RelayPlace
)
