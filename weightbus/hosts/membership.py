"""What a process brings to the meeting of the hosts of its role."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from slipstream.wire.files.keys import ClientKey
from slipstream.wire.process.cards import node_named
from slipstream.wire.process.safe_text import one_line
from slipstream.wire.settings.rendezvous import Address

LONGEST_GAP_S = 5.0  # in longer gaps this process did not run either
LONGEST_WAIT_S = 1.0  # limit of a wait for a change
LINGER_MS = 1_000  # time for the last messages to leave
MOST_TEXT = 2_000  # characters of a reason


@dataclass(frozen=True, slots=True)
class HostPlace:
    """A node of a role on several hosts; its ranks are those of one host."""

    node: int
    nodes: int
    ranks_per_node: int  # 0: its hosts have none
    address: Address  # node 0 listens there

    def named(self, node: int, host: str = "") -> str:
        """Return a node's name in logs, with its ranks, and its host if known."""
        if not self.ranks_per_node:
            return f"node {node} (host {one_line(host, most=100)})" if host else f"node {node}"
        ranks = range(node * self.ranks_per_node, (node + 1) * self.ranks_per_node)
        return node_named(node, ranks, one_line(host, most=100))


@dataclass(frozen=True, slots=True, kw_only=True)
class Membership:
    """A place among the hosts of a role, with the facts, key and deadlines of this process."""

    place: HostPlace
    facts: Mapping[str, str]  # equal on all nodes; in the order of comparison
    key: ClientKey  # proved by this node, and by all others unless there are ``admitted`` ones
    server_key: str = ""  # public key that node 0 proves, if it has one of its own
    admitted: Mapping[str, str] = field(default_factory=dict)  # names by public key, on node 0
    section: str  # settings section with rendezvous_timeout_s and node_silence_s
    option: str  # command-line option with the number of a node
    refusal: str  # what a node that differs cannot do, as in "cannot REFUSAL node 0"
    advice: str  # how a node that does not come is started
    key_source: str  # setting or file that the key is from
    rendezvous_timeout_s: float
    silence_s: float  # time without a sign of life after which a node has ended
    gone_s: float = 10.0  # silence before the start, after which another process may be that node
    difference_ends: bool = False  # a node that differs ends the start; else another is waited for
