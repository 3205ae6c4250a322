"""Pure: what the publish of one version costs, in seconds, bytes, messages and copies.

Hosts of the learner hold equal parts of a version, each rank of an engine its slice. Seconds are
those of links at their full rate, for hosts with nothing else to do.
"""

import math
from dataclasses import dataclass

STAGED_COMMANDS = 2  # Receive, Adopt
LIVE_COMMANDS = 3  # Offer, Pause, Commit; and LoadBucket for each bucket
DIGEST_BYTES_S = 11e9  # xxh3-128, of one core
SLOTS = 3  # of a learner host's memory


@dataclass(frozen=True, kw_only=True)
class Setup:
    """Who publishes what to whom. Rates are in bytes per second."""

    version_bytes: float
    learner_hosts: int = 1  # each holds and sends its part
    engine_hosts: int = 1
    nics: int = 1  # of each host
    nic_bytes_s: float = 50e9
    gpus: int = 8  # of each host
    pcie_bytes_s: float = 50e9  # of each GPU
    fanout: int = 0  # engine hosts that fetch from the learner's; 0 is all of them
    bucket_bytes: float = 64 * 2**20
    buckets: int | None = None  # of the version; None: as many as that makes
    connections: int = 4  # buckets on their way to an engine host at a time
    is_staged: bool = True  # received beside the running engine, then loaded
    delta_share: float = 1.0  # of a version's bytes that travel

    @property
    def heads(self) -> int:
        """Engine hosts that fetch from the learner's hosts."""
        return min(self.fanout or self.engine_hosts, self.engine_hosts)

    @property
    def num_buckets(self) -> int:
        """Buckets of the version, which never span parts."""
        if self.buckets is not None:
            return self.buckets
        part = self.version_bytes / self.learner_hosts
        return self.learner_hosts * math.ceil(part / self.bucket_bytes)


@dataclass(frozen=True, kw_only=True)
class Cost:
    """What one publish costs. Bytes are of tensors, without the framing of messages."""

    stall_s: float  # of the learner: its GPUs' weights to memory of its hosts
    receive_s: float  # until the last engine host has the version
    pause_s: float  # of an engine
    digest_core_s: float  # of each engine host
    slot_bytes: float  # of each learner host
    learner_host_bytes: float  # that leave each
    relayed_bytes: float  # that leave all learner hosts
    forwarded_bytes: float  # that leave all engine hosts
    commands: int  # to the agents, each of which has one answer
    bucket_requests: int  # each of which has one answer
    copied_bytes: float  # by the bus within all engine hosts, before engines load

    @property
    def wire_bytes(self) -> float:
        """Bytes between hosts."""
        return self.relayed_bytes + self.forwarded_bytes


def cost_of(setup: Setup) -> Cost:
    """Return what a publish costs."""
    version, engines = setup.version_bytes, setup.engine_hosts
    host_bytes_s = setup.nics * setup.nic_bytes_s
    travels = version * setup.delta_share
    behind = engines - setup.heads
    depth = math.ceil(engines / setup.heads)
    leaves = setup.heads * travels / setup.learner_hosts
    hop_s = setup.connections * setup.bucket_bytes * setup.delta_share / host_bytes_s
    receive_s = max(travels, leaves) / host_bytes_s + (depth - 1) * hop_s
    load_s = version / (setup.gpus * setup.pcie_bytes_s)
    per_engine = STAGED_COMMANDS if setup.is_staged else LIVE_COMMANDS + setup.num_buckets
    return Cost(
        stall_s=version / (setup.learner_hosts * setup.gpus * setup.pcie_bytes_s),
        receive_s=receive_s,
        pause_s=load_s if setup.is_staged else receive_s,
        digest_core_s=version / DIGEST_BYTES_S,
        slot_bytes=SLOTS * version / setup.learner_hosts,
        learner_host_bytes=leaves,
        relayed_bytes=setup.heads * travels,
        forwarded_bytes=behind * travels,
        commands=engines * per_engine + behind,  # one Admit for each that stands behind another
        bucket_requests=engines * setup.num_buckets if setup.is_staged else 0,
        copied_bytes=engines * version + behind * travels if setup.is_staged else 0.0,
    )
