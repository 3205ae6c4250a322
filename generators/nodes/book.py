"""Node 0's book of the other nodes: admits them, answers them, and notices those that are gone.

It decides from messages and the clock only; leader.py has the socket.
"""

import logging
from collections.abc import Mapping
from dataclasses import dataclass

from slipstream.generators.nodes.limits import LONGEST_GAP_S, MOST_TEXT
from slipstream.generators.nodes.place import NodePlace
from slipstream.wire.messages.followers import (
    EndNode,
    Follow,
    FollowerEnds,
    FollowerState,
    Following,
    Heeded,
    Refused,
    StartNode,
    ToFollower,
)
from slipstream.wire.process.cards import difference
from slipstream.wire.process.safe_text import one_line

_log = logging.getLogger(__name__)
GONE_S = 10.0  # silence before the start, after which another process may be that node
_SIGNS_OF_TWO = 2  # signs of life since another process came as the same node: both are alive


@dataclass(slots=True)
class Known:
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


class FollowerBook:
    """The other nodes of an engine. Call ``look`` at least every second."""

    def __init__(
        self,
        place: NodePlace,
        facts: Mapping[str, str],
        *,
        leader: str,
        host: str,
        silence_s: float,
        now_s: float,
    ) -> None:
        """Start without other nodes.

        Args:
            place: Place of node 0.
            facts: Facts that every node must have in common with it.
            leader: Incarnation of this process.
            host: Host of this process.
            silence_s: Time without a sign of life after which a node has ended.
            now_s: Monotonic seconds.
        """
        self._place = place
        self._facts = facts
        self._leader = leader
        self._hosts = {0: host}
        self._silence_s = silence_s
        self._looked_s = now_s
        self._start: StartNode | None = None
        self._end: EndNode | None = None
        self.known: dict[int, Known] = {}
        self.ended: dict[int, str] = {}  # reasons by node, after the start; empty if asked to end
        self.refused = ""  # reason of the last refusal

    # ---- state ---------------------------------------------------------------

    @property
    def missing(self) -> list[int]:
        """Nodes without a process."""
        return [node for node in range(1, self._place.nodes) if node not in self.known]

    @property
    def not_running(self) -> list[int]:
        """Nodes whose ranks do not run."""
        nodes = range(1, self._place.nodes)
        return [n for n in nodes if n not in self.known or self.known[n].state != "running"]

    @property
    def stopping(self) -> list[int]:
        """Nodes that were asked to end, and wait."""
        return [node for node, known in sorted(self.known.items()) if known.state == "stopping"]

    def silent(self, limit_s: float) -> dict[int, str]:
        """Return the nodes without a sign of life for ``limit_s``, with a text for each."""
        return {
            node: f"it gave no sign of life for {limit_s:g} s"
            for node, known in self.known.items()
            if known.silent_s >= limit_s
        }

    def named(self, node: int) -> str:
        """Return a node's name in logs."""
        return self._place.named(node, one_line(self._hosts.get(node, ""), most=100))

    # ---- decisions -----------------------------------------------------------

    def begin(self, start: StartNode) -> None:
        """Tell every node from now on to start its ranks; a node that ends then ends the engine."""
        self._start = start

    def finish(self, end: EndNode) -> None:
        """Tell every node from now on to end."""
        self._end = end

    def look(self, now_s: float) -> None:
        """Let time pass: forget silent nodes before the start, record them as ended after it."""
        gap_s = min(now_s - self._looked_s, LONGEST_GAP_S)
        self._looked_s = now_s
        for node, known in list(self.known.items()):
            known.silent_s += gap_s
            if self._start is None and self._end is None and known.silent_s >= GONE_S:
                _log.warning(
                    "%s gave no sign of life for %g s: another is waited for",
                    self.named(node),
                    GONE_S,
                )
                del self.known[node]
            elif (
                self._start is not None and self._end is None and known.silent_s >= self._silence_s
            ):
                why = self.silent(self._silence_s)[node]
                self.ended.setdefault(node, f"{why} (generators.node_silence_s)")

    def heard(self, peer: bytes, message: Follow | Following | FollowerEnds) -> ToFollower | None:
        """Return the answer to a message that came over a connection, if any."""
        known = self.known.get(message.node)
        if known is None or known.incarnation != message.incarnation:
            return self._from_stranger(peer, message, known)
        known.peer = peer
        known.silent_s = 0.0
        known.num_signs += 1
        if isinstance(message, FollowerEnds):
            self._gone(known, one_line(message.reason, most=MOST_TEXT))
            return None
        if isinstance(message, Following):
            known.state = message.state
        if self._end is not None:
            return self._end
        if self._start is not None and known.state == "waiting":
            return self._start
        return Heeded(leader=self._leader)

    def _gone(self, known: Known, reason: str) -> None:
        if self._end is not None:
            _log.info("%s has ended", self.named(known.node))
        elif self._start is None:
            why = reason or "it was asked to end"
            _log.warning("%s ended: %s; another is waited for", self.named(known.node), why)
        else:
            self.ended.setdefault(known.node, reason)
        del self.known[known.node]

    def _from_stranger(
        self, peer: bytes, message: Follow | Following | FollowerEnds, known: Known | None
    ) -> ToFollower | None:
        if isinstance(message, FollowerEnds):
            return None
        if isinstance(message, Following):  # silent for too long, or follows an earlier node 0
            return EndNode(reason="node 0 does not know it, or no longer: it has to start again")
        named = self._place.named(message.node, one_line(message.host, most=100))
        if why := difference(self._facts, message.facts):
            return self._refuse(
                f"{named} cannot be a node of the engine of node 0 (host {self._hosts[0]}) at "
                f"{self._place.address}: {one_line(why, most=MOST_TEXT)}"
            )
        if message.node >= self._place.nodes:
            return self._refuse(f"there is no {named} (generators.nodes, --follow)")
        if known is not None:
            return self._from_double(message, known)
        if message.node in self.ended or self._end is not None:
            return None  # the engine ends; the process finds the next node 0
        self._hosts[message.node] = message.host
        self.known[message.node] = Known(
            message.node, message.incarnation, message.host, message.pid, peer
        )
        _log.info("%s is there", named)
        return Heeded(leader=self._leader)

    def _from_double(self, message: Follow, known: Known) -> ToFollower | None:
        """Refuse a second process of a node once the first has shown that it lives."""
        if known.double != message.incarnation:
            known.double, known.num_signs_then = message.incarnation, known.num_signs
            return None
        if known.num_signs < known.num_signs_then + _SIGNS_OF_TWO:
            return None
        return self._refuse(
            f"two processes came as {self.named(known.node)} to {self._place.address}: process "
            f"{known.pid} on host {one_line(known.host, most=100)} and process {message.pid} on "
            f"host {one_line(message.host, most=100)}, which is refused: give each host a number "
            "of its own (--follow)",
            is_taken=True,
        )

    def _refuse(self, reason: str, *, is_taken: bool = False) -> Refused:
        if reason != self.refused:
            _log.warning("%s", reason)
        self.refused = reason
        return Refused(reason=reason, is_taken=is_taken)
