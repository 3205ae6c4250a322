"""A learner on two nodes: it computes the same, ends together, and says why it cannot begin."""

import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.integration.recorded import Replays, finish, start_tool, weights

pytestmark = pytest.mark.integration
EXPORT = "checkpoint.export_at_end=true"
TWO = ("learner.ranks=2", "learner.ranks_per_node=1")
HERE, BESIDE = "127.0.0.1", "127.0.0.2"  # both are this machine's


def free_port(host: str) -> int:
    with socket.socket() as probe:
        probe.bind((host, 0))
        port: int = probe.getsockname()[1]
        return port


class Nodes:
    """Learners on several nodes of one machine."""

    def __init__(self, folder: Path) -> None:
        self.replays = Replays(folder, steps=3)
        self.address = f"{BESIDE}:{free_port(BESIDE)}"
        self.processes: list[subprocess.Popen[str]] = []

    def start(self, node: int, name: str, *overrides: str) -> subprocess.Popen[str]:
        options = ("--node", str(node), "--rendezvous", self.address)
        process = start_tool([*self.replays.command(name, *overrides), *options])
        self.processes.append(process)
        return process


@pytest.fixture
def nodes(tmp_path: Path) -> Iterator[Nodes]:
    nodes = Nodes(tmp_path)
    yield nodes
    for process in nodes.processes:
        if process.poll() is None:  # the test has failed
            process.kill()
            process.communicate()


def test_two_nodes_compute_the_bits_of_one(nodes: Nodes):
    one = weights(nodes.replays.train("one", "learner.ranks=2", EXPORT))
    both = [nodes.start(node, "two", *TWO, EXPORT) for node in (1, 0)]
    for process in both:
        finish(process)
    two = weights(nodes.replays.folder / "runs" / "two")
    assert one.keys() == two.keys()
    assert all(two[name].equal(tensor) for name, tensor in one.items())
    assert not list((nodes.replays.folder / "runs" / "two").glob(".nodes-*"))
