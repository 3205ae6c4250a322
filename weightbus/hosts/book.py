"""Node 0's book of the other nodes: admits them, answers them, and notices those that are gone.

It decides from messages and the clock only; leader.py has the socket.
"""

import logging
from dataclasses import dataclass

from slipstream.weightbus.hosts.membership import LONGEST_GAP_S, MOST_TEXT, Membership
from slipstream.weightbus.hosts.verdict import ASKED, HostEnd
from slipstream.wire.messages.followers import (
    EndNode,
    Follow,
    FollowerAccepted,
    FollowerEnds,
    FollowerRefused,
    FollowerState,
    Following,
    StartNode,
    ToFollower,
)
from slipstream.wire.process.cards import difference
from slipstream.wire.process.safe_text import one_line

_log = logging.getLogger(__name__)
_SIGNS_OF_TWO = 2  # signs of life since another process came as the same node: both are alive


@dataclass(slots=True)
class JoinedHost:
    """A process that is a node."""

    node: int
    incarnation: str
    host: str
    pid: int
    peer: bytes  # its connection
    state: FollowerState = "waiting"
    silent_s: float = 0.0
    num_signs: int = 0  # signs of life
    double: str = ""  # incarnation of another process that came as this node
    num_signs_then: int = 0  # signs of life when the other process came first


