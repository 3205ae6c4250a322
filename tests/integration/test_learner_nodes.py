"""A learner on two nodes: it computes the same, ends together, and says why it cannot begin."""

import os
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import psutil
import pytest
import zmq

from slipstream.broker.listening.curve import prove_key
from slipstream.wire.errors import ConfigError
from slipstream.wire.files.checkpoints import checkpoints_in
from slipstream.wire.files.keys import read_client_key
from slipstream.wire.files.trajectory_file import read_groups
from slipstream.wire.messages.broker import RequestBatch, TakeOver
from slipstream.wire.messages.codec import decode_to_follower, encode
from slipstream.wire.messages.followers import Follow, FollowerEnds, FollowerRefused
from slipstream.wire.process.ports import free_port
from slipstream.wire.settings.rendezvous import Address
from tests.integration.recorded import GROUPS, Replays, finish, start_tool, weights
from tests.integration.scripted_broker import Script, ScriptedBroker
from tests.support.bus.remote import client_key
from tests.support.listening import listeners_of
from tests.support.log_lines import level_of
from tests.support.waiting import HANG_S, NEVER_S, until

pytestmark = pytest.mark.integration
EXPORT = "checkpoint.export_at_end=true"
TWO = ("learner.ranks=2", "learner.ranks_per_node=1")
BESIDE = "127.0.0.2"  # this machine's, too
PATHS = os.environ.get("PYTHONPATH", "")  # noqa: TID251 handed on


class Nodes:
    """Learners on several nodes of one machine."""

    def __init__(self, folder: Path) -> None:
        self.replays = Replays(folder, steps=3)
        self.listen_on(BESIDE)
        self.replays_file = True  # in place of a broker's batches
        self.processes: list[subprocess.Popen[str]] = []

    def listen_on(self, host: str) -> None:
        try:
            self.address = str(Address(host, free_port(host)))
        except ConfigError:
            pytest.skip(f"no {host} here")

    def start(
        self,
        node: int,
        name: str,
        *overrides: str,
        within: Sequence[str] = (),
        options: Sequence[str] = (),
        python_path: Path | None = None,
        anew: bool = False,
    ) -> subprocess.Popen[str]:
        """Start a node; ``within`` a command, with a folder that Python looks into first."""
        placed = ("--node", str(node), "--rendezvous", self.address)
        first = [] if python_path is None else ["env", f"PYTHONPATH={python_path}:{PATHS}"]
        command = self.replays.command(name, *overrides, replays=self.replays_file)
        process = start_tool([*within, *first, *command, *placed, *options], anew=anew)
        self.processes.append(process)
        return process


@pytest.fixture
def nodes(tmp_path: Path) -> Iterator[Nodes]:
    nodes = Nodes(tmp_path)
    yield nodes
    for process in nodes.processes:
        process.kill()
        if process.stdout is not None and not process.stdout.closed:  # the test has failed
            process.communicate()


@pytest.mark.parametrize("host", [BESIDE, pytest.param("::1", marks=pytest.mark.slow)])
def test_two_nodes_compute_the_bits_of_one(nodes: Nodes, host: str):
    nodes.listen_on(host)
    one = weights(nodes.replays.train("one", "learner.ranks=2", EXPORT))
    both = [nodes.start(node, "two", *TWO, EXPORT) for node in (1, 0)]
    for process in both:
        finish(process)
    two = weights(nodes.replays.folder / "runs" / "two")
    assert one.keys() == two.keys()
    assert all(two[name].equal(tensor) for name, tensor in one.items())
    assert not list((nodes.replays.folder / "runs" / "two" / "hosts").iterdir())


