"""A learner and an engine on several hosts each, broker and rewards on another, over TCP with keys.

The engine is started by docs/clusters.md, followed word for word.
"""

import json
import socket
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from slipstream.broker.report.summary import PUBLISHES
from slipstream.wire.files.run_folder import SUMMARY
from slipstream.wire.files.trajectory_file import read_groups
from slipstream.wire.messages.broker import RequestBatch
from tests.e2e.hosts import Host, Roles, several_hosts, toml_of
from tests.integration.recorded import GROUPS, Replays
from tests.integration.scripted_broker import Script, ScriptedBroker
from tests.support.guide import fences
from tests.support.listening import Listener, listeners_of
from tests.support.log_lines import level_of
from tests.support.processes import tree_of
from tests.support.strangers import assert_held, attack
from tests.support.tiny_run import ROOT, assert_complete, tiny_inputs, tiny_settings
from tests.support.waiting import HANG_S, until

pytestmark = [pytest.mark.e2e]
FIRST = "10.77.0.2"
BROKER, RENDEZVOUS = "tcp://10.77.0.1:5555", f"{FIRST}:29400"
STEPS = 3
SECTION, *ENGINE = (
    text.replace("10.0.0.7", FIRST)
    for _, text in fences(ROOT / "docs" / "clusters.md", "An engine on several hosts")
)


