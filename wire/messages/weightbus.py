"""Messages of the weight bus: the relay's commands to each generator's agent, and answers.

A publish is a transaction: offer -> transfer -> verify -> commit -> adopt. The relay drives it with
one command at a time per member; every command is answered by one CommandOutcome that carries the
command's number. A version that agents receive needs two, ReceiveVersion and Adopt.
"""

from collections.abc import Sequence
from typing import Annotated, Literal, TypeAlias

import msgspec

from slipstream.wire.messages.bounds import ByName, Count, Figure, Name, Several, Text
from slipstream.wire.messages.manifest import WeightManifest
from slipstream.wire.messages.probe import ProbeLogprobs
from slipstream.wire.messages.versions import PolicyVersion

EngineName = Annotated[str, msgspec.Meta(min_length=1, max_length=100, pattern="^[^/@\\s]+$")]
ShortText = Annotated[str, msgspec.Meta(max_length=100)]
Endpoint = Annotated[str, msgspec.Meta(max_length=300)]
NumRanks = Annotated[int, msgspec.Meta(ge=1, le=4096)]
TransportName = EngineName  # a key of weightbus/transports.py


class BulkDoor(msgspec.Struct, frozen=True, kw_only=True):
    """Where buckets are fetched: a relay's bulk socket, or that of an agent which has them."""

    endpoint: Endpoint
    key: ShortText = ""  # its public key; empty on Unix sockets
    # Buckets come unencrypted, and a request is two frames, a MAC and a FetchBucket.
    is_plain: bool = False
    of_engine: bool = False  # an agent's, as the relay that names it knows


class RelayAddress(msgspec.Struct, frozen=True, kw_only=True):
    """The addresses at which engines reach a relay."""

    endpoint: Name
    bulk_endpoint: Name
    key: Name = ""  # the public key that the relay proves; empty on Unix sockets
    is_bulk_plain: bool = False  # is_plain of the bulk socket

    @property
    def bulk(self) -> BulkDoor:
        """Where the relay's buckets are fetched."""
        return BulkDoor(endpoint=self.bulk_endpoint, key=self.key, is_plain=self.is_bulk_plain)


