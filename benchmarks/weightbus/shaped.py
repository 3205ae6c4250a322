"""Seconds of a publish between hosts whose links have a rate: namespaces, shaped by tc."""

import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from slipstream.deploy.predict.laws.publish_cost import Setup, cost_of
from tests.e2e.hosts import end, several_hosts, shape
from tests.support.bus import far_process
from tests.support.waiting import until

_PAYLOAD = 1448 / 1514  # of an Ethernet frame's bytes, as tc counts them: TCP with timestamps
_FLOAT = 4


@dataclass(frozen=True, slots=True)
class Shape:
    """A version, and the links that it takes."""

    bits_s: float = 1e9
    receivers: int = 3
    fanout: int = 0
    tensors: int = 16
    tensor_bytes: int = 4 << 20  # each is a bucket
    connections: int = 1

    @property
    def expected_s(self) -> float:
        """Seconds until the last engine has the version, as the arithmetic has it."""
        setup = Setup(
            version_bytes=self.tensors * self.tensor_bytes,
            engine_hosts=self.receivers,
            nic_bytes_s=self.bits_s / 8 * _PAYLOAD,
            fanout=self.fanout,
            bucket_bytes=self.tensor_bytes,
            connections=self.connections,
        )
        return cost_of(setup).receive_s


def measure_shaped(what: Shape, *, publishes: int = 4) -> list[float]:
    """Return the seconds until the last engine has a version, of each publish but a first one."""
    with tempfile.TemporaryDirectory(prefix="sp-", dir="/tmp") as name:
        return _measured(Path(name), what, publishes + 1)


def _measured(folder: Path, what: Shape, publishes: int) -> list[float]:
    names = [f"g{i}" for i in range(what.receivers)]
    shared = folder / "shared"
    shared.mkdir()
    far_process.make_keys(shared, names)
    sizes = f"--folder {shared} --count {what.tensors} --size {what.tensor_bytes // _FLOAT}"
    program = f"{sys.executable} -m tests.support.bus.far_process"
    words = [
        f"{program} relay {sizes} --fanout {what.fanout} --bucket-bytes {what.tensor_bytes} "
        f"--publishes {publishes}"
    ]
    words += [f"{program} agent {sizes} --name {n} --connections {what.connections}" for n in names]
    started: list[subprocess.Popen[bytes]] = []
    with several_hosts(folder, "head", *names) as hosts:
        try:
            for number, (host, command) in enumerate(zip(hosts, words, strict=True), 1):
                shape(host, what.bits_s)
                command += f" --address 10.77.0.{number}"
                started.append(host.start(command, folder / f"{host.folder.name}.log"))
            relay = started[0]
            until(lambda: relay.poll() is not None, lambda: _logs(folder))
            if relay.returncode:
                raise RuntimeError(_logs(folder))
        finally:
            for process in started:
                end(process)
    records = far_process.records_in(shared)
    if any(record.failed for record in records):
        raise RuntimeError(_logs(folder))
    slowest: dict[int, float] = {}
    for record in records:
        step, took_s = record.version.step, record.phase_seconds["receive"]
        slowest[step] = max(took_s, slowest.get(step, 0.0))
    return [took_s for step, took_s in slowest.items() if step > 0]


def _logs(folder: Path) -> str:
    return "\n".join(path.read_text()[-2000:] for path in folder.glob("*.log"))
