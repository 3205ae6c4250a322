"""Broker CPU per trajectory against that of raw ZeroMQ forwarding.

The bar is of a trajectory's whole way through the broker (benchmarks/broker/throughput.py): leased,
submitted and acknowledged, scored, delivered, fetched, committed. Here is what forwarding costs,
and what taking in and acknowledging alone costs the broker.
"""

import os
import time
from dataclasses import dataclass

import zmq
from typing_extensions import override

from benchmarks.broker.baselines import HEADER_BYTES
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
from benchmarks.broker.roles import Generator, pack, trajectory_bytes, unpack
from slipstream.wire.messages.broker import TakeOver, TookOver
from slipstream.wire.messages.versions import PolicyVersion

WINDOW = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class PathCost:
    """CPU microseconds per trajectory of one turn."""

    whole_us: float  # of the broker: from the lease to the commit
    taken_in_us: float  # of the broker: in and acknowledged, leased before
    forwarded_us: float  # in, out, and an acknowledgement back: the cheaper of two ways

    @property
    def whole_ratio(self) -> float:
        return self.whole_us / self.forwarded_us

    @property
    def taken_in_ratio(self) -> float:
        return self.taken_in_us / self.forwarded_us

    @override
    def __str__(self) -> str:
        return (
            f"broker {self.whole_us:.0f}, of it in and acknowledged {self.taken_in_us:.0f}, "
            f"forwarding {self.forwarded_us:.0f}"
        )


_WAIT_S = 120.0
_CACHE_BYTES = 32 * 1024 * 1024  # full after warming up: memory is used again, as in a long run


# ---- raw forwarding ----------------------------------------------------------


def forward_in_c(folder: str) -> None:
    """ROUTER to DEALER and back, ``zmq.proxy``: no Python per message."""
    front, back = _ends(folder)
    zmq.proxy(front, back)


def forward_in_python(folder: str) -> None:
    front, back = _ends(folder)
    poller = zmq.Poller()
    poller.register(front, zmq.POLLIN)
    poller.register(back, zmq.POLLIN)
    while True:
        for socket, _ in poller.poll():
            other = back if socket is front else front
            for _ in range(64):
                try:
                    message = socket.recv_multipart(zmq.NOBLOCK, copy=False)
                except zmq.Again:
                    break
                other.send_multipart(message, copy=False)


def _ends(folder: str) -> tuple["zmq.Socket[bytes]", "zmq.Socket[bytes]"]:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    front, back = context.socket(zmq.ROUTER), context.socket(zmq.DEALER)
    for socket, name in ((front, "front"), (back, "back")):
        socket.setsockopt(zmq.SNDHWM, 0)
        socket.setsockopt(zmq.RCVHWM, 0)
        socket.bind(f"ipc://{folder}/{name}")
    return front, back


def acknowledge(folder: str) -> None:
    """The other side: takes trajectories and answers each with a short message."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    socket = context.socket(zmq.DEALER)
    socket.connect(f"ipc://{folder}/back")
    while True:
        peer, request_id, *_ = socket.recv_multipart(copy=False)
        socket.send_multipart([peer.bytes, request_id.bytes, b"\x81\xa4kind\xa4done"])


def push(
    folder: str, payload_bytes: int, count: int, begun: SharedNumber, go: SharedNumber
) -> float:
    """Send ``count`` trajectories, at most WINDOW unacknowledged, once started."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    socket = context.socket(zmq.DEALER)
    socket.setsockopt(zmq.SNDHWM, 0)
    socket.connect(f"ipc://{folder}/front")
    sent = trajectory_bytes(payload_bytes)
    ids = [os.urandom(8), os.urandom(16)]
    frames = [*ids, os.urandom(HEADER_BYTES), sent.payload, sent.response]
    socket.send_multipart(frames, copy=False)
    socket.recv_multipart()
    begun.value = 1
    while not go.value:
        time.sleep(0.001)
    began = time.monotonic()
    unanswered = 0
    for _ in range(count):
        while unanswered >= WINDOW or (unanswered and socket.poll(0)):
            socket.recv_multipart()
            unanswered -= 1
        socket.send_multipart(frames, copy=False)
        unanswered += 1
    for _ in range(unanswered):
        socket.recv_multipart()
    return time.monotonic() - began


def forwarding_cpu(payload_bytes: int, count: int, *, in_c: bool) -> float:
    """CPU seconds of the forwarder per trajectory: in, out, and the acknowledgement back."""
    with work_folder() as folder:
        begun, go = shared_number(), shared_number()
        forwarder = Driver(forward_in_c if in_c else forward_in_python, str(folder))
        other = Driver(acknowledge, str(folder))
        producer = Driver(push, str(folder), payload_bytes, count, begun, go)
        with drivers(forwarder, other, producer):
            _until(begun)
            before = cpu_s(forwarder.pid)
            go.value = 1
            producer.result(_WAIT_S)
            return (cpu_s(forwarder.pid) - before) / count


# ---- the broker --------------------------------------------------------------


def lease_and_submit(
    endpoint: str,
    payload_bytes: int,
    count: int,
    version: int,
    begun: SharedNumber,
    go: SharedNumber,
) -> float:
    """Lease all groups first; once started, submit their trajectories."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    peer = Peer(context, endpoint, "generator", "generator-0")
    generator = Generator(peer, trajectory_bytes(payload_bytes), window=WINDOW, lanes=4 * count)
    while generator.num_todo < count:
        generator.lease(unpack(version))
        generator.listen(0.01)
    while generator.acked < _warm(count):
        generator.submit()
        generator.listen(1.0)
    begun.value = 1
    while not go.value:
        time.sleep(0.001)
    began = time.monotonic()
    while generator.acked < count:
        generator.submit()
        generator.listen(1.0)
    return time.monotonic() - began


def broker_cpu(payload_bytes: int, count: int) -> tuple[float, float]:
    """CPU seconds per trajectory, submitted and acknowledged: of the broker, of its Redis."""
    settings: dict[str, object] = {
        "run__groups_per_step": count // 8,
        "run__max_staleness_steps": 0,
        "broker__high_water_bytes": 1 << 40,  # all of it is leased at once
        "broker__lease_s": 600,
        "broker__cache_bytes": _CACHE_BYTES,
    }
    with work_folder() as folder, BrokerProcess(folder, **settings) as broker:
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        learner = Peer(context, broker.endpoint, "learner", "learner")
        version: PolicyVersion = learner.ask(TakeOver(step=0), TookOver).version
        begun, go = shared_number(), shared_number()
        arguments = (broker.endpoint, payload_bytes, count, pack(version), begun, go)
        try:
            with drivers(Driver(lease_and_submit, *arguments)) as (producer,):
                _until(begun)
                before = cpu_s(broker.pid), cpu_s(broker.redis_pid)
                go.value = 1
                producer.result(_WAIT_S)
                after = cpu_s(broker.pid), cpu_s(broker.redis_pid)
        finally:
            learner.close()
            context.term()
    counted = count - _warm(count)
    own, redis = ((b - a) / counted for a, b in zip(before, after, strict=True))
    return own, redis


def _warm(count: int) -> int:
    return count // 3


def _until(flag: SharedNumber) -> None:
    deadline = time.monotonic() + _WAIT_S
    while not flag.value:
        if time.monotonic() > deadline:
            raise TimeoutError("a driver did not begin")
        time.sleep(0.01)
