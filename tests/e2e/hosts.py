"""Hosts for tests of several: network namespaces over one file system."""

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from tests.support.tiny_run import ROOT
from tests.support.waiting import HANG_S

SCP = """#!/bin/sh
# scp head:PATH . between two "hosts" that share a file system
cp "$SLIPSTREAM_TEST_HEAD/${1#head:}" "$2"
"""


def fences(document: Path, heading: str) -> list[tuple[str, str]]:
    """Return (language, text) of the code in one section of a document."""
    section = document.read_text().split(f"## {heading}")[1].split("\n## ")[0]
    return re.findall(r"```(\w+)\n(.*?)```", section, re.DOTALL)


@dataclass
class Host:
    """A network namespace and a folder."""

    name: str
    folder: Path
    environment: dict[str, str]

    def start(self, command: str, output: Path) -> "subprocess.Popen[bytes]":
        with output.open("ab") as log:
            return subprocess.Popen(
                ["ip", "netns", "exec", self.name, "sh", "-c", f"exec {command}"],
                cwd=self.folder,
                stdout=log,
                stderr=log,
                env=self.environment,
            )

    def run(self, command: str) -> str:
        done = subprocess.run(
            ["ip", "netns", "exec", self.name, "sh", "-ec", command],
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


@contextmanager
def several_hosts(tmp_path: Path, names: Sequence[str]) -> Iterator[list[Host]]:
    """Yield hosts 10.77.0.1, 10.77.0.2, ... that reach each other and find the first as "head"."""
    if os.geteuid() != 0 or shutil.which("ip") is None:
        pytest.skip("network namespaces need root and the command ip")
    tag = f"sp{os.getpid() % 100_000}"
    spaces = [f"{tag}-{name}" for name in names]
    etc = [Path("/etc/netns") / space for space in spaces]
    bin_folder = tmp_path / "bin"
    bin_folder.mkdir()
    (bin_folder / "scp").write_text(SCP)
    (bin_folder / "scp").chmod(0o755)
    folders = [tmp_path / name for name in names]
    path = f"{bin_folder}:{Path(sys.executable).parent}:/usr/sbin:/usr/bin:/sbin:/bin"
    environment = {
        "PATH": path,
        "HOME": str(tmp_path),
        "PYTHONPATH": str(ROOT),  # of this checkout
        "OMP_NUM_THREADS": "1",
        "COLUMNS": "200",
        "SLIPSTREAM_TEST_HEAD": str(folders[0]),
    }
    try:
        ip("link", "add", f"{tag}br", "type", "bridge")
        ip("link", "set", f"{tag}br", "up")
        for i, space in enumerate(spaces):
            folders[i].mkdir()
            ip("netns", "add", space)
            ip("link", "add", f"{tag}v{i}", "type", "veth", "peer", "name", "eth0", "netns", space)
            ip("link", "set", f"{tag}v{i}", "master", f"{tag}br", "up")
            ip("-n", space, "addr", "add", f"10.77.0.{i + 1}/24", "dev", "eth0")
            ip("-n", space, "link", "set", "eth0", "up")
            ip("-n", space, "link", "set", "lo", "up")
            etc[i].mkdir(parents=True)
            (etc[i] / "hosts").write_text("127.0.0.1 localhost\n10.77.0.1 head\n")
        yield [
            Host(space, folder, environment) for space, folder in zip(spaces, folders, strict=True)
        ]
    finally:
        for space, folder in zip(spaces, etc, strict=True):
            subprocess.run(["ip", "netns", "del", space], check=False, capture_output=True)
            shutil.rmtree(folder, ignore_errors=True)
        subprocess.run(["ip", "link", "del", f"{tag}br"], check=False, capture_output=True)


@contextmanager
def two_hosts(tmp_path: Path) -> Iterator[tuple[Host, Host]]:
    """Yield head (10.77.0.1) and another host, which finds it under that name."""
    with several_hosts(tmp_path, ("head", "far")) as (head, far):
        yield head, far


def end(process: "subprocess.Popen[bytes]") -> None:
    with suppress(psutil.NoSuchProcess):
        tree = psutil.Process(process.pid).children(recursive=True)
        process.kill()
        for child in tree:
            with suppress(psutil.NoSuchProcess):
                child.kill()
    process.wait()


def toml_of(settings: dict[str, object]) -> str:
    lines = []
    for key, value in settings.items():
        shown = str(value).lower() if isinstance(value, bool) else json.dumps(value, default=str)
        lines.append(f"{key} = {shown}")
    return "\n".join(lines) + "\n"
