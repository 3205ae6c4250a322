"""Messages of the weight bus: the learner's publisher commands, each generator's agent obeys.

A publish is a transaction: offer -> transfer -> verify -> commit -> adopt. The publisher drives
it with one command at a time per member; every command is answered by one Outcome that carries
the command's number.
"""

from typing import Literal, TypeAlias

import msgspec

from wire.manifest import WeightManifest
from wire.versions import PolicyVersion


class BusMessage(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind", tag=str.lower):
    """Base of all messages of the weight bus."""


# ---- agent to publisher ------------------------------------------------------


class Join(BusMessage, frozen=True):
    """An agent is alive and wants weights; repeated as its heartbeat."""

    name: str
    incarnation: str  # differs after each restart of the engine
    device: Literal["cpu", "cuda"]
    torch_version: str
    num_ranks: int = 1  # processes of the engine that join a group
    adopted: PolicyVersion | None = None


class Leave(BusMessage, frozen=True):
    """An agent ends in order."""

    name: str


class Outcome(BusMessage, frozen=True):
    """The answer to one command."""

    command_id: int
    error: str = ""  # empty is success
    num_in_flight: int = 0  # generations in flight, with the answer to Pause
    checksums: dict[str, str] = {}  # by the engine's tensor name, with the answer to Verify


# ---- publisher to agent ------------------------------------------------------


class OpenGroup(BusMessage, frozen=True):
    """Have the engine join a process group of two: rank 0 is the sender."""

    command_id: int
    host: str
    port: int
    group_name: str
    backend: Literal["gloo", "nccl"]


class CloseGroup(BusMessage, frozen=True):
    """A publish failed: forget the process group, end what the transfer left open."""

    command_id: int
    group_name: str  # empty if there was none yet
    reason: str


class Offer(BusMessage, frozen=True):
    """The version to come. The agent refuses a tensor set that is not its model's."""

    command_id: int
    manifest: WeightManifest


class Pause(BusMessage, frozen=True):
    """Stop generating (requests in flight stay) and open the update."""

    command_id: int


class LoadBucket(BusMessage, frozen=True):
    """Receive the bucket at ``index`` of the offered manifest over the group."""

    command_id: int
    index: int
    group_name: str


class Verify(BusMessage, frozen=True):
    """Close the update and answer with the checksum of every tensor as the engine holds it."""

    command_id: int


class Commit(BusMessage, frozen=True):
    """Label the engine with the offered version and generate again."""

    command_id: int


Command: TypeAlias = OpenGroup | CloseGroup | Offer | Pause | LoadBucket | Verify | Commit
AgentMessage: TypeAlias = Join | Leave | Outcome


class PublishRecord(msgspec.Struct, frozen=True, kw_only=True):
    """What became of one publish to its members."""

    version: PolicyVersion
    at_s: float  # unix time at which the transfer began
    adopted_by: dict[str, float]  # member -> seconds from pause to commit
    failed: dict[str, str] = {}  # member -> why it was left out
    num_in_flight: dict[str, int] = {}  # member -> generations in flight at the pause
    engine_digests: dict[str, str] = {}  # member -> digest of all that its engine holds
    phase_seconds: dict[str, float] = {}  # by phase, the slowest member
    num_bytes: int = 0
