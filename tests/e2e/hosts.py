"""Two hosts for tests that follow a document: network namespaces over one file system."""

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
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
def two_hosts(tmp_path: Path) -> Iterator[tuple[Host, Host]]:
    """Yield head (10.77.0.1) and another host, which finds it under that name."""
    if os.geteuid() != 0 or shutil.which("ip") is None:
        pytest.skip("two network namespaces need root and the command ip")
    tag = f"sp{os.getpid() % 100_000}"
    names = (f"{tag}-head", f"{tag}-far")
    etc = [Path("/etc/netns") / name for name in names]
    bin_folder = tmp_path / "bin"
    bin_folder.mkdir()
    (bin_folder / "scp").write_text(SCP)
    (bin_folder / "scp").chmod(0o755)
    folders = (tmp_path / "head", tmp_path / "far")
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
        ip("link", "add", f"{tag}a", "type", "veth", "peer", "name", f"{tag}b")
        for i, (name, link) in enumerate(zip(names, (f"{tag}a", f"{tag}b"), strict=True)):
            folders[i].mkdir()
            ip("netns", "add", name)
            ip("link", "set", link, "netns", name)
            ip("-n", name, "addr", "add", f"10.77.0.{i + 1}/24", "dev", link)
            ip("-n", name, "link", "set", link, "up")
            ip("-n", name, "link", "set", "lo", "up")
            etc[i].mkdir(parents=True)
            (etc[i] / "hosts").write_text("127.0.0.1 localhost\n10.77.0.1 head\n")
        yield (Host(names[0], folders[0], environment), Host(names[1], folders[1], environment))
    finally:
        subprocess.run(["ip", "link", "del", f"{tag}a"], check=False, capture_output=True)
        for name, folder in zip(names, etc, strict=True):
            subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True)
            shutil.rmtree(folder, ignore_errors=True)


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
