"""Hosts for tests of several: network namespaces over one file system."""

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import psutil
import pytest

from tests.support.tiny_run import ROOT, tiny_inputs, tiny_settings
from tests.support.waiting import HANG_S, until

SCP = """#!/bin/sh
# scp [-r] head:PATH . between two "hosts" that share a file system
[ "$1" != -r ] || shift
cp -r "$SLIPSTREAM_TEST_HEAD/${1#head:}" "$2"
"""


_LOOK_S = 1.0  # at all roles of a run, which takes a tenth of a second of a core


@dataclass
class Host:
    """A network namespace and a folder."""

    name: str  # of the namespace; empty is this machine's own
    folder: Path
    environment: dict[str, str]
    link: str = ""  # its network device

    @property
    def _inside(self) -> list[str]:
        return ["ip", "netns", "exec", self.name] if self.name else []

    def start(self, command: str, output: Path) -> "subprocess.Popen[bytes]":
        with output.open("ab") as log:
            return subprocess.Popen(
                [*self._inside, "sh", "-c", f"exec {command}"],
                cwd=self.folder,
                stdout=log,
                stderr=log,
                env=self.environment,
            )

    def run(self, command: str) -> str:
        done = subprocess.run(
            [*self._inside, "sh", "-ec", command],
            cwd=self.folder,
            capture_output=True,
            text=True,
            check=False,
            timeout=HANG_S,
            env=self.environment,
        )
        assert done.returncode == 0, f"{command}\n{done.stdout}{done.stderr}"
        return done.stdout


def ip(*words: str) -> None:
    done = subprocess.run(["ip", *words], capture_output=True, text=True, check=False)
    if done.returncode != 0:
        pytest.skip(f"no network namespaces here: ip {' '.join(words)}: {done.stderr.strip()}")


@dataclass
class Link:
    """The only connection between two hosts, if it is not that of one network."""

    round_trip_s: float
    mbit: float  # per second, in each direction


@contextmanager
def several_hosts(tmp_path: Path, *names: str, link: Link | None = None) -> Iterator[list[Host]]:
    """Yield hosts 10.77.0.1, 10.77.0.2, ... on one network, which find each other by name.

    With a ``link`` there are two of them, at its ends.
    """
    if os.geteuid() != 0 or shutil.which("ip") is None:
        pytest.skip("network namespaces need root and the command ip")
    tag = f"sp{os.getpid() % 100_000}"
    spaces = [f"{tag}-{name}" for name in names]
    switch = f"{tag}-switch"  # of its own, so that the machine's own network stays as it is
    bin_folder = tmp_path / "bin"
    bin_folder.mkdir()
    (bin_folder / "scp").write_text(SCP)
    (bin_folder / "scp").chmod(0o755)
    path = f"{bin_folder}:{Path(sys.executable).parent}:/usr/sbin:/usr/bin:/sbin:/bin"
    environment = {
        "PATH": path,
        "HOME": str(tmp_path),
        "PYTHONPATH": f"{ROOT / 'src'}:{ROOT}",  # of this checkout
        "OMP_NUM_THREADS": "1",
        "COLUMNS": "200",
        "SLIPSTREAM_TEST_HEAD": str(tmp_path / names[0]),
    }
    addresses = [f"10.77.0.{i}" for i in range(1, len(names) + 1)]
    known = "".join(f"{a} {name}\n" for a, name in zip(addresses, names, strict=True))
    devices = [f"{tag}x{i}" for i in range(len(names))]
    passing: subprocess.Popen[bytes] | None = None
    try:
        ip("netns", "add", switch)
        if link is None:
            plug_in(switch, devices)
        else:
            passing = connect(switch, devices, link)
        for i, (space, address) in enumerate(zip(spaces, addresses, strict=True)):
            ip("netns", "add", space)
            ip("-n", switch, "link", "set", devices[i], "netns", space)
            ip("-n", space, "addr", "add", f"{address}/24", "dev", devices[i])
            ip("-n", space, "link", "set", devices[i], "up")
            ip("-n", space, "link", "set", "lo", "up")
            (tmp_path / names[i]).mkdir()
            (Path("/etc/netns") / space).mkdir(parents=True)
            hosts_file = Path("/etc/netns") / space / "hosts"
            hosts_file.write_text("127.0.0.1 localhost\n" + known)
        yield [
            Host(space, tmp_path / name, environment, device)
            for space, name, device in zip(spaces, names, devices, strict=True)
        ]
    finally:
        if passing is not None:
            passing.kill()
            passing.communicate()
        for space in (*spaces, switch):
            subprocess.run(["ip", "netns", "del", space], check=False, capture_output=True)
            shutil.rmtree(Path("/etc/netns") / space, ignore_errors=True)