@pytest.fixture
def hosts(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[list[Host]]:
    names = ("gpu-7", "gpu-8", "gpu-9", "gpu-10")[: getattr(request, "param", 2)]
    with several_hosts(tmp_path, "head", *names) as hosts:
        yield hosts


@pytest.fixture
def sockets() -> Iterator[Path]:
    """Yield a folder with a short path, as the kernel wants for Unix sockets."""
    with tempfile.TemporaryDirectory(prefix="sp-") as folder:
        yield Path(folder)


def prepare(hosts: list[Host], sockets: Path) -> None:
    """Write the settings of all hosts, and make keys for a learner on all but the first."""
    head, *learning = hosts
    tiny_inputs(head.folder)
    settings = tiny_settings(head.folder) | {
        "run.steps": STEPS,
        "learner.ranks": len(learning),
        "learner.ranks_per_node": 1,
        "broker.listen": BROKER,
        "weightbus.listen": f"tcp://{FIRST}:5600",
        "weightbus.host": FIRST,
        "weightbus.linger_s": 5.0,
    }
    del settings["generators.count"]  # the section's
    names = [key for key in settings if key.startswith("generators.")]
    own = toml_of({key.removeprefix("generators."): settings.pop(key) for key in names})
    section = SECTION.replace("[generators]\n", f'[generators]\ndevice = "cpu"\n{own}')
    section = section.replace("tp_size = 16 ", "tp_size = 2 ")
    for host in hosts:
        own_sockets = {"run.socket_dir": sockets / host.folder.name}
        (host.folder / "run.toml").write_text(toml_of(settings | own_sockets) + section)
    head.run("slipstream keys make gpu-7 --role generator --config run.toml")
    for node, host in enumerate(learning):
        name, role = f"learner-{host.folder.name}", "learner_part" if node else "learner"
        head.run(f"slipstream keys make {name} --role {role} --config run.toml")
        host.run("scp head:runs/keys/clients/gpu-7.key .")


@pytest.mark.parametrize(
    ("hosts", "is_replaced"),
    [
        (2, False),
        # An engine whose follower is asked to end: tests/integration/test_engine_hosts.py. A
        # generator that hands its work back: tests/e2e/test_rendered_services.py
        pytest.param(4, True, marks=pytest.mark.slow),
    ],
    indirect=["hosts"],
    ids=["hosts2", "hosts4-replaced"],
)
def test_a_learner_on_several_hosts_trains_and_publishes_for_an_engine_on_two(
    hosts: list[Host], sockets: Path, is_replaced: bool
):
    prepare(hosts, sockets)
    head, *learning = hosts
    one, two = learning[:2]
    leads, follows = ENGINE
    keys = head.folder / "runs" / "keys" / "clients"
    seen: set[Listener] = set()

    def look() -> None:
        for name, process in roles.processes.items():
            if name not in {"broker", "worker"}:
                seen.update(listeners_of(tree_of(process.pid)))

    with Roles() as roles:
        roles.start(head, "broker", "start-broker --config run.toml --health 8081")
        roles.start(two, "follower", follows)
        roles.start(one, "leader", leads)
        roles.start(head, "worker", "start-reward-worker --config run.toml --name judge")
        for node, host in reversed(list(enumerate(learning))):
            key = f"run.broker={BROKER} run.key_file={keys}/learner-{host.folder.name}.key"
            place = f"--node {node} --rendezvous {RENDEZVOUS}"
            roles.start(host, f"learner-{node}", f"start-learner --config run.toml {key} {place}")
        # Bytes that the relays handed on.
        until(lambda: "is proven" in roles.log("leader"), roles.logs, every_s=0.2)
        look()
        attacked = attack(pid for one in roles.processes.values() for pid in tree_of(one.pid))
        if is_replaced:
            roles.processes["follower"].terminate()  # its work goes back, the next engine takes it
            roles.wait("leader", "follower", look=look)
            roles.start(one, "leader", leads)
            roles.start(two, "follower", follows)
        roles.wait(*(f"learner-{node}" for node in range(len(learning))), look=look)
        roles.end_broker()
        parts = roles.log("learner-0").count("of the learner is at tcp://10.77.0.")
        assert parts == len(learning) - 1, roles.log("learner-0")

    assert_held(attacked)
    assert {(one.port, one.kind) for one in attacked} >= {
        (5555, "ROUTER"),  # the broker
        (8081, "HTTP"),  # its health
        (5600, "ROUTER"),  # the relay
        (5601, "ROUTER"),  # where it serves buckets
        (29400, "ROUTER"),  # node 0 of the learner
        (29500, "ROUTER"),  # node 0 of the engine
    }
    routers = [one for one in attacked if one.kind == "ROUTER"]
    assert len(routers) == 5 + parts, "a port of every part"
    run = head.folder / "runs" / "tiny"
    assert_complete(run, STEPS * 4)
    assert (run / "checkpoints" / "step-000003" / "checkpoint.json").exists()
    assert (run / "model" / "model.safetensors").exists()
    publishes = json.loads((run / SUMMARY).read_text())[PUBLISHES]
    assert any("gpu-7/generator-0" in one["adopted_by"] for one in publishes), publishes
    # Meetings at both rendezvous, stores beside them, the relays; nothing on every interface.
    addresses = {f"10.77.0.{number}" for number in range(2, 2 + len(learning))}
    assert {one.address for one in seen if not one.on_loopback} == addresses
    ports = {one.port for one in seen if one.address == FIRST}
    assert {29400, 29500} <= ports


# tests/integration/test_engine_hosts.py has a silent host on either side.
@pytest.mark.slow
def test_a_host_that_is_cut_off_ends_the_engine_on_both_sides(hosts: list[Host], sockets: Path):
    prepare(hosts, sockets)
    with Roles() as roles:
        for host, command in zip(hosts[1:], ENGINE, strict=True):
            silence = "generators.node_silence_s=8"
            roles.start(host, host.folder.name, f"{command.strip()} {silence}")
        for name, words in (("gpu-7", "engine answers at"), ("gpu-8", "its ranks run")):
            until(lambda name=name, words=words: words in roles.log(name))  # type: ignore[misc]
        cut_off(hosts[2])
        for process in roles.processes.values():
            assert process.wait(HANG_S) == 1, roles.logs()
    silence = "ended: it gave no sign of life for 8 s (generators.node_silence_s)"
    assert f"node 1 (host {socket.gethostname()}, rank 1) {silence}" in roles.log("gpu-7")
    assert f"node 0 (rank 0) at {FIRST}:29500 {silence}" in roles.log("gpu-8")


def cut_off(host: Host) -> None:
    host.run(f"ip link set {host.link} down")


# tests/integration/test_learner_nodes.py has a silent node on either side.
@pytest.mark.slow
def test_a_host_that_is_cut_off_ends_the_learner_on_both_sides(hosts: list[Host], sockets: Path):
    head, *learning = hosts
    replays = Replays(head.folder)
    script = Script(batches={0: [list(read_groups(replays.file))[:GROUPS]]}, steps=9)
    settings = "run.steps=9 learner.ranks=2 learner.ranks_per_node=1 learner.node_silence_s=10"
    command = f"start-learner --config {replays.config} run.socket_dir={sockets} {settings}"
    with ScriptedBroker(f"ipc://{sockets / 'broker.sock'}", script) as broker, Roles() as roles:
        for node, host in enumerate(learning):
            options = f"--node {node} --rendezvous {RENDEZVOUS}"
            roles.start(host, f"node-{node}", f"{command} {options}")
        broker.wait_for(lambda: any(r.version.step == 1 for r in broker.of(RequestBatch)))
        cut_off(hosts[2])
        for process in roles.processes.values():
            assert process.wait(HANG_S) == 1, roles.logs()
    silence = "ended: it gave no sign of life for 10 s (learner.node_silence_s)"
    for node, other in (("node-0", "node 1"), ("node-1", "node 0")):
        (line,) = [line for line in roles.log(node).splitlines() if level_of(line) == "E"]
        assert f" {other} (host {socket.gethostname()}, rank {other[-1]}) {silence}" in line
