"""Pure: the cost of publishing one version, in seconds, bytes, messages and copies.

Hosts of the learner hold equal parts of a version, each rank of an engine its slice. Seconds assume
links at full rate, the rates of ``Rates``, and otherwise idle hosts.
"""

import math
from dataclasses import dataclass
from typing import Self

from slipstream.weightbus.config import WeightBusSection

STAGED_COMMANDS = 2  # Receive, Adopt
LIVE_COMMANDS = 3  # Offer, Pause, Commit; and LoadBucket for each bucket
SLOTS = 3  # slots in a learner host's memory
_WIRE = {"encrypted": 0.82e9, "plain": 2.7e9}  # bytes per second, by ``weightbus.bulk``
_DIGEST = {"xxh3": 11e9, "keyed": 5.7e9, "blake2b": 1.4e9}  # rate of a core


@dataclass(frozen=True, kw_only=True)
class Rates:
    """Bytes per second of what a publish does but for the links.

    Wire, digests and deltas are measured on a CPU (docs/performance.md). The others are assumed, of
    memory that is not pinned: nothing of them is measured on a GPU.
    """

    wire: float = _WIRE["encrypted"]  # rate of a connection, with a core at each end
    digest: float = _DIGEST["xxh3"]  # rate of a core
    encode: float = 1.1e9  # rate of a learner host over the versions that its deltas come from
    expect: float = 8e9  # rate of the check of a host, through one GPU
    load: float = 8e9  # rate of each GPU of an engine
    check: float = 1e12  # rate of each GPU of an engine over its weights
    copy: float = 1e12  # rate of each GPU of an engine from its second copy to its weights

    @classmethod
    def of(cls, bus: WeightBusSection) -> Self:
        """Return the rates under these settings."""
        return cls(wire=_WIRE[bus.bulk], digest=_DIGEST[bus.digest_kind])


@dataclass(frozen=True, kw_only=True)
class Setup:
    """Sizes of publisher and receivers; numbers of threads are those of hosts with 128 cores.

    Rates are in bytes per second.
    """

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
    connections: int = 16  # number to an engine host, and of threads of a learner host
    is_staged: bool = True  # received while the engine runs, then loaded
    delta_share: float = 1.0  # share of a version's bytes that travel
    digest_threads: int = 16  # number on a learner host
    has_shadow: bool = False  # engines load next to their live weights; with ``is_staged``
    rates: Rates = Rates()

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
    digest_s: float  # digests of the bytes, before any leaves
    receive_s: float  # until the last engine host has the version, from the first byte on
    expect_s: float  # computing what engines must hold
    arrival_s: float  # from the written version until the last engine may adopt it
    load_s: float  # load of an engine
    check_s: float  # checksums of an engine
    copy_s: float  # copy on the device of an engine with a second copy of its weights
    pause_s: float  # pause of an engine: that copy, or load and check
    digest_core_s: float  # seconds of a core on each engine host
    slot_bytes: float  # memory of each learner host
    learner_host_bytes: float  # bytes sent by each learner host
    relayed_bytes: float  # bytes sent by all learner hosts
    forwarded_bytes: float  # bytes sent by all engine hosts
    commands: int  # messages to the agents, each with one answer
    bucket_requests: int  # each with one answer
    copied_bytes: float  # copies of the bus within all engine hosts, before engines load

    @property
    def total_s(self) -> float:
        """Seconds from the learner's copy until the last engine runs the version."""
        return self.stall_s + self.arrival_s + self.pause_s


def cost_of(setup: Setup) -> Cost:
    """Return the cost of a publish.

    A staged version travels over ``connections`` of each engine host, and over as many threads of
    each learner host. A live one moves in a collective, while the engine is paused, from the first
    learner host, which has all of it, pinned.
    """
    version, engines, rates = setup.version_bytes, setup.engine_hosts, setup.rates
    part = version / (setup.learner_hosts if setup.is_staged else 1)
    host_bytes_s = setup.nics * setup.nic_bytes_s
    if setup.is_staged:
        host_bytes_s = min(host_bytes_s, setup.connections * rates.wire)
    travels = version * setup.delta_share
    behind = engines - setup.heads
    depth = math.ceil(engines / setup.heads)
    leaves = setup.heads * part * setup.delta_share
    hop_s = setup.connections * setup.bucket_bytes * setup.delta_share / host_bytes_s
    receive_s = max(travels, leaves) / host_bytes_s + (depth - 1) * hop_s
    if setup.is_staged:  # agents compare digests of whole tensors
        receive_s = max(receive_s, version / (setup.connections * rates.digest))
    if setup.delta_share < 1:
        receive_s = max(receive_s, part / rates.encode)
    expect_s = part / (rates.expect if setup.is_staged else setup.pcie_bytes_s)
    per_engine = STAGED_COMMANDS if setup.is_staged else LIVE_COMMANDS + setup.num_buckets
    digest_s = part / (setup.digest_threads * rates.digest)
    # Relays compute what engines must hold meanwhile, each of what its host has.
    ready_s = max(receive_s, expect_s)
    load_s = version / (setup.gpus * rates.load) if setup.is_staged else ready_s
    check_s = version / (setup.gpus * rates.check)
    copy_s = version / (setup.gpus * rates.copy)
    pause_s, before_pause_s = load_s + check_s, 0.0
    if setup.has_shadow and setup.is_staged:
        pause_s, before_pause_s = copy_s, pause_s
    return Cost(
        stall_s=version / (setup.learner_hosts * setup.gpus * setup.pcie_bytes_s),
        digest_s=digest_s if setup.is_staged else 0.0,
        receive_s=receive_s if setup.is_staged else 0.0,
        expect_s=expect_s if setup.is_staged else 0.0,
        arrival_s=digest_s + ready_s + before_pause_s if setup.is_staged else 0.0,
        load_s=load_s,
        check_s=check_s,
        copy_s=copy_s,
        pause_s=pause_s,
        digest_core_s=version / rates.digest,
        slot_bytes=SLOTS * part,
        learner_host_bytes=leaves,
        relayed_bytes=setup.heads * travels,
        forwarded_bytes=behind * travels,
        commands=engines * per_engine + behind,  # one Admit per host behind another
        bucket_requests=engines * setup.num_buckets if setup.is_staged else 0,
        copied_bytes=engines * version + behind * travels if setup.is_staged else 0.0,
    )
