"""Many simulated generators that ask for work on a schedule, whatever the broker does."""

import heapq
import random
import select
import statistics
import time
from dataclasses import dataclass

import zmq

from benchmarks.broker.peer import Peer
from benchmarks.broker.process import (
    BrokerProcess,
    Driver,
    SharedNumber,
    cpu_s,
    drivers,
    shared_number,
    work_folder,
)
from benchmarks.broker.roles import pack, unpack
from slipstream.wire.messages.broker import GroupsLeased, Heartbeat, LeaseGroups, TakeOver, TookOver
from slipstream.wire.messages.versions import PolicyVersion

RATE = 500.0  # leases per second, of all generators together
_NUM_DRIVERS = 2
_GROUPS = 200_000
_LATE_S = 0.0002  # a wait while all generators are waiting


@dataclass(frozen=True, slots=True)
class Leases:
    """What one level measured."""

    generators: int
    count: int
    broker_us: float  # CPU per lease
    redis_us: float
    p50_ms: float
    p99_ms: float


@dataclass(slots=True)
class _Generator:
    peer: Peer
    held: list[int]
    asked: dict[bytes, float]  # request -> when it was due, monotonic


def ask_on_schedule(
    endpoint: str,
    first: int,
    count: int,
    rate: float,
    version: int,
    begun: SharedNumber,
    window: SharedNumber,
) -> list[float]:
    """Lease at random moments (Poisson) until ``window`` is 2; return latencies while it is 1.

    A latency counts from the moment at which the lease was due, so that a broker that is late is
    not asked less. Every generator sends the heartbeats that the broker wants.
    """
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    context.set(zmq.MAX_SOCKETS, count + 64)
    generators: list[_Generator] = []
    poll = select.epoll()
    by_fd: dict[int, _Generator] = {}
    for i in range(first, first + count):
        one = _Generator(Peer(context, endpoint, "generator", f"generator-{i}"), [], {})
        generators.append(one)
        fd = int(one.peer.socket.getsockopt(zmq.FD))
        by_fd[fd] = one
        poll.register(fd, select.EPOLLIN)
    begun.value += 1
    adopted = unpack(version)
    chance = random.Random(first)  # noqa: S311 a schedule, not a secret
    heartbeat_s = generators[0].peer.welcome.heartbeat_s
    now = time.monotonic()
    due = now + chance.expovariate(rate)
    beats = [(now + chance.random() * heartbeat_s, i) for i in range(count)]
    heapq.heapify(beats)
    latencies: list[float] = []

    def listen(one: _Generator) -> None:
        while (received := one.peer.receive(0.0)) is not None:
            request_id, answer, _ = received
            if isinstance(answer, GroupsLeased):
                was_due = one.asked.pop(request_id)
                one.held += [group.lease_id for group in answer.groups]
                if not answer.groups:
                    raise RuntimeError("the broker had no work")
                if window.value == 1:
                    latencies.append(time.monotonic() - was_due)

    while window.value < 2:
        now = time.monotonic()
        while due <= now:
            idle = [one for one in chance.sample(generators, min(5, count)) if not one.asked]
            if not idle:
                break  # the broker keeps one such request of each: ask as soon as one is answered
            wanted = LeaseGroups(adopted=adopted, max_sequences=1, wait_s=5.0)
            idle[0].asked[idle[0].peer.send(wanted)] = due
            due += chance.expovariate(rate)
            listen(idle[0])
        while beats[0][0] <= now:
            at, i = heapq.heappop(beats)
            one = generators[i]
            if one.held:
                one.peer.send(Heartbeat(lease_ids=tuple(one.held)))
                listen(one)
            heapq.heappush(beats, (at + heartbeat_s, i))
        for fd, _ in poll.poll(max(_LATE_S, min(due, beats[0][0]) - time.monotonic())):
            listen(by_fd[fd])
    for one in generators:
        one.peer.close()
    return latencies


def measure_leases(num_generators: int, *, seconds: float, warm_s: float = 2.0) -> Leases:
    """Lease at RATE from so many generators."""
    settings: dict[str, object] = {
        "run__groups_per_step": _GROUPS,
        "run__group_size": 1,
        "run__max_staleness_steps": 0,
        "sampling__max_prompt_tokens": 16,
        "sampling__max_response_tokens": 16,
        "broker__drop_zero_variance": "false",
    }
    with work_folder() as folder, BrokerProcess(folder, **settings) as broker:
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        learner = Peer(context, broker.endpoint, "learner", "learner")
        version: PolicyVersion = learner.ask(TakeOver(step=0), TookOver).version
        begun = [shared_number() for _ in range(_NUM_DRIVERS)]
        window = shared_number()
        share = num_generators // _NUM_DRIVERS
        rate = RATE / _NUM_DRIVERS
        started = [
            Driver(
                ask_on_schedule,
                broker.endpoint,
                i * share,
                share,
                rate,
                pack(version),
                begun[i],
                window,
            )
            for i in range(_NUM_DRIVERS)
        ]
        try:
            with drivers(*started):
                deadline = time.monotonic() + 60
                while not all(flag.value for flag in begun):
                    if time.monotonic() > deadline:
                        raise TimeoutError("the generators did not come up")
                    time.sleep(0.05)
                time.sleep(warm_s)
                before = cpu_s(broker.pid), cpu_s(broker.redis_pid)
                window.value = 1
                time.sleep(seconds)
                window.value = 2
                after = cpu_s(broker.pid), cpu_s(broker.redis_pid)
                latencies = sorted(x for d in started for x in d.result(30))
        finally:
            learner.close()
            context.term()
    own, redis = (1e6 * (b - a) / len(latencies) for a, b in zip(before, after, strict=True))
    p99 = latencies[int(0.99 * len(latencies))]
    return Leases(
        num_generators, len(latencies), own, redis, 1e3 * statistics.median(latencies), 1e3 * p99
    )