def test_two_nodes_resume_from_their_checkpoint(nodes: Nodes):
    settings = (*TWO, EXPORT, "checkpoint.every_steps=1", "checkpoint.keep_last=3")
    run = nodes.replays.folder / "runs" / "a"
    for process in [nodes.start(node, "a", *settings) for node in (0, 1)]:
        finish(process)
    straight = weights(run)
    shutil.rmtree(run / "checkpoints" / "step-000003")
    shutil.rmtree(run / "model")
    again = [nodes.start(node, "a", *settings, options=["--resume", "auto"]) for node in (0, 1)]
    outputs = [finish(process) for process in again]
    assert all("resumes from" in output for output in outputs)
    resumed = weights(run)
    assert all(resumed[name].equal(tensor) for name, tensor in straight.items())


# ---- what cannot begin -----------------------------------------------------------

SOON = "learner.rendezvous_timeout_s=2"


@dataclass(frozen=True)
class Came:
    """A process that came as a node, and how it must end."""

    node: int
    overrides: tuple[str, ...]
    code: int
    line: str  # words of its only line that is no information, * for anything between


def node_of(number: int, ranks: str | None = None) -> str:
    return f"node {number} (host {socket.gethostname()}, {ranks or f'rank {number}'})"


def line_of(output: str) -> str:
    """Return the one line that says why a learner ended."""
    lines = [line for line in output.splitlines() if line and level_of(line) != "I"]
    assert len(lines) == 1, output
    return lines[0]


REFUSED = f"{node_of(1)} cannot train with node 0 (host {socket.gethostname()}) at ADDRESS: "
CASES = {
    "nobody listens": [
        Came(
            1,
            (*TWO, SOON),
            1,
            f"{node_of(1)} does not reach node 0 at ADDRESS (--rendezvous) within 2 s "
            "(learner.rendezvous_timeout_s): nobody listens there",
        )
    ],
    "nobody comes": [
        Came(
            0,
            ("learner.ranks=6", "learner.ranks_per_node=2", SOON),
            1,
            "node 1 (ranks 2-3), node 2 (ranks 4-5) do not come to node 0 at ADDRESS within 2 s "
            "(learner.rendezvous_timeout_s); start it with --node",
        )
    ],
    "another setting": [
        Came(0, TWO, 2, REFUSED + "learner.lr is 0.5 there, expected 0.01"),
        Came(1, (*TWO, "learner.lr=0.5"), 2, REFUSED + "learner.lr is 0.5 there, expected 0.01"),
    ],
}


@pytest.mark.parametrize("case", CASES)  # tests/unit/learner/nodes has what else differs
def test_nodes_that_cannot_begin_say_why_in_one_line(nodes: Nodes, case: str):
    started = [nodes.start(came.node, "a", *came.overrides) for came in CASES[case]]
    for came, process in zip(CASES[case], started, strict=True):
        output = finish(process, code=came.code)
        assert came.line.replace("ADDRESS", nodes.address) in line_of(output)


@pytest.mark.parametrize(
    ("address", "says", "why"),
    [
        (
            "192.0.2.7:29400",
            "cannot listen at tcp://{at}",
            ": it is not an address of this machine",
        ),
        ("TAKEN", "cannot listen at tcp://{at}", ": another process listens there"),
        ("no-such-host.invalid:29400", "{at}", " is no address: "),
    ],
)
def test_node_0_says_why_it_cannot_listen(nodes: Nodes, address: str, says: str, why: str):
    with socket.create_server((BESIDE, 0)) as taken:
        nodes.address = address.replace("TAKEN", f"{BESIDE}:{taken.getsockname()[1]}")
        host, _, port = nodes.address.rpartition(":")
        line = line_of(finish(nodes.start(0, "a", *TWO), code=2))
    assert line.startswith(f"{says.format(at=f'{host}:{port}')} (--rendezvous")
    assert why in line


def test_what_listens_there_and_is_no_node_0_is_not_waited_for_longer(nodes: Nodes):
    with socket.create_server((BESIDE, 0)) as silent:
        nodes.address = f"{BESIDE}:{silent.getsockname()[1]}"
        line = line_of(finish(nodes.start(1, "a", *TWO, SOON), code=1))
    assert "something listens, without the file hosts/key that node 0 at" in line


