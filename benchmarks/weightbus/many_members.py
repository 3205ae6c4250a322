"""What one relay pays for a publish to a thousand engines: CPU seconds of its process.

The relay is the real one, over tcp and for tensors of a few bytes. The members are scripted: they
fetch every bucket and answer every command at once, hundreds to a process, each over connections of
its own. What they spend is not counted.
"""

import json
import statistics
import time
from dataclasses import dataclass, field
from pathlib import Path

import zmq

from benchmarks.broker.process import Driver, drivers
from benchmarks.weightbus.agent import SIZES
from benchmarks.weightbus.light_bus import light_bus
from benchmarks.weightbus.model import random_tensors
from slipstream.wire.messages.codec import decode_bucket_answer, decode_command, encode
from slipstream.wire.messages.manifest import WeightManifest
from slipstream.wire.messages.versions import PolicyVersion
from slipstream.wire.messages.weightbus import (
    Adopt,
    CommandOutcome,
    FetchBucket,
    Join,
    ReceiveVersion,
)

SIZE = "tiny"
_HEARTBEAT_S = 1.0
_LONGEST_S = 120.0
_POLL_MS = 20
_IDLE_S = 6.0


@dataclass(slots=True)
class ManyFigures:
    """Figures of each publish, and what the members cost between publishes."""

    num_members: int
    cpu_s: list[float] = field(default_factory=list)  # of the relay, for one publish
    seconds: list[float] = field(default_factory=list)  # until all have adopted it
    idle_cpu_s: float = 0.0  # of the relay, a second: heartbeats

    @property
    def median_cpu_s(self) -> float:
        """What a publish costs beyond the heartbeats of its time."""
        rows = zip(self.cpu_s, self.seconds, strict=True)
        return statistics.median(cpu_s - self.idle_cpu_s * seconds for cpu_s, seconds in rows)


def measure_many(num_members: int, publishes: int, *, processes: int = 2) -> ManyFigures:
    """Publish to so many scripted members."""
    tensors = random_tensors(SIZES[SIZE].specs())
    figures = ManyFigures(num_members)
    with light_bus(SIZE) as bus:
        share = num_members // processes
        scripted = [
            Driver(_members, str(bus.folder), f"p{index}", share) for index in range(processes)
        ]
        with drivers(*scripted):
            names = [f"p{index}" for index in range(processes)]
            bus.publish(0, tensors)
            _until(bus.folder, names, 0, share)
            idle_s, before_s = time.monotonic(), bus.relay_cpu_s()
            time.sleep(_IDLE_S)
            spent_s = bus.relay_cpu_s() - before_s
            figures.idle_cpu_s = spent_s / (time.monotonic() - idle_s)
            for step in range(1, publishes + 1):
                began_s, before_s = time.monotonic(), bus.relay_cpu_s()
                bus.publish(step, tensors)
                _until(bus.folder, names, step, share)
                figures.seconds.append(time.monotonic() - began_s)
                figures.cpu_s.append(bus.relay_cpu_s() - before_s)
                time.sleep(0.5)
            (bus.folder / "end").touch()
    return figures


def _until(folder: Path, names: list[str], step: int, count: int) -> None:
    """Wait until all members of all processes have adopted a version."""
    deadline_s = time.monotonic() + _LONGEST_S
    while time.monotonic() < deadline_s:
        done = []
        for name in names:
            path = folder / f"{name}.json"
            done.append(json.loads(path.read_text()) if path.exists() else {"step": -1})
        if all(one["step"] == step and one["adopted"] == count for one in done):
            return
        time.sleep(0.005)
    raise RuntimeError(f"step {step} was not adopted by all: {done}")


def _members(folder: str, name: str, count: int) -> None:
    """Answer for so many members until the benchmark ends."""
    _Scripted(Path(folder), name, count).run()


class _Member:
    """Two connections, and the version that is being received."""

    def __init__(self, context: "zmq.Context[zmq.Socket[bytes]]", folder: Path, name: str) -> None:
        self.commands, self.bulk = (context.socket(zmq.DEALER) for _ in range(2))
        for socket, path in ((self.commands, "weightbus.sock"), (self.bulk, "weights.sock")):
            socket.setsockopt(zmq.LINGER, 0)
            socket.connect(f"ipc://{folder}/sockets/{path}")
        self._join = Join(
            name=name, incarnation="a", device="cpu", torch_version="", transport="tcp"
        )
        self._adopted: PolicyVersion | None = None
        self._command_id = 0
        self._missing = 0

    def beat(self) -> None:
        join = self._join
        self.commands.send(
            encode(
                Join(
                    name=join.name,
                    incarnation=join.incarnation,
                    device="cpu",
                    torch_version="",
                    transport="tcp",
                    adopted=self._adopted,
                )
            )
        )

    def obey(self) -> PolicyVersion | None:
        """Carry out a command; return the version if it is adopted now."""
        match command := decode_command(b"".join(self.commands.recv_multipart())):
            case ReceiveVersion():
                self._command_id = command.command_id
                self._fetch(command.manifest)
            case Adopt():
                self._adopted = command.version
                done = CommandOutcome(
                    command_id=command.command_id, digest="d" * 32, num_in_flight=1
                )
                self.commands.send(encode(done))
                return command.version
            case _:
                pass
        return None

    def _fetch(self, manifest: WeightManifest) -> None:
        self._missing = len(manifest.buckets)
        for index in range(self._missing):
            self.bulk.send(encode(FetchBucket(version=manifest.version, index=index)))

    def take(self) -> None:
        """Take a bucket; the last one is answered for."""
        head, *_ = self.bulk.recv_multipart()
        if error := decode_bucket_answer(head).error:
            raise RuntimeError(error)
        self._missing -= 1
        if not self._missing:
            self.commands.send(encode(CommandOutcome(command_id=self._command_id)))


class _Scripted:
    def __init__(self, folder: Path, name: str, count: int) -> None:
        self._folder, self._name = folder, name
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        context.set(zmq.MAX_SOCKETS, 4 * count + 10)
        self._members = [_Member(context, folder, f"{name}-{index}") for index in range(count)]
        self._by_socket = {
            socket: (member, socket is member.bulk)
            for member in self._members
            for socket in (member.commands, member.bulk)
        }

    def run(self) -> None:
        poller = zmq.Poller()
        for socket in self._by_socket:
            poller.register(socket, zmq.POLLIN)
        beat_s, adopted, step = 0.0, 0, -1
        path = self._folder / f"{self._name}.json"
        while not (self._folder / "end").exists():
            if time.monotonic() > beat_s:
                beat_s = time.monotonic() + _HEARTBEAT_S
                for member in self._members:
                    member.beat()
            before = adopted, step
            for socket, _ in poller.poll(_POLL_MS):
                member, is_bulk = self._by_socket[socket]
                if is_bulk:
                    member.take()
                elif (version := member.obey()) is not None:
                    adopted = adopted + 1 if version.step == step else 1
                    step = version.step
            if (adopted, step) != before:
                written = path.with_suffix(".new")
                written.write_text(json.dumps({"step": step, "adopted": adopted}))
                written.replace(path)
