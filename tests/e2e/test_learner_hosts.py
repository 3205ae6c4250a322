"""A learner on several hosts, broker and generator on another, over TCP with keys."""

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
from slipstream.wire.files.trajectory_file import read_groups
from slipstream.wire.messages.broker import RequestBatch
from tests.e2e.hosts import Host, end, several_hosts, toml_of
from tests.integration.recorded import GROUPS, Replays
from tests.integration.scripted_broker import Script, ScriptedBroker
from tests.support.listening import Listener, listeners_of
from tests.support.log_lines import level_of
from tests.support.processes import tree_of
from tests.support.tiny_run import tiny_inputs, tiny_settings
from tests.support.waiting import HANG_S

pytestmark = [pytest.mark.e2e]
BROKER, RENDEZVOUS = "tcp://10.77.0.1:5555", "10.77.0.2:29400"


@pytest.fixture
def hosts(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[list[Host]]:
    names = ("one", "two", "three", "four")[: getattr(request, "param", 2)]
    with several_hosts(tmp_path, "head", *names) as hosts:
        yield hosts


@pytest.fixture
def sockets() -> Iterator[Path]:
    """Yield a folder with a short path, as the kernel wants for Unix sockets."""
    with tempfile.TemporaryDirectory(prefix="sp-") as folder:
        yield Path(folder)


class Roles:
    """Roles on hosts, by name; their output is in a file of that name."""

    def __init__(self) -> None:
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        self.outputs: dict[str, Path] = {}

    def start(self, host: Host, name: str, command: str) -> "subprocess.Popen[bytes]":
        self.outputs[name] = host.folder / f"{name}.log"
        self.processes[name] = host.start(command, self.outputs[name])
        return self.processes[name]

    def log(self, name: str) -> str:
        return self.outputs[name].read_text()

    def logs(self) -> str:
        return "".join(f"==== {name}\n{self.log(name)}" for name in self.outputs)

    def end(self) -> None:
        for process in self.processes.values():
            if process.poll() is None:
                end(process)


@pytest.mark.parametrize(
    "hosts", [2, pytest.param(4, marks=pytest.mark.slow)], indirect=True, ids=lambda n: f"hosts{n}"
)
def test_a_learner_on_several_hosts_trains_and_publishes_for_a_generator_on_another(
    hosts: list[Host], sockets: Path
):
    head, *learning = hosts
    tiny_inputs(head.folder)
    settings = tiny_settings(head.folder) | {
        "run.steps": 3,
        "learner.ranks": len(learning),
        "learner.ranks_per_node": 1,
        "broker.listen": BROKER,
        "weightbus.listen": "tcp://10.77.0.2:5600",
        "weightbus.host": "10.77.0.2",
        "weightbus.linger_s": 5.0,
    }
    for host in hosts:
        own = settings | {"run.socket_dir": sockets / host.folder.name}
        (host.folder / "run.toml").write_text(toml_of(own))
    for host in hosts:
        role = "generator" if host is head else "learner"
        head.run(f"slipstream keys make {role}-{host.folder.name} --role {role} --config run.toml")
    keys = head.folder / "runs" / "keys" / "clients"

    roles = Roles()
    near = "--config run.toml"
    far = f"{near} run.broker={BROKER} run.key_file={keys}"
    learners = {}
    seen: set[Listener] = set()
    try:
        broker = roles.start(head, "broker", f"start-broker {near}")
        roles.start(head, "reward-worker", f"start-reward-worker {near} --name judge")
        generator = f"start-generator {far}/generator-head.key --name generator-0"
        roles.start(head, "generator", generator)
        for node, host in reversed(list(enumerate(learning))):
            key = f"{far}/learner-{host.folder.name}.key"
            learner = f"start-learner {key} --node {node} --rendezvous {RENDEZVOUS}"
            learners[node] = roles.start(host, f"learner-{node}", learner)
        deadline = time.monotonic() + HANG_S
        while any(p.poll() is None for p in learners.values()) and time.monotonic() < deadline:
            for process in learners.values():
                seen |= listeners_of(tree_of(process.pid))
            assert broker.poll() is None, roles.logs()
            time.sleep(0.2)
        for name in (*(f"learner-{node}" for node in learners), "generator", "reward-worker"):
            assert roles.processes[name].wait(HANG_S) == 0, roles.logs()
        broker.send_signal(signal.SIGINT)
        assert broker.wait(HANG_S) in {0, 130}, roles.logs()
    finally:
        roles.end()

    run = head.folder / "runs" / "tiny"
    account = json.loads((run / ACCOUNT).read_text())
    assert (account["finished"], account["unaccounted"], account["trained"]) == (True, 0, 3 * 4)
    assert (run / "checkpoints" / "step-000003" / "checkpoint.json").exists()
    assert (run / "model" / "model.safetensors").exists()
    publishes = json.loads((run / SUMMARY).read_text())[PUBLISHES]
    assert any("generator-head/generator-0" in one["adopted_by"] for one in publishes), publishes
    assert "is proven" in roles.log("generator")  # the head relay handed the probe on
    parts = roles.log("learner-0").count("of the learner is at tcp://10.77.0.")
    assert parts == len(learning) - 1, roles.log("learner-0")
    # Node 0 at the rendezvous, the others beside it, the relays; nothing on every interface.
    addresses = {f"10.77.0.{number}" for number in range(2, 2 + len(learning))}
    assert {one.address for one in seen if not one.on_loopback} == addresses
    assert ("10.77.0.2", 29400) in {(one.address, one.port) for one in seen}


def test_a_host_that_is_cut_off_ends_the_learner_on_both_sides(hosts: list[Host], sockets: Path):
    head, one, two = hosts
    replays = Replays(head.folder)
    script = Script(batches={0: [list(read_groups(replays.file))[:GROUPS]]}, steps=9)
    settings = "run.steps=9 learner.ranks=2 learner.ranks_per_node=1 learner.node_silence_s=10"
    command = f"start-learner --config {replays.config} run.socket_dir={sockets} {settings}"
    roles = Roles()
    with ScriptedBroker(f"ipc://{sockets / 'broker.sock'}", script) as broker:
        try:
            for node, host in ((0, one), (1, two)):
                options = f"--node {node} --rendezvous {RENDEZVOUS}"
                roles.start(host, f"node-{node}", f"{command} {options}")
            broker.wait_for(lambda: any(r.version.step == 1 for r in broker.of(RequestBatch)))
            (link,) = json.loads(two.run("ip -j -4 route get 10.77.0.2"))
            two.run(f"ip link set {link['dev']} down")
            for process in roles.processes.values():
                assert process.wait(HANG_S) == 1, roles.logs()
        finally:
            roles.end()
    silence = "ended: it gave no sign of life for 10 s (learner.node_silence_s)"
    for node, other in (("node-0", "node 1"), ("node-1", "node 0")):
        (line,) = [line for line in roles.log(node).splitlines() if level_of(line) == "E"]
        assert f" {other} (host {socket.gethostname()}, rank {other[-1]}) {silence}" in line
