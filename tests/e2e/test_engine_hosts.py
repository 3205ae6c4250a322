"""docs/clusters.md, followed word for word: one engine on two hosts, the rest on a third."""

import json
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from slipstream.broker.report.summary import PUBLISHES
from slipstream.wire.files.run_folder import ACCOUNT, SUMMARY
from tests.e2e.hosts import Host, end, several_hosts, toml_of
from tests.support.guide import fences
from tests.support.listening import Listener, listeners_of
from tests.support.processes import tree_of
from tests.support.tiny_run import ROOT, tiny_inputs, tiny_settings
from tests.support.waiting import HANG_S, until

pytestmark = [pytest.mark.e2e]
DOCUMENT = ROOT / "docs" / "clusters.md"
FIRST = "10.77.0.2"
STEPS = 3


@pytest.fixture
def hosts(tmp_path: Path) -> Iterator[list[Host]]:
    with several_hosts(tmp_path, "head", "gpu-7", "gpu-8") as hosts:
        yield hosts


@pytest.fixture
def sockets() -> Iterator[Path]:
    """Yield a folder with a short path, as the kernel wants for Unix sockets."""
    with tempfile.TemporaryDirectory(prefix="sp-") as folder:
        yield Path(folder)


def write_settings(hosts: list[Host], sockets: Path, section: str) -> None:
    head = hosts[0]
    tiny_inputs(head.folder)
    settings = tiny_settings(head.folder) | {
        "run.steps": STEPS,
        "broker.listen": "tcp://10.77.0.1:5555",
        "weightbus.listen": "tcp://10.77.0.1:5600",
        "weightbus.linger_s": 5.0,
        "checkpoint.export_at_end": False,
    }
    names = [key for key in settings if key.startswith("generators.")]
    own = toml_of({key.removeprefix("generators."): settings.pop(key) for key in names})
    section = section.replace("[generators]\n", f'[generators]\ndevice = "cpu"\n{own}')
    section = section.replace("tp_size = 16 ", "tp_size = 2 ")
    for host in hosts:
        own_sockets = {"run.socket_dir": sockets / host.folder.name}
        (host.folder / "run.toml").write_text(toml_of(settings | own_sockets) + section)


def test_an_engine_on_two_hosts_by_the_documented_commands(hosts: list[Host], sockets: Path):
    head, one, two = hosts
    kinds, texts = zip(*fences(DOCUMENT, "An engine on several hosts"), strict=True)
    assert kinds == ("toml", "bash", "bash")
    section, leads, follows = (text.replace("10.0.0.7", FIRST) for text in texts)
    write_settings(hosts, sockets, section)
    head.run("slipstream keys make gpu-7 --role generator --config run.toml")
    for host in (one, two):
        host.run("scp head:runs/keys/clients/gpu-7.key .")

    started: dict[str, subprocess.Popen[bytes]] = {}
    seen: set[Listener] = set()

    def start(host: Host, name: str, command: str) -> None:
        started[name] = host.start(command.strip(), host.folder / f"{name}.log")

    def logs() -> str:
        files = [file for host in hosts for file in sorted(host.folder.glob("*.log"))]
        return "".join(f"==== {file.name}\n{file.read_text()}" for file in files)

    try:
        start(head, "broker", "start-broker --config run.toml")
        start(two, "follower", follows)
        start(one, "leader", leads)
        start(head, "learner", "start-learner --config run.toml")
        start(head, "worker", "start-reward-worker --config run.toml --name judge")
        until(lambda: "is proven" in (one.folder / "leader.log").read_text(), logs)
        started["follower"].terminate()  # its work goes back, and the next engine takes it
        for name in ("leader", "follower"):
            assert started[name].wait(HANG_S) == 0, logs()
        start(one, "leader", leads)
        start(two, "follower", follows)
        deadline = time.monotonic() + HANG_S
        while started["learner"].poll() is None and time.monotonic() < deadline:
            for name in ("leader", "follower"):
                assert started[name].poll() in {None, 0}, logs()
                seen |= listeners_of(tree_of(started[name].pid))
            time.sleep(0.2)
        for name in ("learner", "leader", "follower", "worker"):
            assert started[name].wait(HANG_S) == 0, logs()
        started["broker"].send_signal(signal.SIGINT)
        assert started["broker"].wait(HANG_S) in {0, 130}, logs()
    finally:
        for process in started.values():
            if process.poll() is None:
                end(process)

    run = head.folder / "runs" / "tiny"
    account = json.loads((run / ACCOUNT).read_text())
    assert (account["finished"], account["unaccounted"], account["trained"]) == (True, 0, STEPS * 4)
    publishes = json.loads((run / SUMMARY).read_text())[PUBLISHES]
    assert any("gpu-7/generator-0" in one["adopted_by"] for one in publishes), publishes
    # The link and torch's store on the first host, gloo on both; nothing on every interface.
    assert {one.address for one in seen if not one.on_loopback} == {FIRST, "10.77.0.3"}
    assert (FIRST, 29500) in {(one.address, one.port) for one in seen}


def test_a_host_that_is_cut_off_ends_the_engine_on_both_sides(hosts: list[Host], sockets: Path):
    head, one, two = hosts
    section, *commands = (
        text.replace("10.0.0.7", FIRST)
        for _, text in fences(DOCUMENT, "An engine on several hosts")
    )
    write_settings(hosts, sockets, section)
    head.run("slipstream keys make gpu-7 --role generator --config run.toml")
    started = {}
    try:
        for host, command in zip((one, two), commands, strict=True):
            host.run("scp head:runs/keys/clients/gpu-7.key .")
            silence = "generators.node_silence_s=8"
            log = host.folder / "engine.log"
            started[host.name] = host.start(f"{command.strip()} {silence}", log)
        logs = [host.folder / "engine.log" for host in (one, two)]
        for log, words in zip(logs, ("engine answers at", "its ranks run"), strict=True):
            until(lambda log=log, words=words: words in log.read_text())  # type: ignore[misc]
        two.run(f"ip link set {two.link} down")
        for process in started.values():
            assert process.wait(HANG_S) == 1, "".join(log.read_text() for log in logs)
    finally:
        for process in started.values():
            if process.poll() is None:
                end(process)
    silence = "ended: it gave no sign of life for 8 s (generators.node_silence_s)"
    host = socket.gethostname()
    assert f"node 1 (host {host}, rank 1) {silence}" in logs[0].read_text()
    assert f"node 0 (rank 0) at {FIRST}:29500 {silence}" in logs[1].read_text()
