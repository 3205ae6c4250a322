"""Messages between the hosts of one role: node 0 leads, the others follow. Over CURVE.

An engine's leader has its HTTP interface, its place at the broker and at the relay; its follower
has ranks and the memory from which these load a version.
"""

from typing import Annotated, Literal, TypeAlias

import msgspec

from slipstream.wire.messages.bounds import Body, ByName, Count, Figure, Name, Text
from slipstream.wire.messages.weightbus import EngineName, ReceiveVersion, RelayAddress

_MOST_NODES = 4096
NodeNumber = Annotated[int, msgspec.Meta(ge=1, le=_MOST_NODES)]  # 0 is the leader
AnyNode = Annotated[int, msgspec.Meta(ge=0, le=_MOST_NODES)]
HostName = Annotated[str, msgspec.Meta(max_length=255)]
FollowerState = Literal["waiting", "starting", "running", "stopping", "done"]


class FollowerMessage(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind", tag=str.lower):
    """Base of all messages between the hosts of a role."""


# ---- follower to leader ------------------------------------------------------


class Follow(FollowerMessage, frozen=True):
    """A process comes as a node; repeated until it is answered."""

    node: NodeNumber
    incarnation: EngineName  # differs after each restart
    host: HostName
    pid: Count
    facts: ByName[Text]  # equal on all nodes; in the order of comparison


class Following(FollowerMessage, frozen=True):
    """The state of a node that was admitted; its sign of life, and sent when it changes."""

    node: NodeNumber
    incarnation: EngineName
    state: FollowerState  # stopping: asked to end, and waits for the leader; done: without work


class FollowerEnds(FollowerMessage, frozen=True):
    """A node ends."""

    node: NodeNumber
    incarnation: EngineName
    reason: Text = ""  # empty if it was asked to end


class FetchedThere(FollowerMessage, frozen=True):
    """The answer to FetchToo: the version is whole and verified there, or not."""

    node: NodeNumber
    incarnation: EngineName
    command_id: Count
    error: Text = ""
    num_bytes: Count = 0  # received over bulk sockets


class HostAnswered(FollowerMessage, frozen=True):
    """The answer to AskHost."""

    node: NodeNumber
    incarnation: EngineName
    number: Count
    answer: Body  # JSON


# ---- leader to follower ------------------------------------------------------


class FollowerAccepted(FollowerMessage, frozen=True):
    """The answer to a sign of life; to the first one: the process is that node from now on."""

    leader: EngineName  # differs after each restart
    host: HostName = ""  # the leader's


class FollowerRefused(FollowerMessage, frozen=True):
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
    may_be_read: bool = False  # the memory, by ranks that load an earlier version; use another


class AskHost(FollowerMessage, frozen=True):
    """A question of `slipstream check` to the program that looks at a host."""

    number: Count
    process: Name  # planned process whose host is asked; empty: the reports of all hosts
    request: Body  # JSON
    limit_s: Figure  # longest time that the program may wait for others


class EndNode(FollowerMessage, frozen=True):
    """All nodes end: end the ranks of this node, and the node."""

    reason: Text  # why the first node ended; empty after all work
    node: AnyNode = 0  # the node that ended first
    host: HostName = ""  # name of its host
    is_orderly: bool = False


ToLeader: TypeAlias = Follow | Following | FollowerEnds | FetchedThere | HostAnswered
ToFollower: TypeAlias = (
    FollowerAccepted | FollowerRefused | StartNode | FetchToo | AskHost | EndNode
)
