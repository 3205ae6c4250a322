"""A version in parts: relays of several hosts as processes, killed at every message."""

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.integration.scripted_broker import Script, ScriptedBroker
from tests.support.bus.harness import WeightBus, weight_bus
from tests.support.bus.remote import client_key
from tests.support.waiting import until

pytestmark = pytest.mark.integration
SIZES = ("--count", "12", "--size", "4096")


class HostsBus:
    """A learner on several hosts, and engines that fetch from all of them."""

    def __init__(self, bus: WeightBus, key: Path) -> None:
        self.bus = bus
        self._key = key

    def start(self, name: str) -> None:
        self.bus.start(name, "tcp", "--key-file", str(self._key))

    def log(self) -> str:
        return (self.bus.folder / "learner.log").read_text()


@contextmanager
def hosts_bus(folder: Path, parts: int, bulk: str = "encrypted") -> Iterator[HostsBus]:
    key = client_key("gpu-7")
    file = folder / "gpu-7.key"
    text = "".join(f'{name} = "{getattr(key, name)}"\n' for name in key.__struct_fields__)
    file.write_text(text)
    file.chmod(0o600)
    (folder / "sockets").mkdir(mode=0o700, exist_ok=True)
    script = Script(batches={}, steps=1, generator_keys={key.public: key.name})
    with (
        ScriptedBroker(f"ipc://{folder}/sockets/broker.sock", script),
        weight_bus(folder, parts=parts, sizes=SIZES, bulk=bulk) as bus,
    ):
        yield HostsBus(bus, file)


@pytest.fixture
def three_hosts(short_folder: Path, request: pytest.FixtureRequest) -> Iterator[HostsBus]:
    with hosts_bus(short_folder, 3, request.param) as hosts:
        yield hosts


@pytest.fixture
def two_hosts(short_folder: Path) -> Iterator[HostsBus]:
    with hosts_bus(short_folder, 2) as hosts:
        yield hosts


@pytest.mark.parametrize("three_hosts", ["encrypted", "plain"], indirect=True)
def test_engines_fetch_each_part_from_its_host_and_late_ones_too(three_hosts: HostsBus):
    bus = three_hosts.bus
    three_hosts.start("a")
    bus.publish(1)
    bus.wait_for("a", 1)
    three_hosts.start("b")
    bus.wait_for("b", 1)
    for step in range(2, 8):  # slots are written again and again
        bus.publish(step)
    for name in ("a", "b"):
        bus.wait_for(name, 7)
    bus.check_tokens()
    assert "part 1 of the learner is at tcp://" in three_hosts.log()
    assert "part 2 of the learner is at tcp://" in three_hosts.log()
    num_plain = three_hosts.log().count("buckets go unencrypted")
    assert num_plain == (3 if bus.bulk == "plain" else 0)


def test_an_engine_that_wants_a_collective_gets_tcp_and_why(two_hosts: HostsBus):
    bus = two_hosts.bus
    bus.start("a", "collective", "--key-file", str(bus.folder / "gpu-7.key"))
    bus.publish(1)
    bus.wait_for("a", 1)
    assert "over tcp instead of collective: the learner is on several hosts" in two_hosts.log()


@pytest.mark.parametrize("number", [0, 1], ids=["head", "part"])
@pytest.mark.parametrize(
    "first", [1, 5, *(pytest.param(first, marks=pytest.mark.slow) for first in (9, 13, 17, 21, 25))]
)
def test_a_relay_that_is_killed_at_any_message_leaves_no_mixture(
    two_hosts: HostsBus, number: int, first: int
):
    bus = two_hosts.bus
    two_hosts.start("a")
    bus.publish(1)
    bus.wait_for("a", 1)
    for step, count in enumerate(range(first, first + 4), 2):  # a learner gives up after five
        order = bus.kill_at(number, count)
        bus.publish(step)
        bus.wait_for("a", step)
        until(lambda order=order: not order.exists())  # at a heartbeat, where a publish has fewer
    labels = bus.labels("a")
    assert labels == sorted(labels, key=lambda label: int(label.partition(".")[2]))
    bus.check_tokens()


def test_a_host_that_is_lost_in_mid_write_leaves_engines_the_version_before(two_hosts: HostsBus):
    bus = two_hosts.bus
    two_hosts.start("a")
    bus.publish(1)
    bus.wait_for("a", 1)
    bus.publish_half(2)
    os.kill(bus.part(1), signal.SIGKILL)
    bus.kill_learner()
    two_hosts.start("b")  # nobody has all of version 1 now
    bus.check_tokens()
    assert bus.labels("a") == ["v1.1"]
    bus.start_learner()
    bus.publish(3)
    for name in ("a", "b"):
        bus.wait_for(name, 3)
    bus.check_tokens()
    assert bus.labels("b") == ["v2.3"]


def test_a_part_relay_that_is_killed_is_replaced_by_one_with_the_newest_version(
    two_hosts: HostsBus,
):
    bus = two_hosts.bus
    two_hosts.start("a")
    bus.publish(1)
    bus.wait_for("a", 1)
    before = bus.part(1)
    os.kill(before, signal.SIGKILL)
    until(lambda: bus.part(1) not in {0, before})
    two_hosts.start("late")  # the new relay knows the newest version
    bus.wait_for("late", 1)
    bus.publish(2)
    for name in ("a", "late"):
        bus.wait_for(name, 2)
    bus.check_tokens()