def test_another_release_of_a_library_is_refused_on_both_nodes(nodes: Nodes):
    metadata = nodes.replays.folder / "other" / "torch-9.9.0.dist-info"
    metadata.mkdir(parents=True)
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: torch\nVersion: 9.9.0\n")
    first = nodes.start(0, "a", *TWO)
    second = nodes.start(1, "a", *TWO, python_path=metadata.parent)
    for process in (first, second):
        assert "torch is 9.9.0 there, expected " in line_of(finish(process, code=2))


def test_a_refusal_that_is_lost_is_said_again_before_node_0_ends(nodes: Nodes):
    first = nodes.start(0, "a", *TWO)
    file = nodes.replays.folder / "runs" / "a" / "hosts" / "key"
    until(file.exists, "node 0 does not listen")
    key = read_client_key(file)
    differs = Follow(node=1, incarnation="x", host="h", pid=7, facts={"torch": "9.9.0"})
    with zmq.Context() as context, context.socket(zmq.DEALER) as other:
        prove_key(other, key, server_key=key.public)
        other.connect(f"tcp://{nodes.address}")
        for _ in range(3):  # the answers that came before are taken as lost
            other.send(encode(differs))
            assert other.poll(int(HANG_S * 1_000))
            assert isinstance(decode_to_follower(other.recv()), FollowerRefused)
            assert first.poll() is None
            time.sleep(1.0)  # node 0 has found its reason to end
        other.send(encode(FollowerEnds(node=1, incarnation="x", reason="refused")))
        assert "cannot train with node 0" in line_of(finish(first, code=2))


def test_a_node_that_does_not_share_the_run_folder_says_so(nodes: Nodes):
    if os.geteuid() != 0:
        pytest.skip("a mount of its own needs root")
    runs = nodes.replays.folder / "runs"
    runs.mkdir()
    hidden = ["unshare", "-m", "sh", "-c", f'mount -t tmpfs none {runs} && exec "$@"', "sh"]
    first = nodes.start(0, "a", *TWO)
    until(lambda: listeners_of((first.pid, *of(first.pid))), "node 0 does not listen")
    soon = "learner.rendezvous_timeout_s=24"  # of which node 1 looks for half
    line = line_of(finish(nodes.start(1, "a", *TWO, soon, within=hidden), code=2))
    assert f"{node_of(1)} does not see the file hosts/key that node 0 at {nodes.address}" in line
    assert f"writes into {runs / 'a'}: it is not there; run.dir must be" in line
    assert first.poll() is None


def test_a_node_that_does_not_come_is_missed(nodes: Nodes):
    line = line_of(finish(nodes.start(0, "a", *TWO, SOON), code=1))
    assert "node 1 (rank 1) does not come to node 0 at" in line
    assert "it has to see the run folder" in line
    assert not list((nodes.replays.folder / "runs" / "a").glob("hosts/*"))


# ---- how it ends -----------------------------------------------------------------

FOUR = ("learner.ranks=4", "learner.ranks_per_node=2")
SILENCE = "learner.node_silence_s=10"
WAITS = ("run.steps=9", "weightbus.linger_s=3")  # the relay has the output of a killed learner


