"""Durable throughput: generators to learner through the broker, against other ways of transport."""

import statistics
import time
from dataclasses import dataclass

from benchmarks.broker.process import (
    BrokerProcess,
    Driver,
    cpu_s,
    drivers,
    shared_number,
    work_folder,
)
from benchmarks.broker.roles import consume, generate

IN_FLIGHT_BYTES = 64 * 1024 * 1024  # as much as the baselines may have between their processes
GROUP_SIZE = 8
_STALENESS = 2
_SEAL_EVERY = 4
WARM_S = 1.5


@dataclass(frozen=True, slots=True)
class Throughput:
    rate: float  # trajectories per second: acknowledged, scored, delivered, fetched, committed
    broker_us: float  # CPU per trajectory
    redis_us: float
    drivers_us: float


def groups_per_step(payload_bytes: int) -> int:
    """Return G such that S + 1 steps of it are IN_FLIGHT_BYTES."""
    return max(8, IN_FLIGHT_BYTES // (GROUP_SIZE * (_STALENESS + 1) * payload_bytes))


def broker_throughput(payload_bytes: int, seconds: float) -> Throughput:
    settings: dict[str, object] = {
        "run__groups_per_step": groups_per_step(payload_bytes),
        "run__max_staleness_steps": _STALENESS,
        "run__group_size": GROUP_SIZE,
    }
    with work_folder() as folder, BrokerProcess(folder, **settings) as broker:
        version, stop = shared_number(), shared_number()
        started = (
            Driver(consume, broker.endpoint, version, stop, 0, 0, _SEAL_EVERY),
            Driver(generate, broker.endpoint, payload_bytes, version, stop, 0, "generator-0"),
        )
        with drivers(*started) as (consumer, producer):
            deadline = time.monotonic() + 30
            while not version.value:
                if time.monotonic() > deadline:
                    raise TimeoutError("the learner did not come up")
                time.sleep(0.02)
            time.sleep(WARM_S)
            pids = (broker.pid, broker.redis_pid, consumer.pid, producer.pid)
            began, before = time.monotonic(), [cpu_s(pid) for pid in pids]
            time.sleep(seconds)
            ended, after = time.monotonic(), [cpu_s(pid) for pid in pids]
            stop.value = 1
            trained = consumer.result(30)
            producer.result(30)
    inside = [one for one in trained if began <= one[0] <= ended]
    (first_s, first, _), (last_s, last, _) = inside[0], inside[-1]
    rate = (last - first) / (last_s - first_s)
    own, redis, *others = (
        1e6 * (b - a) / (rate * (ended - began)) for a, b in zip(before, after, strict=True)
    )
    return Throughput(rate, own, redis, sum(others))


def median_of(runs: list[Throughput]) -> Throughput:
    return Throughput(
        *(
            statistics.median(getattr(run, name) for run in runs)
            for name in ("rate", "broker_us", "redis_us", "drivers_us")
        )
    )
