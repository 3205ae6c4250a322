"""Pure: the cost of publishing one version, in seconds, bytes, messages and copies.

Hosts of the learner hold equal parts of a version, each rank of an engine its slice. Seconds assume
links at full rate and otherwise idle hosts.
"""

import math
from dataclasses import dataclass

STAGED_COMMANDS = 2  # Receive, Adopt
LIVE_COMMANDS = 3  # Offer, Pause, Commit; and LoadBucket for each bucket
DIGEST_BYTES_S = 11e9  # xxh3-128 on one core
SLOTS = 3  # slots in a learner host's memory


@dataclass(frozen=True, kw_only=True)
class Setup:
    """Sizes of publisher and receivers. Rates are in bytes per second."""

    version_bytes: float
    learner_hosts: int = 1  # each holds and sends its part
    engine_hosts: int = 1
    nics: int = 1  # network cards of each host
    nic_bytes_s: float = 50e9
    gpus: int = 8  # GPUs of each host
    pcie_bytes_s: float = 50e9  # bandwidth of each GPU
    fanout: int = 0  # engine hosts that fetch from the learner's hosts; 0 for all
    bucket_bytes: float = 64 * 2**20
    buckets: int | None = None  # number in the version; None to compute it
    connections: int = 4  # buckets on their way to an engine host at a time
    is_staged: bool = True  # received while the engine runs, then loaded
    delta_share: float = 1.0  # share of a version's bytes that travel

    @property
    def heads(self) -> int:
        """Engine hosts that fetch from the learner's hosts."""
        return min(self.fanout or self.engine_hosts, self.engine_hosts)

    @property
    def num_buckets(self) -> int:
        """Number of buckets of the version; no bucket spans parts."""
        if self.buckets is not None:
            return self.buckets
        part = self.version_bytes / self.learner_hosts
        return self.learner_hosts * math.ceil(part / self.bucket_bytes)


@dataclass(frozen=True, kw_only=True)
class Cost:
    """Cost of one publish. Bytes are those of tensors, without message framing."""

    stall_s: float  # learner's pause: copy from its GPUs to its hosts' memory
    receive_s: float  # until the last engine host has the version
    pause_s: float  # engine's pause
    digest_core_s: float  # seconds of a core on each engine host
    slot_bytes: float  # memory of each learner host
    learner_host_bytes: float  # bytes sent by each learner host
    relayed_bytes: float  # bytes sent by all learner hosts
    forwarded_bytes: float  # bytes sent by all engine hosts
    commands: int  # messages to the agents, each with one answer
    bucket_requests: int  # each with one answer
    copied_bytes: float  # copies of the bus within all engine hosts, before engines load


def cost_of(setup: Setup) -> Cost:
    """Return the cost of a publish."""
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
        commands=engines * per_engine + behind,  # one Admit per host behind another
        bucket_requests=engines * setup.num_buckets if setup.is_staged else 0,
        copied_bytes=engines * version + behind * travels if setup.is_staged else 0.0,
    )
