"""Decision which node's end ends the learner, from one node's view."""

import signal
from collections.abc import Mapping, Set
from dataclasses import dataclass, field

import msgspec

from slipstream.learner.layout import Layout
from slipstream.wire.errors import text_of
from slipstream.wire.process.command_line import EXIT_FAILED
from slipstream.wire.process.safe_text import one_line

EXIT_COLLECTIVE = 4  # exit code after a failed collective: another rank is the reason
_CONSEQUENCES = (EXIT_COLLECTIVE, -signal.SIGABRT)  # NCCL's watchdog aborts
_COLLECTIVES = ("gloo", "nccl")  # torch raises their failures as RuntimeError, named in the text
_MOST_TEXT = 2_000  # characters; the store that carries the text has no authentication


class Ended(msgspec.Struct, frozen=True, kw_only=True):
    """The node that ended first, and why; all nodes learn the same."""

    node: int
    text: str
    orderly: bool = False  # it was asked to end and had nothing to save

    def line(self, layout: Layout, hosts: Mapping[int, str]) -> str:
        """Return a line with this end as the reason of a node's end."""
        text = one_line(self.text, most=_MOST_TEXT)
        return f"{layout.named(self.node, hosts.get(self.node, ''))} ended: {text}"

    def exit_code(self, node: int, *, asked_to_stop: bool) -> int:
        """Return the exit code of a node that ends for this reason.

        ``asked_to_stop`` is True if this node was asked to stop: that excuses every node except
        node 0, which saves; node 0 is excused only if the first end was asked for, too.
        """
        if self.orderly and (self.node == 0 or asked_to_stop):
            return 0
        return 0 if asked_to_stop and node != 0 else EXIT_FAILED


def ended_by(node: int, error: BaseException) -> Ended:
    """Return the report to the other nodes of an error that ends this node."""
    if isinstance(error, SystemExit | KeyboardInterrupt):
        return Ended(node=node, text="it was asked to end", orderly=True)
    return Ended(node=node, text=text_of(error))


def is_of_collective(error: BaseException) -> bool:
    """Return True if an error says that a collective failed here, for a reason elsewhere."""
    text = str(error).lower()
    return isinstance(error, RuntimeError) and any(name in text for name in _COLLECTIVES)


@dataclass(frozen=True, slots=True)
class View:
    """State of a node and of the others at one moment, as this node sees it."""

    node: int
    ended: Ended | None = None  # reason known to the nodes already
    lost: str = ""  # why node 0 cannot be reached any more
    silent: str = ""  # how long node 0 has given no sign of life, if that is too long
    silent_nodes: Mapping[int, str] = field(default_factory=dict)  # the same for other nodes
    dead_ranks: Mapping[int, int] = field(default_factory=dict)  # exit codes of ranks on this node
    is_unexplained: bool = False  # a collective failed here, too long ago
    stopping: Set[int] = frozenset()  # nodes that were asked to end
    stop_is_ours: bool = False  # node 0 was asked to end, too, or may still be


def verdict_of(view: View) -> Ended | None:
    """Return the end that ends this node; None while all is well.

    The order: a reason known to the nodes already; a rank of this node that ended for a reason of
    its own, since the other nodes cannot see it; findings of node 0 alone: silence, and a stop that
    node 0 was not asked for; last, a rank that ended because of another, still unknown end.
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