def shape(host: Host, bits_s: float, *, delay_ms: float = 0.0) -> None:
    """Have a host send at most so many bits per second, each of them so late."""
    rate = f"rate {bits_s / 1e6:g}mbit"
    if delay_ms:
        host.run(f"tc qdisc add dev {host.link} root netem {rate} delay {delay_ms:g}ms limit 10000")
    else:
        host.run(f"tc qdisc add dev {host.link} root tbf {rate} burst 256kb latency 50ms")


def plug_in(switch: str, devices: Sequence[str]) -> None:
    """Make devices in a namespace, all on one bridge."""
    ip("-n", switch, "link", "add", "bridge", "type", "bridge")
    ip("-n", switch, "link", "set", "bridge", "up")
    for i, name in enumerate(devices):
        port = f"port{i}"
        ip("-n", switch, "link", "add", port, "type", "veth", "peer", "name", name)
        ip("-n", switch, "link", "set", port, "master", "bridge", "up")


def connect(switch: str, devices: Sequence[str], link: Link) -> "subprocess.Popen[bytes]":
    """Make two devices in a namespace, and a process that passes packets on between them."""
    if not Path("/dev/net/tun").exists():
        pytest.skip("a slow link needs /dev/net/tun")
    command = [
        *("ip", "netns", "exec", switch, sys.executable, "-m", "tests.support.slow_link"),
        *("--devices", *devices, "--delay-s", str(link.round_trip_s / 2)),
        *("--mbit", str(link.mbit)),
    ]
    passing = subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert passing.stdout is not None
    assert passing.stdout.readline() == b"ready\n"
    return passing


@contextmanager
def two_hosts(tmp_path: Path, link: Link | None = None) -> Iterator[tuple[Host, Host]]:
    """Yield head (10.77.0.1) and another host, which finds it under that name."""
    with several_hosts(tmp_path, "head", "far", link=link) as (head, far):
        yield head, far


def end(process: "subprocess.Popen[bytes]") -> None:
    with suppress(psutil.NoSuchProcess):
        tree = psutil.Process(process.pid).children(recursive=True)
        process.kill()
        for child in tree:
            with suppress(psutil.NoSuchProcess):
                child.kill()
    process.wait()


class Roles:
    """Roles on hosts, by name, which end with the block; their output is in a file of that name."""

    def __init__(self) -> None:
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        self._outputs: dict[str, Path] = {}

    def start(self, host: Host, name: str, command: str) -> "subprocess.Popen[bytes]":
        """Start one, or start it again."""
        self._outputs[name] = host.folder / f"{name}.log"
        self.processes[name] = host.start(command.strip(), self._outputs[name])
        return self.processes[name]

    def log(self, name: str) -> str:
        return self._outputs[name].read_text()

    def logs(self) -> str:
        return "".join(f"==== {name}\n{self.log(name)}" for name in self._outputs)

    def wait(
        self, *names: str, look: Callable[[], object] = lambda: None, every_s: float = _LOOK_S
    ) -> None:
        """Wait until these have ended, while no role fails; ``look`` is called now and then."""

        def ended() -> bool:
            look()
            failed = [name for name, one in self.processes.items() if one.poll() not in {None, 0}]
            assert not failed, f"{failed}\n{self.logs()}"
            return all(self.processes[name].poll() == 0 for name in names)

        until(ended, self.logs, every_s=every_s)

    def end_broker(self) -> None:
        """Wait for all others, then press Ctrl-C of the broker."""
        self.wait(*(name for name in self.processes if name != "broker"))
        self.processes["broker"].send_signal(signal.SIGINT)
        assert self.processes["broker"].wait(HANG_S) in {0, 130}, self.logs()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for process in self.processes.values():
            if process.poll() is None:
                end(process)


def toml_of(settings: dict[str, object]) -> str:
    lines = []
    for key, value in settings.items():
        shown = str(value).lower() if isinstance(value, bool) else json.dumps(value, default=str)
        lines.append(f"{key} = {shown}")
    return "\n".join(lines) + "\n"


LISTEN = "broker.listen=tcp://0.0.0.0:5555"  # of a run whose generators are on another host
REACH = "run.broker=tcp://head:5555 run.key_file=far.key"  # of these


def write_far_run(head: Host, far: Host, settings: dict[str, object]) -> None:
    """Write a tiny run on one host whose generators are on another one, which gets a key."""
    tiny_inputs(head.folder)
    of_run = {
        "run.dir": "runs",
        "generators.count": 0,
        "weightbus.listen": "tcp://10.77.0.1:5600",
        "weightbus.transport": "tcp",
        "checkpoint.export_at_end": False,
    }
    text = toml_of(tiny_settings(head.folder) | of_run | settings)
    (head.folder / "run.toml").write_text(text)
    head.run("slipstream keys make far --role generator --config run.toml")
    shutil.copy(head.folder / "runs/keys/clients/far.key", far.folder)
    shutil.copy(head.folder / "run.toml", far.folder)
