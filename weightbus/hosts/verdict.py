"""Pure: which host ended first and so ends the others, from the observations of one host."""

from collections.abc import Mapping, Set
from dataclasses import dataclass, field
from typing import NamedTuple

from slipstream.wire.errors import text_of
from slipstream.wire.process.command_line import EXIT_FAILED

EXPLAIN_S = 3.0  # silence after which a node counts as gone, once a part of another has failed
SETTLE_S = 1.0  # additional wait for reports of other nodes
ASKED = "it was asked to end"
# Phrases in errors of ranks that have lost another rank.
_OF_PEERS = (
    *("gloo", "nccl", "connection closed by peer", "connection reset by peer", "broken pipe"),
    *("distbackenderror", "diststoreerror", "distnetworkerror"),
)


class HostEnd(NamedTuple):
    """The node that ended first, and why."""

    node: int
    text: str
    is_orderly: bool = False  # it was asked to end and had nothing to save

    def exit_code(self, node: int, *, asked_to_stop: bool) -> int:
        """Return the exit code of a node that ends for this reason.

        ``asked_to_stop`` is True if this node was asked to stop: that excuses every node except
        node 0, which saves; node 0 is excused only if the first end was asked for, too.
        """
        if self.is_orderly and (self.node == 0 or asked_to_stop):
            return 0
        return 0 if asked_to_stop and node != 0 else EXIT_FAILED


def ended_by(node: int, error: BaseException | None) -> HostEnd:
    """Return the report to the other nodes of what ends this node; None: it was asked to end."""
    if error is None or isinstance(error, SystemExit | KeyboardInterrupt):
        return HostEnd(node, ASKED, is_orderly=True)
    return HostEnd(node, text_of(error))


def is_of_peers(reason: str) -> bool:
    """True if something ended for a reason on another node."""
    return any(phrase in reason.lower() for phrase in _OF_PEERS)


@dataclass(frozen=True, slots=True)
class HostView:
    """State of a node and of the others at one moment, as this node sees it."""

    node: int
    known: HostEnd | None = None  # reason known to the nodes already
    own: str = ""  # why a part of this node ended
    own_is_caused: bool = False  # another node is the cause
    reported: Mapping[int, HostEnd] = field(default_factory=dict)  # ends of other nodes
    silent: Mapping[int, str] = field(default_factory=dict)  # nodes silent for too long, with texts
    stopping: Set[int] = frozenset()  # nodes that were asked to end
    stop_is_ours: bool = False  # node 0 was asked to end, too, or may still be
    is_final: bool = False  # nothing more is heard


def verdict_of(view: HostView) -> HostEnd | None:
    """Return the end that ends this node; None while all is well, or more may be heard.

    The order: a reason known to the nodes already; a reason that no other node can have caused;
    silence; a stop that node 0 was not asked for, which it alone decides; last, an end that was
    caused by another, still unknown one.
    """
    if view.known is not None:
        return view.known
    caused: list[HostEnd] = []
    for _, end in sorted(view.reported.items()):
        if not is_of_peers(end.text):
            return end
        caused.append(end)
    if view.own:
        own = HostEnd(view.node, view.own)
        if not view.own_is_caused:
            return own
        caused.append(own)
    for node, text in sorted(view.silent.items()):
        return HostEnd(node, text)
    if view.node == 0 and not view.stop_is_ours:
        for node in sorted(view.stopping):
            return HostEnd(node, f"{ASKED}, and node 0 was not")
    return caused[0] if caused and view.is_final else None