class BusMessage(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind", tag=str.lower):
    """Base of all messages of the weight bus."""


# ---- agent to relay ----------------------------------------------------------


class Join(BusMessage, frozen=True):
    """An agent's request for weights; repeated as its heartbeat, answered by JoinAcknowledged."""

    name: EngineName
    incarnation: EngineName  # differs after each restart of the engine
    device: Literal["cpu", "cuda"]
    torch_version: ShortText
    nccl_version: ShortText = ""  # empty on a CPU
    num_ranks: NumRanks = 1  # processes of the engine that join a group
    transport: TransportName = "collective"  # requested
    adopted: PolicyVersion | None = None  # None while the engine may hold a mixture, or nothing
    # Groups of its ranks that each hold the whole attention; unset is one.
    attention_groups: NumRanks | msgspec.UnsetType = msgspec.UNSET
    forward: BulkDoor | None = None  # address at which others may fetch its received buckets
    # Agents with the same text can open each other's files in /proc; empty: no other agent's.
    host: ShortText = ""
    # Groups of its ranks that each hold as many of the experts; unset is one.
    expert_groups: NumRanks | msgspec.UnsetType = msgspec.UNSET

    def __post_init__(self) -> None:
        for name in ("attention_groups", "expert_groups"):
            groups = getattr(self, name)
            if groups and self.num_ranks % groups:
                raise ValueError(
                    f"num_ranks must be a multiple of {name}, got {self.num_ranks} and {groups}"
                )


class Leave(BusMessage, frozen=True):
    """An agent ends normally."""

    name: EngineName


class CommandOutcome(BusMessage, frozen=True):
    """The answer to one command."""

    command_id: Count
    error: Text = ""  # empty is success
    num_in_flight: Count = 0  # generations in flight, with the answer to Pause or Adopt
    num_bytes: Count = 0  # bytes over bulk sockets, with the answer to ReceiveVersion
    path: Name = ""  # file with the version that it fetched, with the same answer
    # Digest of the checksums of all tensors in the engine, after Verify or Adopt.
    digest: Name = ""
    checksums: ByName[Name] = {}  # those, by the engine's tensor name, where it is about names
    phase_seconds: ByName[Figure] = {}  # seconds by PUBLISH_PHASES, within ReceiveVersion and Adopt


class FetchBucket(BusMessage, frozen=True):
    """Over the bulk socket: send one bucket. At a plain door a MAC precedes it.

    It comes whole unless a ``base`` is set: the version whose bytes of this bucket the agent has,
    None while it has none, from which it can be sent as deltas.
    """

    version: PolicyVersion
    index: Count
    base: PolicyVersion | msgspec.UnsetType | None = msgspec.UNSET


# ---- relay to agent ----------------------------------------------------------


class JoinAcknowledged(BusMessage, frozen=True):
    """The answer to a heartbeat."""

    relay: Name  # differs after each restart of the relay


class OpenGroup(BusMessage, frozen=True):
    """Have the engine join a process group as ``rank``: rank 0 is the relay."""

    command_id: Count
    host: Name
    port: Count
    group_name: Name
    backend: Literal["gloo", "nccl"]
    rank: Count = 1
    world_size: Count = 2


class Abandon(BusMessage, frozen=True):
    """The publish failed: leave the group, close the update; resume unless bytes moved."""

    command_id: Count
    reason: Text


class Offer(BusMessage, frozen=True):
    """The version to come into live weights. The agent refuses tensors that are not its model's."""

    command_id: Count
    manifest: WeightManifest
    transport: TransportName = "collective"


class ReceiveVersion(BusMessage, frozen=True):
    """Get a version into this host's memory, or find it on disk; check every digest.

    The agent refuses tensors that are not its model's.
    """

    command_id: Count
    manifest: WeightManifest
    path: Text = ""  # folder of the version; empty if it is to be fetched
    mapped: Text = ""  # file that holds it on this host, labelled; not copied if it can be opened
    may_be_read: bool = False  # others map the agent's memory: it must not be overwritten
    # Compute what the engine's checksums will be compared with: the relay lacks some tensors.
    is_checked: bool = False
    # Addresses of the buckets, by part of the version; the next one is used if one fails.
    # Empty: all are at the relay that sends this.
    sources: Several[Several[BulkDoor]] = ()
    first_part: Count = 0  # part to fetch first, so that not all fetch from one host at once


class Admit(BusMessage, frozen=True):
    """Serve the verified buckets of this version to the holders of these keys, and to no others.

    Carried out at once, also while another command is.
    """

    command_id: Count
    version: PolicyVersion
    keys: Several[Name]  # public keys (Z85) of other engines


class EncodedReceive(BusMessage, frozen=True, tag=ReceiveVersion.__name__.lower()):
    """The bytes of a ``ReceiveVersion``, with a manifest that was encoded once for all members."""

    command_id: Count
    manifest: msgspec.Raw
    path: Text = ""
    mapped: Text = ""
    may_be_read: bool = False
    is_checked: bool = False
    sources: Several[Several[BulkDoor]] = ()
    first_part: Count = 0


class Pause(BusMessage, frozen=True):
    """Stop generating; requests in flight stay."""

    command_id: Count


class LoadBucket(BusMessage, frozen=True):
    """Have the engine receive the bucket at ``index`` of the offered manifest over the group."""

    command_id: Count
    index: Count
    group_name: Name


class Adopt(BusMessage, frozen=True):
    """Have the engine run the received version: pause, load, compare, label, generate again.

    The agent does all of it by itself. If it fails, the engine runs the version before, or stays
    paused; so does an engine whose checksums have another digest: the outcome has the checksums.
    """

    command_id: Count
    version: PolicyVersion
    # Digest of the expected checksums; empty compares with what is_checked computed, if anything.
    digest: Name = ""
    probe: ProbeLogprobs | None = None  # what the engine is to compute from now on


class Verify(BusMessage, frozen=True):
    """Close the update; have the engine compute a checksum of every tensor if requested.

    The relay compares the digest of all, and asks again where that differs.
    """

    command_id: Count
    wants: Literal["nothing", "digest", "checksums"] = "digest"  # checksums: of the last digest


class Commit(BusMessage, frozen=True):
    """Close the update if ``Verify`` did not, compare, label the engine, and generate again.

    An engine whose checksums have another digest is not labelled and stays paused: the outcome has
    the checksums.
    """

    command_id: Count
    version: PolicyVersion  # version offered and loaded
    digest: Name = ""  # digest of the expected checksums; empty compares nothing
    probe: ProbeLogprobs | None = None  # expected logprobs, as in Adopt


class BucketAnswer(BusMessage, frozen=True):
    """Over the bulk socket: a bucket, whose bytes are the frame that follows.

    With a ``base`` the frames that follow are of each tensor, in order: a delta for each of
    ``num_steps`` from that version to this one, or its bytes if its place is in ``whole``.
    """

    version: PolicyVersion
    index: Count
    error: Text = ""  # then there is no further frame
    base: PolicyVersion | None = None
    num_steps: Count = 0
    whole: Several[Count] = ()


Command: TypeAlias = (
    OpenGroup
    | Abandon
    | Offer
    | ReceiveVersion
    | Admit
    | Pause
    | LoadBucket
    | Adopt
    | Verify
    | Commit
    | JoinAcknowledged
)
AgentMessage: TypeAlias = Join | Leave | CommandOutcome


PUBLISH_PHASES = (  # in their order
    # `order` is the way to a staged engine and back, and its wait for the batch that is computed.
    # `stage` and `prove` are load and check of a version next to the live weights, while the engine
    # generates; `load` is then a copy on its device.
    *("digest", "offer", "group", "receive", "stage", "prove", "expect", "order"),
    *("pause", "transfer", "load", "verify", "commit"),
)


class PublishRecord(msgspec.Struct, frozen=True, kw_only=True):
    """The result of one publish to its members."""

    version: PolicyVersion
    at_s: Figure  # unix time at which the transfer began
    adopted_by: ByName[Figure]  # member -> seconds from offer to commit
    failed: ByName[Text] = {}  # member -> why it was left out
    num_in_flight: ByName[Count] = {}  # member -> generations in flight at the pause
    digest: Name = ""  # digest of everything sent; empty if it failed earlier
    engine_digests: ByName[Name] = {}  # member -> digest of all that its engine holds
    phase_seconds: ByName[Figure] = {}  # seconds by phase, of the slowest member
    num_bytes: Count = 0
    fetched_bytes: ByName[Count] = {}  # member -> bytes that it fetched; deltas are fewer
    transports: ByName[TransportName] = {}  # member -> how it got the version
    quarantined: ByName[Text] = {}  # member -> how its engine differs from the learner


def merged(records: Sequence[PublishRecord]) -> PublishRecord:
    """Join records of one version; a member that failed first and adopted then adopted."""
    adopted: dict[str, float] = {}
    failed: dict[str, str] = {}
    num_in_flight: dict[str, int] = {}
    engine_digests: dict[str, str] = {}
    fetched: dict[str, int] = {}
    transports: dict[str, TransportName] = {}
    quarantined: dict[str, str] = {}
    phases: dict[str, float] = {}
    for record in records:
        adopted |= record.adopted_by
        failed |= record.failed
        num_in_flight |= record.num_in_flight
        engine_digests |= record.engine_digests
        fetched |= record.fetched_bytes
        transports |= record.transports
        quarantined |= record.quarantined
        for phase, seconds in record.phase_seconds.items():
            phases[phase] = max(seconds, phases.get(phase, 0.0))
    return PublishRecord(
        version=records[0].version,
        at_s=records[0].at_s,
        adopted_by=adopted,
        failed={name: reason for name, reason in failed.items() if name not in adopted},
        num_in_flight=num_in_flight,
        digest=next((record.digest for record in reversed(records) if record.digest), ""),
        engine_digests=engine_digests,
        phase_seconds=phases,
        num_bytes=max(record.num_bytes for record in records),
        fetched_bytes=fetched,
        transports=transports,
        quarantined=quarantined,
    )


class MemberState(msgspec.Struct, frozen=True, kw_only=True):
    """Version of one engine, as known to the relay."""

    name: Name
    state: Literal["current", "behind", "receiving", "torn"]
    version: PolicyVersion | None  # None: nothing yet, or a mixture
    since_s: Figure  # unix time since when
    transport: TransportName
    reason: Text = ""  # reason of the last failure
