"""Roles of a run on several equal nodes, numbered from 0."""

from collections.abc import Iterator
from dataclasses import dataclass

from slipstream.deploy.config import RunConfig, refuse_engines_on_several_hosts
from slipstream.deploy.interop.render.template import FilledText, assignments
from slipstream.weightbus.transports import TRANSPORTS, TransportEntry, chosen
from slipstream.wire.errors import ConfigError


@dataclass(frozen=True, slots=True)
class NodeGpus:
    """A node, and its GPUs for a process; empty on a CPU."""

    node: int
    gpus: tuple[int, ...] = ()

    @property
    def visible(self) -> str:
        """The GPUs as CUDA_VISIBLE_DEVICES names them."""
        return ",".join(map(str, self.gpus))


@dataclass(frozen=True, slots=True)
class NodeLayout:
    """The processes of a run on nodes.

    Broker and reward workers are on the first node, the learner on the first nodes, generators on
    the remaining GPUs and on further nodes.
    """

    learner: tuple[NodeGpus, ...]  # GPUs by node of the learner
    generators: tuple[NodeGpus, ...]
    reward_workers: int

    @property
    def num_nodes(self) -> int:
        """Number of nodes."""
        return 1 + max(place.node for place in (*self.learner, *self.generators))


def layout_of(
    config: RunConfig, *, gpus_per_node: int, setting: str, generators_per_node: int = 1
) -> NodeLayout:
    """Return the nodes and GPUs of a run's processes.

    Args:
        config: Settings of the run.
        gpus_per_node: GPUs of every node; no effect on CPUs.
        setting: Setting with the number of GPUs.
        generators_per_node: Generators on each node if generators.device is cpu.

    Raises:
        ConfigError: A node has too few GPUs for the learner's ranks on it, or for an engine, or
            an engine needs several hosts.
    """
    refuse_engines_on_several_hosts(config)
    nodes, ranks = config.learner.layout.nodes, config.learner.layout.ranks_per_node
    count = config.generators.generators.count
    workers = config.broker.reward.workers
    if config.generators.device == "cpu":
        learner = tuple(NodeGpus(node) for node in range(nodes))
        generators = tuple(NodeGpus(i // generators_per_node) for i in range(count))
        return NodeLayout(learner, generators, workers)
    size = config.generators.generators.num_ranks
    if ranks > gpus_per_node:
        raise ConfigError(
            f"{setting} = {gpus_per_node}, but the learner has {ranks} ranks on a node "
            "(learner.ranks)"
        )
    if count and size > gpus_per_node:
        raise ConfigError(
            f"{setting} = {gpus_per_node}, but an engine takes {size} GPUs of one node "
            "(generators.sglang.tp_size)"
        )
    engines = _engines(nodes, ranks, gpus_per_node, size)
    return NodeLayout(
        tuple(NodeGpus(node, tuple(range(ranks))) for node in range(nodes)),
        tuple(next(engines) for _ in range(count)),
        workers,
    )


def _engines(nodes: int, ranks: int, num_gpus: int, size: int) -> Iterator[NodeGpus]:
    """Yield GPUs of engines: first on the learner's nodes, then on further nodes."""
    node = 0
    while True:
        first = ranks if node < nodes else 0
        for start in range(first, num_gpus - size + 1, size):
            yield NodeGpus(node, tuple(range(start, start + size)))
        node += 1


def transport_of(config: RunConfig) -> TransportEntry:
    """Return the facts of a run's transport."""
    return TRANSPORTS[chosen(config.learner.weightbus.transport)]


def script_variables(config: RunConfig, layout: NodeLayout) -> FilledText:
    """Return assignments of shell for a script that starts the roles on their nodes."""
    engines = " ".join(f"{engine.node}:{engine.visible}" for engine in layout.generators)
    variables = assignments(
        learner_nodes=len(layout.learner),
        learner_gpus=layout.learner[0].visible,
        reward_workers=layout.reward_workers,
        collectives=int(transport_of(config).dials_host),
    )
    return FilledText(f"{variables}generators=({engines}) # node:GPUs of each\n")
