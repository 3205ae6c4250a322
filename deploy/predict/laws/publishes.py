"""Pure: the cost of a publish between a learner and engines of a given size.

The law of publish_cost.py, with each engine as a receiver: engines on one host share its NICs, and
each loads a whole version over its own GPUs' PCIe.
"""

from dataclasses import replace

from slipstream.deploy.predict.laws.gpus import Cluster
from slipstream.deploy.predict.laws.publish_cost import Cost, Rates, Setup, cost_of
from slipstream.weightbus.config import WeightBusSection


def publish_cost(
    version_bytes: float,
    cluster: Cluster,
    *,
    learner_gpus: int,
    engines: int,
    engine_ranks: int,
    bus: WeightBusSection,
) -> Cost:
    """Return a publish's cost under the settings of the weight bus."""
    size = cluster.gpus_per_host
    setup = Setup(
        version_bytes=version_bytes,
        learner_hosts=cluster.hosts(learner_gpus),
        engine_hosts=engines * cluster.hosts(engine_ranks),
        nics=cluster.nics,
        nic_bytes_s=cluster.nic_bytes_s,
        gpus=engine_ranks,
        pcie_bytes_s=cluster.pcie_bytes_s,
        fanout=bus.fanout,
        bucket_bytes=bus.bucket_bytes,
        connections=bus.connections or Setup.connections,
        rates=Rates.of(bus),
    )
    cost = cost_of(setup)
    on_a_host = min(engines, max(1, size // engine_ranks))
    arrives_s = on_a_host * version_bytes / (cluster.nics * cluster.nic_bytes_s)
    return replace(
        cost,
        stall_s=version_bytes / (learner_gpus * cluster.pcie_bytes_s),
        receive_s=max(cost.receive_s, arrives_s),
    )
