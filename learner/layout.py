"""Which ranks of a learner are on which node, and where the nodes meet."""

from dataclasses import dataclass
from typing import Self

from slipstream.wire.errors import ConfigError
from slipstream.wire.process.cards import node_named
from slipstream.wire.settings.rendezvous import Address, parse_rendezvous


@dataclass(frozen=True, slots=True)
class Layout:
    """Ranks in order, the same number on every node."""

    ranks: int
    ranks_per_node: int

    @classmethod
    def of(cls, *, ranks: int, ranks_per_node: int, tensor_parallel: int) -> Self:
        """Return the layout of these settings; 0 ranks per node puts all on one node.

        Raises:
            ConfigError: nodes would have different numbers of ranks, or share a layer's shards.
        """
        if not ranks_per_node:
            return cls(ranks, ranks)
        if ranks_per_node > ranks or ranks % ranks_per_node:
            raise ConfigError(
                f"learner.ranks = {ranks} is not a multiple of "
                f"learner.ranks_per_node = {ranks_per_node}"
            )
        if ranks_per_node % tensor_parallel:
            raise ConfigError(
                f"learner.ranks_per_node = {ranks_per_node} is not a multiple of "
                f"learner.tensor_parallel = {tensor_parallel}: the shards of a layer exchange "
                "tensors all the time, and stay on one node"
            )
        return cls(ranks, ranks_per_node)

    @property
    def nodes(self) -> int:
        """Number of nodes."""
        return self.ranks // self.ranks_per_node

    def ranks_of(self, node: int) -> range:
        """Return the ranks on a node; the first runs in the process started there."""
        return range(node * self.ranks_per_node, (node + 1) * self.ranks_per_node)

    def named(self, node: int, host: str = "") -> str:
        """Return a node's name in logs, with its ranks, and its host if known."""
        return node_named(node, self.ranks_of(node), host)


@dataclass(frozen=True, slots=True)
class Place:
    """The node that this process is on. ``address`` is where several nodes meet."""

    layout: Layout
    node: int = 0
    address: Address | None = None

    @property
    def ranks(self) -> range:
        """Ranks on this node."""
        return self.layout.ranks_of(self.node)


def place_of(layout: Layout, node: int | None, rendezvous: str | None) -> Place:
    """Return the place that a command line names.

    Raises:
        ConfigError: the options do not fit the settings.
    """
    placed = f"learner.ranks = {layout.ranks} with learner.ranks_per_node = {layout.ranks_per_node}"
    if layout.nodes == 1:
        if node is not None or rendezvous is not None:
            raise ConfigError(
                f"{placed} is one node: --node and --rendezvous are for several; set "
                "learner.ranks_per_node to the ranks of each"
            )
        return Place(layout)
    if node is None or rendezvous is None:
        raise ConfigError(
            f"{placed} needs {layout.nodes} nodes: start each with start-learner --node K "
            f"--rendezvous HOST:PORT, K from 0 to {layout.nodes - 1}, HOST an address of node 0"
        )
    if not 0 <= node < layout.nodes:
        raise ConfigError(f"--node is {node}: {placed} has nodes 0 to {layout.nodes - 1}")
    return Place(layout, node, parse_rendezvous(rendezvous))
