"""Place of a process in an engine on several hosts."""

from dataclasses import dataclass

from slipstream.generators.config import GeneratorSettings
from slipstream.wire.errors import ConfigError
from slipstream.wire.process.cards import node_named
from slipstream.wire.settings.rendezvous import Address, parse_rendezvous


@dataclass(frozen=True, slots=True)
class NodePlace:
    """A node of an engine; its ranks are those of one host."""

    node: int
    nodes: int
    ranks_per_node: int
    address: Address  # node 0 listens there

    def named(self, node: int, host: str = "") -> str:
        """Return a node's name in logs, with its ranks, and its host if known."""
        ranks = range(node * self.ranks_per_node, (node + 1) * self.ranks_per_node)
        return node_named(node, ranks, host)


def place_of(
    settings: GeneratorSettings, follow: int | None, rendezvous: str | None
) -> NodePlace | None:
    """Return the place that a command line names; None for an engine on one host.

    Raises:
        ConfigError: the options do not fit the settings.
    """
    generators, run = settings.generators, settings.run
    nodes = generators.nodes
    if nodes == 1:
        if follow is not None or rendezvous is not None:
            option = "--follow" if follow is not None else "--rendezvous"
            raise ConfigError(
                f"{option} is for an engine on several hosts, and generators.nodes is 1"
            )
        return None
    if rendezvous is None:
        raise ConfigError(
            f"generators.nodes = {nodes} needs --rendezvous HOST:PORT, an address of node 0, and "
            f"on each other host --follow N, from 1 to {nodes - 1}"
        )
    if follow is not None and not 0 < follow < nodes:
        raise ConfigError(
            f"--follow is {follow}, expected 1 to {nodes - 1} (generators.nodes = {nodes})"
        )
    if not (run.broker and run.key_file):
        missing = "run.broker" if not run.broker else "run.key_file"
        raise ConfigError(
            f"generators.nodes = {nodes} needs {missing}: the hosts of an engine prove one key, to "
            "each other and to the learner"
        )
    address = parse_rendezvous(rendezvous)
    return NodePlace(follow or 0, nodes, generators.ranks_per_node, address)
