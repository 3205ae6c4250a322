"""A version that one agent of a host has fetched, and engines that load from its memory."""

import asyncio
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from safetensors.torch import load_file

from slipstream.weightbus.agent.fetcher import BucketFetcher
from slipstream.weightbus.agent.host_identity import host_identity
from slipstream.weightbus.agent.staging import Staging
from slipstream.weightbus.agent.updates import Order
from slipstream.weightbus.net.traffic import Traffic
from slipstream.weightbus.version.mapped_file import open_mapped, watched
from slipstream.weightbus.version.tensor_bits import bits_in_folder
from slipstream.wire.errors import PublishError
from slipstream.wire.messages.codec import Frame
from slipstream.wire.messages.versions import PolicyVersion
from slipstream.wire.messages.weightbus import Adopt, CommandOutcome, ReceiveVersion
from slipstream.wire.models.model_files import WEIGHTS
from tests.support.bus.engine import BusEngine, digest_of, random_tensors
from tests.support.bus.published import updates_of
from tests.support.bus.snapshots import CopiedSnapshot

COUNT, SIZE = 3, 8


def snapshot(step: int, *, size: int = SIZE) -> CopiedSnapshot:
    tensors = random_tensors(seed=step, count=COUNT, size=size)
    return CopiedSnapshot.of(PolicyVersion(1, step), tensors, bucket_bytes=50)


class Fetching:
    """Fetches buckets of a version that is at hand."""

    def __init__(self, sent: CopiedSnapshot, doing: "Agent") -> None:
        self.order, self.ahead, self.engines = range(len(sent.layout.buckets)), 1, ()
        self._sent, self._doing = sent, doing

    async def fetch(self, index: int, _base: object) -> Frame:
        await asyncio.sleep(0)
        self._doing.while_fetching()
        self._doing.fetcher.num_fetched += 1
        return self._sent.bucket(index).numpy().data

    def rejected(self, _index: int, _why: str) -> bool:
        return False


class FromHand(BucketFetcher):
    """Has the versions of a test in the place of doors."""

    def __init__(self, agent: "Agent") -> None:
        self._agent = agent
        self.num_fetched = 0
        self.traffic = agent.traffic

    def receiving(self, *_what: object) -> Fetching:  # type: ignore[override]
        return Fetching(self._agent.sent, self._agent)

    def reconnect(self) -> None:
        pass


class Agent:
    """An agent of an engine of plain tensors."""

    def __init__(self, folder: Path, name: str, *, uses_deltas: bool) -> None:
        tensors = random_tensors(seed=0, count=COUNT, size=SIZE)
        self.traffic = Traffic()
        self.sent = snapshot(0)
        self.while_fetching = self.while_loading = self.nothing
        self.staging = Staging(folder, name, uses_deltas=uses_deltas)
        self.engine = BusEngine(tensors, log=folder / name, group_timeout_s=1.0, fault=self._at)
        self.updates = updates_of(self.engine, tensors, self.staging)
        self.fetcher = FromHand(self)

    def nothing(self) -> None:
        pass

    def _at(self, step: str) -> None:
        if step == "in_folder":
            self.while_loading()

    def do(self, command: Order) -> CommandOutcome:
        return asyncio.run(self.updates.execute(command, self.fetcher))

    def receive(
        self, sent: CopiedSnapshot, mapped: str = "", *, may_be_read: bool = False
    ) -> CommandOutcome:
        self.sent = sent
        return self.do(
            ReceiveVersion(
                command_id=1, manifest=sent.manifest(), mapped=mapped, may_be_read=may_be_read
            )
        )

    def adopt(self, sent: CopiedSnapshot) -> CommandOutcome:
        return self.do(Adopt(command_id=2, version=sent.version))

    def holds(self, sent: CopiedSnapshot) -> bool:
        return digest_of(self.engine.tensors) == digest_of(sent.tensors)


@pytest.fixture(params=[True, False], ids=["deltas", "whole"])
def pair(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[Agent, Agent]]:
    agents = [Agent(tmp_path, name, uses_deltas=request.param) for name in "ab"]
    yield agents[0], agents[1]
    for agent in agents:
        agent.engine.close()
        agent.staging.close()


def test_one_fetches_and_the_other_maps_and_has_no_memory_of_its_own(pair: tuple[Agent, Agent]):
    owner, reader = pair
    reader.receive(snapshot(0))
    for step in (1, 2):
        sent = snapshot(step)
        path = owner.receive(sent).path
        outcome = reader.receive(sent, path)
        assert (outcome.error, outcome.num_bytes, outcome.path) == ("", 0, "")
        assert owner.adopt(sent).error == reader.adopt(sent).error == ""
        assert owner.holds(sent)
        assert reader.holds(sent)
    assert reader.fetcher.num_fetched == len(sent.layout.buckets), "the first version alone"
    assert (reader.staging.folder / "memory").stat().st_size == 0
    assert reader.traffic.copied_bytes == sent.layout.num_bytes


def test_memory_that_is_written_while_an_engine_loads_it_is_not_adopted(pair: tuple[Agent, Agent]):
    """The relay gave the reader up: its owner gets the next version in the same memory."""
    owner, reader = pair
    first = snapshot(1)
    reader.receive(first, owner.receive(first).path)
    reader.while_loading = lambda: _in_thread(lambda: owner.receive(snapshot(2)))
    outcome = reader.adopt(first)
    assert outcome.error == "the memory holds v1.2, not v1.1"
    assert not reader.engine.runs
    reader.while_loading = reader.nothing
    again = snapshot(3)
    reader.receive(again, owner.receive(again).path)
    assert reader.adopt(again).error == ""
    assert reader.holds(again)


