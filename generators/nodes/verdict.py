"""Which node's end ends an engine, decided from what a node sees."""

from collections.abc import Mapping
from typing import NamedTuple

# Words of errors that ranks have because another rank is gone.
_OF_PEERS = (
    *("gloo", "nccl", "connection closed by peer", "connection reset by peer", "broken pipe"),
    *("distbackenderror", "diststoreerror", "distnetworkerror"),
)


class Blame(NamedTuple):
    """The node that ended first, and why."""

    node: int
    text: str


def is_of_peers(reason: str) -> bool:
    """True if a server says that it ended for a reason that is on another node."""
    return any(words in reason.lower() for words in _OF_PEERS)


def blamed(node: int, own: str, ended: Mapping[int, str], silent: Mapping[int, str]) -> Blame:
    """Return whose end ended an engine.

    A reason that no other node can have caused goes first, then silence, then whatever was said.

    Args:
        node: this one.
        own: why its server ended; empty if it did not.
        ended: why other nodes say that they ended.
        silent: nodes that give no sign of life, and for how long.
    """
    said = [Blame(number, why) for number, why in sorted(ended.items())]
    if own:
        said.append(Blame(node, own))
    for one in said:
        if not is_of_peers(one.text):
            return one
    for number, why in sorted(silent.items()):
        return Blame(number, why)
    return said[0] if said else Blame(node, "for no known reason")
