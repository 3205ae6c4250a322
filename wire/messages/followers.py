"""Messages between the hosts of one engine: node 0 leads, the others follow. Over CURVE.

The leader has the engine's HTTP interface, its place at the broker and at the relay. A follower has
ranks of the engine and the memory from which these load a version. Both prove the same key.
"""

from typing import Annotated, Literal, TypeAlias

import msgspec

from slipstream.wire.messages.bounds import ByName, Count, Name, Text
from slipstream.wire.messages.weightbus import EngineName, ReceiveVersion, RelayAddress

NodeNumber = Annotated[int, msgspec.Meta(ge=1, le=4096)]  # 0 is the leader
HostName = Annotated[str, msgspec.Meta(max_length=255)]
FollowerState = Literal["waiting", "starting", "running", "stopping"]


class FollowerMessage(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind", tag=str.lower):
    """Base of all messages between the hosts of an engine."""


# ---- follower to leader ------------------------------------------------------


class Follow(FollowerMessage, frozen=True):
    """A process comes as a node of the engine; repeated until it is answered."""

    node: NodeNumber
    incarnation: EngineName  # differs after each restart
    host: HostName
    pid: Count
    facts: ByName[Text]  # what every node must have in common, in the order of comparison


class Following(FollowerMessage, frozen=True):
    """The state of a node that was admitted; its sign of life, and sent when it changes."""

    node: NodeNumber
    incarnation: EngineName
    state: FollowerState  # stopping: it was asked to end, and waits for the leader to let it


class FollowerEnds(FollowerMessage, frozen=True):
    """A node ends."""

    node: NodeNumber
    incarnation: EngineName
    reason: Text = ""  # empty if the leader let it


class FetchedThere(FollowerMessage, frozen=True):
    """The answer to FetchToo: the version is whole and verified there, or not."""

    node: NodeNumber
    incarnation: EngineName
    command_id: Count
    error: Text = ""
    num_bytes: Count = 0  # that came over bulk sockets


# ---- leader to follower ------------------------------------------------------


class Heeded(FollowerMessage, frozen=True):
    """The answer to a sign of life; to the first one: the process is that node from now on."""

    leader: EngineName  # differs after each restart


class Refused(FollowerMessage, frozen=True):
    """A process is not admitted."""

    reason: Text
    is_taken: bool = False  # another process is that node


class StartNode(FollowerMessage, frozen=True):
    """Start the ranks of this node, which meet those of the others at a store of torch's."""

    host: Name
    port: Annotated[int, msgspec.Meta(ge=1, le=65_535)]


class FetchToo(FollowerMessage, frozen=True):
    """Get a version into the memory of this host, as the leader does; check every digest."""

    command_id: Count
    receive: ReceiveVersion
    relay: RelayAddress
    may_be_read: bool = False  # the memory, by ranks that load an earlier version: take other


class EndNode(FollowerMessage, frozen=True):
    """The engine ends: end the ranks of this node, and the node."""

    reason: Text
    is_orderly: bool = False


ToLeader: TypeAlias = Follow | Following | FollowerEnds | FetchedThere
ToFollower: TypeAlias = Heeded | Refused | StartNode | FetchToo | EndNode