class Training:
    """Two nodes that have trained one step and wait for the next batch."""

    def __init__(
        self, nodes: Nodes, sockets: str, *overrides: str, ranks: tuple[str, ...] = TWO
    ) -> None:
        self.groups = list(read_groups(nodes.replays.file))
        self.script = Script(batches={0: [self.groups[:GROUPS]]}, steps=9)
        self.broker = ScriptedBroker(f"ipc://{sockets}/broker.sock", self.script)
        self.run = nodes.replays.folder / "runs" / "a"
        nodes.replays_file = False
        self.own = (*ranks, *WAITS, f"run.socket_dir={sockets}", *overrides)
        self.nodes = nodes
        self.zero, self.one = (self.start(node) for node in (0, 1))

    def __enter__(self) -> Self:
        self.broker.__enter__()
        self.broker.wait_for(
            lambda: any(request.version.step == 1 for request in self.broker.of(RequestBatch))
        )
        return self

    def __exit__(self, *error: object) -> None:
        self.broker.__exit__(None, None, None)

    def end(self) -> None:
        """Ask node 0 to end, and wait until both have, in order."""
        self.zero.send_signal(signal.SIGTERM)
        for process in (self.zero, self.one):
            finish(process)

    def deliver(self, step: int) -> None:
        """Let there be a batch for a step."""
        self.script.batches[step] = [self.groups[step * GROUPS : (step + 1) * GROUPS]]
        self.script.__post_init__()  # its payloads

    def start(self, node: int) -> subprocess.Popen[str]:
        return self.nodes.start(node, "a", *self.own)

    def ranks_of(self, node: subprocess.Popen[str]) -> list[psutil.Process]:
        """Return the other ranks of a node, which its nursery has forked, as it does its relay."""
        (source,) = psutil.Process(node.pid).children()
        return [one for one in source.children() if "--rank" in one.cmdline()]


@pytest.fixture
def sockets() -> Iterator[str]:
    with tempfile.TemporaryDirectory(prefix="nodes-") as folder:
        yield folder


def errors_in(output: str) -> list[str]:
    """Return what a node has logged as an error, or printed."""
    return [line for line in output.splitlines() if line and level_of(line) not in {"I", "W"}]


def test_sigterm_to_node_0_saves_and_ends_both_in_order(nodes: Nodes, sockets: str):
    with Training(nodes, sockets) as training:
        training.zero.send_signal(signal.SIGTERM)
        outputs = [finish(process) for process in (training.zero, training.one)]
    assert [path.name for path in checkpoints_in(training.run / "checkpoints")] == ["step-000001"]
    assert not [line for output in outputs for line in errors_in(output)]


def test_sigterm_to_all_nodes_is_one_to_node_0(nodes: Nodes, sockets: str):
    with Training(nodes, sockets) as training:
        training.one.send_signal(signal.SIGTERM)
        training.end()
    assert [path.name for path in checkpoints_in(training.run / "checkpoints")] == ["step-000001"]


def test_sigterm_to_node_0_that_saves_nothing_ends_both_at_once(nodes: Nodes, sockets: str):
    with Training(nodes, sockets, "checkpoint.on_stop=false") as training:
        training.zero.send_signal(signal.SIGTERM)
        finish(training.zero)
        assert f"{node_of(0)} ended: it was asked to end" in finish(training.one)
    assert not checkpoints_in(training.run / "checkpoints")


def test_sigterm_to_another_node_alone_ends_the_learner_with_its_name(nodes: Nodes, sockets: str):
    with Training(nodes, sockets) as training:
        training.one.send_signal(signal.SIGTERM)
        (line,) = errors_in(finish(training.zero, code=1))
        finish(training.one)
    assert f"{node_of(1)} ended: it was asked to end, and node 0 was not" in line
    assert not checkpoints_in(training.run / "checkpoints")


def test_a_killed_rank_ends_the_learner_on_both_nodes(nodes: Nodes, sockets: str):
    with Training(nodes, sockets, ranks=FOUR) as training:
        (rank_3,) = training.ranks_of(training.one)
        rank_3.kill()
        lines = [errors_in(finish(p, code=1)) for p in (training.zero, training.one)]
    for (line,) in lines:
        assert f"{node_of(1, 'ranks 2-3')} ended: its rank 3 ended with code -9" in line


