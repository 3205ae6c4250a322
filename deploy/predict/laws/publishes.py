"""Pure: the cost of a publish between a learner and engines of a given size.

The law of publish_cost.py: one engine of each host fetches a version, or each host of an engine
that takes several; each engine loads it into its own GPUs.
"""

from dataclasses import replace

from slipstream.deploy.predict.laws.gpus import Cluster
from slipstream.deploy.predict.laws.publish_cost import Cost, Rates, Setup, cost_of
from slipstream.weightbus.config import WeightBusSection
from slipstream.wire.models.fp8 import bytes_per_parameter
from slipstream.wire.models.hf_config import HfConfig


def version_bytes(hf: HfConfig, bus: WeightBusSection) -> float:
    """Return the bytes of a version of a model that trains in bfloat16."""
    return bytes_per_parameter(hf, is_fp8=bus.is_fp8) * hf.num_parameters


def publish_cost(
    version_bytes: float,
    cluster: Cluster,
    *,
    learner_gpus: int,
    engines: int,
    engine_ranks: int,
    bus: WeightBusSection,
    has_shadow: bool = False,
) -> Cost:
    """Return a publish's cost under the settings of the weight bus.

    With ``has_shadow`` engines load a version next to their live weights.
    """
    hosts = cluster.hosts(engine_ranks)
    fetches = engines * hosts if hosts > 1 else cluster.hosts(engines * engine_ranks)
    setup = Setup(
        version_bytes=version_bytes,
        learner_hosts=cluster.hosts(learner_gpus),
        engine_hosts=fetches,
        nics=cluster.nics,
        nic_bytes_s=cluster.nic_bytes_s,
        gpus=engine_ranks,
        pcie_bytes_s=cluster.pcie_bytes_s,
        fanout=bus.fanout,
        bucket_bytes=bus.bucket_bytes,
        connections=bus.connections or Setup.connections,
        rates=Rates.of(bus),
        has_shadow=has_shadow,
    )
    stall_s = version_bytes / (learner_gpus * cluster.pcie_bytes_s)
    return replace(cost_of(setup), stall_s=stall_s)