def _in_thread(work: Callable[[], object]) -> None:
    """Carry out another agent's command while the event loop of this one waits."""
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()


def test_no_byte_changes_under_a_label(pair: tuple[Agent, Agent]):
    owner, reader = pair
    first, second = snapshot(1), snapshot(2)
    reader.receive(first, owner.receive(first).path)
    labels: list[str] = []
    with watched(reader.staging.folder / "v1.1", "v1.1") as difference:
        assert difference() == ""
        owner.while_fetching = lambda: labels.append(difference())
        owner.receive(second)
        assert labels == ["the memory holds a part of another version, not v1.1"] * len(
            second.layout.buckets
        )
        assert difference() == "the memory holds v1.2, not v1.1"
    owner.while_fetching = owner.nothing
    owner.sent = second

    def damaged() -> None:
        raise PublishError("the relay is gone")

    owner.while_fetching = damaged
    path = owner.staging.path
    assert owner.receive(snapshot(3)).error == "the relay is gone"
    assert owner.staging.path == ""
    with pytest.raises(PublishError, match="a part of another version"):
        open_mapped(Path(path), snapshot(3).manifest())


def test_an_owner_leaves_memory_that_is_read_to_its_readers(pair: tuple[Agent, Agent]):
    owner, reader = pair
    first, second = snapshot(1), snapshot(2)
    reader.receive(first, owner.receive(first).path)
    reader.while_loading = lambda: _in_thread(lambda: owner.receive(second, may_be_read=True))
    assert reader.adopt(first).error == ""
    assert reader.holds(first)
    assert owner.adopt(second).error == ""
    assert owner.holds(second)


def test_memory_of_another_size_takes_the_place_of_one_that_may_be_mapped(tmp_path: Path):
    owner = Agent(tmp_path, "a", uses_deltas=False)
    first = snapshot(1)
    owner.receive(first)
    mapped = load_file(owner.staging.folder / "v1.1" / WEIGHTS)
    descriptor = os.open(owner.staging.path, os.O_RDWR)
    with pytest.raises(PermissionError):
        os.ftruncate(descriptor, 0)
    asyncio.run(owner.staging.receive(*_arguments(snapshot(2, size=2))))
    assert digest_of(mapped) == digest_of(first.tensors)
    os.close(descriptor)
    owner.engine.close()
    owner.staging.close()


def _arguments(sent: CopiedSnapshot) -> tuple[object, object]:
    async def fetch(index: int) -> Frame:
        await asyncio.sleep(0)
        return sent.bucket(index).numpy().data

    return sent.manifest(), fetch


def test_one_that_cannot_open_the_file_fetches_and_says_so_once(
    pair: tuple[Agent, Agent], caplog: pytest.LogCaptureFixture
):
    owner, reader = pair
    caplog.set_level("INFO")
    for step in (1, 2):
        sent = snapshot(step)
        path = owner.receive(sent).path
        owner.staging.close() if step == 2 else owner.staging.free()
        outcome = reader.receive(sent, path)
        assert (outcome.error, bool(outcome.path)) == ("", True)
        assert reader.adopt(sent).error == ""
        assert reader.holds(sent)
    said = [text for text in caplog.messages if "a version is fetched" in text]
    assert len(said) == 1


def test_an_engine_loads_what_it_has_open_after_the_owner_died(pair: tuple[Agent, Agent]):
    owner, reader = pair
    sent = snapshot(1)
    reader.receive(sent, owner.receive(sent).path)
    owner.staging.close()
    assert reader.adopt(sent).error == ""
    assert reader.holds(sent)


def test_checksums_are_computed_from_a_mapped_file(pair: tuple[Agent, Agent]):
    """Where the learner is on several hosts, agents compute what engines must hold."""
    owner, reader = pair
    sent = snapshot(1)
    owner.receive(sent)
    reader.receive(sent, owner.staging.path)
    bits = bits_in_folder(reader.staging.folder / "v1.1", sent.manifest())
    assert bits.keys() == sent.tensors.keys()
    owner.receive(snapshot(2))
    with pytest.raises(PublishError, match="does not hold the offered version"):
        bits_in_folder(reader.staging.folder / "v1.1", sent.manifest())


def test_other_bytes_in_a_mapped_file_are_seen_where_checksums_come_from_it(
    pair: tuple[Agent, Agent],
):
    owner, reader = pair
    sent = snapshot(1)
    path = owner.receive(sent).path
    file = os.open(path, os.O_RDWR)
    last = os.fstat(file).st_size - 1
    os.pwrite(file, bytes([os.pread(file, 1, last)[0] ^ 1]), last)
    os.close(file)
    order = ReceiveVersion(command_id=1, manifest=sent.manifest(), mapped=path, is_checked=True)
    assert "digest" in reader.do(order).error


def test_a_host_is_one_kernel_one_numbering_of_processes_and_one_user():
    boot, processes, user = host_identity().split("/")
    assert boot == Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    assert f"pid:[{processes}]" == os.readlink("/proc/self/ns/pid")  # noqa: PTH115
    assert user == str(os.geteuid())
