"""Which node's end ends the learner, decided from what a node sees."""

import signal
from collections.abc import Mapping, Set
from dataclasses import dataclass, field

import msgspec

from slipstream.learner.layout import Layout
from slipstream.wire.errors import text_of
from slipstream.wire.process.command_line import EXIT_FAILED
from slipstream.wire.process.visible import one_line

EXIT_COLLECTIVE = 4  # of a rank in which a collective failed: another rank is the reason
_CONSEQUENCES = (EXIT_COLLECTIVE, -signal.SIGABRT)  # the second by NCCL's watchdog
_COLLECTIVES = ("gloo", "nccl")  # torch raises their failures as RuntimeError, named in the text
_MOST_TEXT = 2_000  # characters; the store that carries it knows no authentication


class Ended(msgspec.Struct, frozen=True, kw_only=True):
    """The node that ended first, and why; every node learns the same one."""

    node: int
    text: str
    orderly: bool = False  # it was asked to end and had nothing to save

    def line(self, layout: Layout, hosts: Mapping[int, str]) -> str:
        """Return it as the reason of this node's end."""
        text = one_line(self.text, most=_MOST_TEXT)
        return f"{layout.named(self.node, hosts.get(self.node, ''))} ended: {text}"

    def exit_code(self, node: int, *, asked_to_stop: bool) -> int:
        """Return the code that a node ends with for it.

        ``asked_to_stop`` is what this node was: that excuses every node but the one that saves,
        unless the other end was asked for, too.
        """
        if self.orderly and (self.node == 0 or asked_to_stop):
            return 0
        return 0 if asked_to_stop and node != 0 else EXIT_FAILED


def ended_by(node: int, error: BaseException) -> Ended:
    """Return what the other nodes are told of an error that ends this one."""
    if isinstance(error, SystemExit | KeyboardInterrupt):
        return Ended(node=node, text="it was asked to end", orderly=True)
    return Ended(node=node, text=text_of(error))


def is_of_collective(error: BaseException) -> bool:
    """True if an error says that a collective failed here, for a reason that is elsewhere."""
    text = str(error).lower()
    return isinstance(error, RuntimeError) and any(name in text for name in _COLLECTIVES)


@dataclass(frozen=True, slots=True)
class View:
    """What a node sees of itself and of the others at one moment."""

    node: int
    ended: Ended | None = None  # what the nodes know already
    lost: str = ""  # why node 0 cannot be reached any more
    silent: str = ""  # how long node 0 has given no sign of life, if that is too long
    silent_nodes: Mapping[int, str] = field(default_factory=dict)  # the same, of others
    dead_ranks: Mapping[int, int] = field(default_factory=dict)  # exit codes of ranks here
    is_unexplained: bool = False  # for too long: a collective failed here
    stopping: Set[int] = frozenset()  # nodes that were asked to end
    stop_is_ours: bool = False  # node 0 was asked to end, too, or may still be


def verdict_of(view: View) -> Ended | None:
    """Return whose end ends this node; None while all is well.

    What the nodes know already goes first; then a rank of this node that ended for a reason of its
    own, since the other nodes cannot see it; then what only node 0 can judge: silence, and a stop
    that it was not asked for; last a rank that ended because of another that nobody knows.
    """
    if view.ended is not None:
        return view.ended
    for rank, code in sorted(view.dead_ranks.items()):
        if code not in _CONSEQUENCES:
            return Ended(node=view.node, text=f"its rank {rank} ended with code {code}")
    if view.lost or view.silent:
        return Ended(node=0, text=view.lost or view.silent)
    for node, text in sorted(view.silent_nodes.items()):
        return Ended(node=node, text=text)
    if view.node == 0 and not view.stop_is_ours:
        for node in sorted(view.stopping):
            return Ended(node=node, text="it was asked to end, and node 0 was not")
    if view.is_unexplained:
        for rank, code in sorted(view.dead_ranks.items()):
            return Ended(node=view.node, text=f"its rank {rank} ended with code {code}")
    return None