class HostBook:
    """The other nodes of a role. Call ``look`` at least every second."""

    def __init__(self, own: Membership, *, leader: str, host: str, now_s: float) -> None:
        """Start without other nodes.

        Args:
            own: Membership of node 0.
            leader: Incarnation of this process.
            host: Host of this process.
            now_s: Monotonic seconds.
        """
        self._own = own
        self._place = own.place
        self._hosts = {0: host}
        self._accepted = FollowerAccepted(leader=leader, host=host)
        self._looked_s = now_s
        self._start: StartNode | None = None
        self._end: EndNode | None = None
        self.known: dict[int, JoinedHost] = {}
        self.ended: dict[int, HostEnd] = {}  # ends of nodes after the start
        self.refused = ""  # reason of the last refusal
        self.differs = ""  # the same of a node that differs
        self.turned_away: dict[str, int] = {}  # incarnation -> node; its refusal ends the start

    # ---- state ---------------------------------------------------------------

    @property
    def missing(self) -> list[int]:
        """Nodes without a process."""
        return [node for node in range(1, self._place.nodes) if node not in self.known]

    def not_in(self, state: FollowerState) -> list[int]:
        """Return the nodes that are not in a state."""
        nodes = range(1, self._place.nodes)
        return [n for n in nodes if n not in self.known or self.known[n].state != state]

    @property
    def stopping(self) -> list[int]:
        """Nodes that were asked to end, and wait."""
        return [node for node, member in sorted(self.known.items()) if member.state == "stopping"]

    def silent(self, limit_s: float) -> dict[int, str]:
        """Return the nodes without a sign of life for ``limit_s``, with a text for each."""
        return {
            node: f"it gave no sign of life for {limit_s:g} s"
            for node, member in self.known.items()
            if member.silent_s >= limit_s and member.state != "done"
        }

    def named(self, node: int) -> str:
        """Return a node's name in logs."""
        return self._place.named(node, self._hosts.get(node, ""))

    def host_of(self, node: int) -> str:
        """Return a node's host; empty if no process has come as the node."""
        return self._hosts.get(node, "")

    # ---- decisions -----------------------------------------------------------

    def begin(self, start: StartNode) -> None:
        """Tell every node from now on to start its ranks; a node that ends then ends the others."""
        self._start = start
        self.turned_away.clear()  # all nodes are there without these

    def finish(self, end: EndNode) -> None:
        """Tell every node from now on to end."""
        self._end = end

    def look(self, now_s: float) -> None:
        """Let time pass: forget silent nodes before the start, record them as ended after it."""
        gap_s = min(now_s - self._looked_s, LONGEST_GAP_S)
        self._looked_s = now_s
        for member in self.known.values():
            member.silent_s += gap_s
        if self._end is not None:
            return
        limit_s = self._own.gone_s if self._start is None else self._own.silence_s
        for node, silence in self.silent(limit_s).items():
            if self._start is None:
                _log.warning("%s: %s; another is waited for", self.named(node), silence)
                del self.known[node]
            else:
                setting = f"{self._own.section}.node_silence_s"
                self.ended.setdefault(node, HostEnd(node, f"{silence} ({setting})"))

    def heard(self, peer: bytes, message: Follow | Following | FollowerEnds) -> ToFollower | None:
        """Return the answer to a message that came over a connection, if any."""
        member = self.known.get(message.node)
        if member is None or member.incarnation != message.incarnation:
            return self._from_stranger(peer, message, member)
        member.peer = peer
        member.silent_s = 0.0
        member.num_signs += 1
        if isinstance(message, FollowerEnds):
            self._gone(member, one_line(message.reason, most=MOST_TEXT))
            return None
        if isinstance(message, Following):
            member.state = message.state
        if self._end is not None:
            return self._end
        if self._start is not None and member.state == "waiting":
            return self._start
        return self._accepted

    def _gone(self, member: JoinedHost, reason: str) -> None:
        node, named = member.node, self.named(member.node)
        if self._end is not None:
            _log.info("%s has ended", named)
        elif self._start is None:
            _log.warning("%s ended: %s; another is waited for", named, reason or ASKED)
        else:
            end = HostEnd(node, reason or ASKED, is_orderly=not reason)
            self.ended.setdefault(node, end)
        del self.known[node]

    def _from_stranger(
        self, peer: bytes, message: Follow | Following | FollowerEnds, member: JoinedHost | None
    ) -> ToFollower | None:
        if isinstance(message, FollowerEnds):
            self.turned_away.pop(message.incarnation, None)
            return None
        if isinstance(message, Following):  # silent for too long, or follows an earlier node 0
            return EndNode(reason="node 0 does not know it, or no longer: it has to start again")
        named = self._place.named(message.node, message.host)
        if why := difference(self._own.facts, message.facts):
            self.differs = (
                f"{named} cannot {self._own.refusal} node 0 (host {self._hosts[0]}) at "
                f"{self._place.address}: {one_line(why, most=MOST_TEXT)}"
            )
            if not self._own.difference_ends:
                return self._refuse(self.differs)
            if self._start is None:  # the error of node 0, which waits until this one has heard it
                self.turned_away[message.incarnation] = message.node
            return FollowerRefused(reason=self.differs)
        if message.node >= self._place.nodes:
            return self._refuse(f"there is no {named} ({self._own.option})")
        if member is not None:
            return self._from_double(message, member)
        if message.node in self.ended or self._end is not None:
            return None  # all end; the process finds the next node 0
        self._hosts[message.node] = message.host
        self.known[message.node] = JoinedHost(
            message.node, message.incarnation, message.host, message.pid, peer
        )
        _log.info("%s is there", named)
        return self._accepted

    def _from_double(self, message: Follow, member: JoinedHost) -> ToFollower | None:
        """Refuse a second process of a node once the first has shown that it lives."""
        if member.double != message.incarnation:
            member.double, member.num_signs_then = message.incarnation, member.num_signs
            return None
        if member.num_signs < member.num_signs_then + _SIGNS_OF_TWO:
            return None
        return self._refuse(
            f"two processes came as {self.named(member.node)} to {self._place.address}: process "
            f"{member.pid} on host {one_line(member.host, most=100)} and process {message.pid} on "
            f"host {one_line(message.host, most=100)}, which is refused: give each host a number "
            f"of its own ({self._own.option})",
            is_taken=True,
        )

    def _refuse(self, reason: str, *, is_taken: bool = False) -> FollowerRefused:
        if reason != self.refused:
            _log.warning("%s", reason)
        self.refused = reason
        return FollowerRefused(reason=reason, is_taken=is_taken)