def test_a_killed_node_ends_node_0_and_a_new_one_waits_for_the_next_node_0(
    nodes: Nodes, sockets: str
):
    with Training(nodes, sockets, SILENCE, ranks=FOUR) as training:
        training.one.kill()
        finish(training.one, code=-signal.SIGKILL)
        again = training.start(1)
        (line,) = errors_in(finish(training.zero, code=1))
        silent = "it gave no sign of life for 10 s"
        explained = "a collective failed and it gave no sign of life for 3 s"  # one was under way
        (why,) = (why for why in (silent, explained) if why in line)
        assert f"{node_of(1, 'ranks 2-3')} ended: {why}" in line
        assert again.poll() is None
        zero = training.start(0)
        many = len(training.broker.of(TakeOver))
        training.broker.wait_for(lambda: len(training.broker.of(TakeOver)) > many)
        zero.send_signal(signal.SIGTERM)
        for process in (zero, again):
            finish(process)


def test_a_collective_that_fails_names_the_node_that_is_gone(nodes: Nodes, sockets: str):
    with Training(nodes, sockets, f"learner.node_silence_s={NEVER_S}") as training:
        training.one.kill()
        finish(training.one, code=-signal.SIGKILL)
        training.deliver(1)  # which rank 0 hands on to the others
        (line,) = errors_in(finish(training.zero, code=1))
    assert f"{node_of(1)} ended: a collective failed and it gave no sign of life for 3 s" in line


@pytest.mark.parametrize("signum", [signal.SIGKILL, signal.SIGSTOP])
def test_a_node_0_that_is_gone_ends_the_others(nodes: Nodes, sockets: str, signum: int):
    with Training(nodes, sockets, SILENCE) as training:
        training.zero.send_signal(signum)
        (line,) = errors_in(finish(training.one, code=1))
        training.zero.kill()
        finish(training.zero, code=-signal.SIGKILL)
    why = {
        signal.SIGKILL: "a collective failed and it gave no sign of life for 3 s",
        signal.SIGSTOP: "it gave no sign of life for 10 s (learner.node_silence_s)",
    }
    assert f"{node_of(0)} ended: {why[signum]}" in line


@pytest.mark.slow  # tests/unit/weightbus/hosts has the decision
def test_a_node_that_comes_again_while_it_trains_is_refused_and_disturbs_nothing(
    nodes: Nodes, sockets: str
):
    with Training(nodes, sockets) as training:
        line = line_of(finish(training.start(1), code=3))
        assert f"two processes came as {node_of(1)} to {nodes.address}: process " in line
        training.end()


def test_it_listens_at_the_rendezvous_and_beside_it_on_loopback_alone(nodes: Nodes, sockets: str):
    with Training(nodes, sockets) as training:
        tree = [p for n in (training.zero, training.one) for p in (n.pid, *of(n.pid))]
        found = listeners_of(tree)
        host, _, port = nodes.address.rpartition(":")
        assert (host, int(port)) in {(one.address, one.port) for one in found}
        assert all(one.on_loopback for one in found), found
        training.end()


def test_a_stranger_without_the_key_changes_nothing(nodes: Nodes, sockets: str):
    with Training(nodes, sockets) as training:
        (file,) = training.run.glob("hosts/key")
        assert file.stat().st_mode & 0o077 == 0
        server_key = read_client_key(file).public  # more than strangers know
        host, _, port = nodes.address.rpartition(":")
        with (
            zmq.Context() as context,
            context.socket(zmq.DEALER) as stranger,
            socket.create_connection((host, int(port))) as plain,
        ):
            plain.sendall(b"\xff" * 64)
            prove_key(stranger, client_key("stranger"), server_key=server_key)
            stranger.setsockopt(zmq.LINGER, 0)
            stranger.connect(f"tcp://{nodes.address}")
            stranger.send(encode(FollowerEnds(node=1, incarnation="x", reason="it broke")))
            training.deliver(1)
            training.broker.wait_for(
                lambda: any(r.version.step == 2 for r in training.broker.of(RequestBatch))
            )
            assert not stranger.poll(1_000)
        training.end()


def of(pid: int) -> list[int]:
    """Return a process's descendants."""
    return [child.pid for child in psutil.Process(pid).children(recursive=True)]
