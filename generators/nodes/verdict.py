"""Decides which node ended an engine, from the observations of one node."""

from collections.abc import Mapping
from typing import NamedTuple

# Phrases in errors of ranks that have lost another rank.
_OF_PEERS = (
    *("gloo", "nccl", "connection closed by peer", "connection reset by peer", "broken pipe"),
    *("distbackenderror", "diststoreerror", "distnetworkerror"),
)


class Blame(NamedTuple):
    """The node that ended first, and why."""

    node: int
    text: str


def is_of_peers(reason: str) -> bool:
    """True if a server ended for a reason on another node."""
    return any(phrase in reason.lower() for phrase in _OF_PEERS)


def blamed(node: int, own: str, ended: Mapping[int, str], silent: Mapping[int, str]) -> Blame:
    """Return the node that ended an engine.

    A reason that no other node can have caused comes first, then silence, then any given reason.

    Args:
        node: Number of this node.
        own: Reason that its server ended; empty if it did not.
        ended: Reasons that other nodes give for their end.
        silent: Texts for the nodes without a sign of life.
    """
    said = [Blame(number, reason) for number, reason in sorted(ended.items())]
    if own:
        said.append(Blame(node, own))
    for blame in said:
        if not is_of_peers(blame.text):
            return blame
    for number, reason in sorted(silent.items()):
        return Blame(number, reason)
    return said[0] if said else Blame(node, "for no known reason")
