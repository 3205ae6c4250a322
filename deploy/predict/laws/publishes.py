"""Pure: the cost of a publish between a learner and engines of a given size.

The law of publish_cost.py, with each engine as a receiver: engines on one host share its NICs, and
each loads a whole version over its own GPUs' PCIe.
"""

from dataclasses import replace

from slipstream.deploy.predict.laws.gpus import Cluster
from slipstream.deploy.predict.laws.publish_cost import Cost, Setup, cost_of


def publish_cost(
    version_bytes: float,
    cluster: Cluster,
    *,
    learner_gpus: int,
    engines: int,
    engine_ranks: int,
    fanout: int,
) -> Cost:
    """Return a publish's cost; ``fanout`` engines fetch from the learner's hosts, 0 for all."""
    size = cluster.gpus_per_host
    setup = Setup(
        version_bytes=version_bytes,
        learner_hosts=cluster.hosts(learner_gpus),
        engine_hosts=engines * cluster.hosts(engine_ranks),
        nics=cluster.nics,
        nic_bytes_s=cluster.nic_bytes_s,
        gpus=min(size, engine_ranks),
        pcie_bytes_s=cluster.pcie_bytes_s,
        fanout=fanout,
    )
    cost = cost_of(setup)
    on_a_host = min(engines, max(1, size // engine_ranks))
    arrives_s = on_a_host * version_bytes / (cluster.nics * cluster.nic_bytes_s)
    return replace(
        cost,
        stall_s=version_bytes / (learner_gpus * cluster.pcie_bytes_s),
        receive_s=max(cost.receive_s, arrives_s),
        pause_s=version_bytes / (engine_ranks * cluster.pcie_bytes_s),
    )
