"""A version that an engine loads from the learner's own memory."""

import asyncio
import gc
from collections.abc import Iterator
from pathlib import Path

import pytest

from slipstream.weightbus.agent.fetcher import BucketFetcher
from slipstream.weightbus.agent.staging import Staging
from slipstream.weightbus.agent.updates import Order
from slipstream.weightbus.version.engine_checksums import digest_of, expected_checksums
from slipstream.weightbus.version.layout import plan_layout
from slipstream.weightbus.version.shared_memory import SharedSlots
from slipstream.weightbus.version.snapshot import WeightSnapshot, tensor_views, with_digests
from slipstream.wire.messages.manifest import WeightManifest
from slipstream.wire.messages.versions import PolicyVersion
from slipstream.wire.messages.weightbus import Abandon, Adopt, CommandOutcome, ReceiveVersion
from tests.support.bus.engine import BusEngine, random_tensors
from tests.support.bus.published import updates_of
from tests.support.bus.snapshots import tensor_spec


class NoFetcher(BucketFetcher):
    """Fetches nothing."""

    def __init__(self) -> None:
        self.num_asked = 0

    def receiving(self, *_what: object) -> None:  # type: ignore[override]
        self.num_asked += 1
        raise AssertionError("it is fetched")

    def reconnect(self) -> None:
        pass


class Host:
    """A learner's memory, and an engine with its agent."""

    def __init__(self, folder: Path) -> None:
        tensors = random_tensors(seed=0, count=3, size=8)
        self.layout = plan_layout([tensor_spec(*item) for item in tensors.items()], bucket_bytes=50)
        self.memory = SharedSlots.make(self.layout, num_slots=2)
        self.staging = Staging(folder, "a")
        self.while_loading = self.nothing
        self.engine = BusEngine(tensors, log=folder / "tokens", group_timeout_s=1.0, fault=self._at)
        self.updates = updates_of(self.engine, tensors, self.staging)
        self.fetcher = NoFetcher()
        self._digest = ""

    def nothing(self) -> None:
        pass

    def _at(self, step: str) -> None:
        if step == "in_folder":
            self.while_loading()

    def write(self, slot: int, step: int) -> WeightManifest:
        """Write a version; return its manifest."""
        version = PolicyVersion(1, step)
        self.tensors = random_tensors(seed=step, count=3, size=8)
        with self.memory.writing(slot, version) as data:
            for name, view in tensor_views(self.layout, data).items():
                view.copy_(self.tensors[name])
        self._digest = digest_of(expected_checksums(self.tensors))
        snapshot = WeightSnapshot(version, self.layout, self.memory.slot(slot))
        return with_digests(self.layout, version, snapshot.digests())

    def do(self, command: Order) -> CommandOutcome:
        return asyncio.run(self.updates.execute(command, self.fetcher))

    def receive(self, manifest: WeightManifest, slot: int) -> CommandOutcome:
        path = self.memory.paths[slot]
        return self.do(ReceiveVersion(command_id=2, manifest=manifest, mapped=path))

    def adopt(self, step: int, *, is_checked: bool = True) -> CommandOutcome:
        digest = self._digest if is_checked else ""
        return self.do(Adopt(command_id=3, version=PolicyVersion(1, step), digest=digest))


@pytest.fixture
def host(tmp_path: Path) -> Iterator[Host]:
    host = Host(tmp_path)
    yield host
    host.engine.close()
    host.staging.close()
    host.memory.close()


def test_an_engine_loads_from_the_slot_and_nothing_is_fetched_or_copied(host: Host):
    for step in (1, 2):
        outcome = host.receive(host.write(step % 2, step), step % 2)
        assert (outcome.error, outcome.num_bytes) == ("", 0)
        assert host.adopt(step).error == ""
        assert host.updates.adopted == PolicyVersion(1, step)
        assert all(host.engine.tensors[name].equal(host.tensors[name]) for name in host.tensors)
    assert host.fetcher.num_asked == 0
    assert host.staging._size == 0, "no memory was allocated for it"


def test_a_slot_that_is_overwritten_while_an_engine_loads_it_is_not_adopted(host: Host):
    host.receive(host.write(0, 1), 0)
    host.adopt(1)
    host.receive(host.write(1, 2), 1)
    host.while_loading = lambda: host.memory.label(1, None)
    outcome = host.adopt(2, is_checked=False)  # no checksum would tell
    assert outcome.error == "the memory holds a part of another version, not v1.2"
    host.do(Abandon(command_id=4, reason="it was overwritten"))
    assert host.updates.adopted is None
    assert not host.engine.runs
    host.while_loading = host.nothing
    host.receive(host.write(0, 3), 0)
    assert host.adopt(3).error == ""
    assert host.engine.runs


def test_a_slot_that_is_overwritten_is_not_adopted_although_its_agent_went_on(host: Host):
    host.receive(host.write(0, 1), 0)
    host.adopt(1)
    host.receive(host.write(1, 2), 1)

    def given_up() -> None:
        host.memory.label(1, None)
        host.staging.free()

    host.while_loading = given_up
    outcome = host.adopt(2, is_checked=False)
    assert outcome.error == "the memory holds a part of another version, not v1.2"
    assert not host.engine.runs


def test_an_engine_loads_what_its_agent_has_received_after_the_learner_died(host: Host):
    host.receive(host.write(0, 1), 0)
    host.memory.close()
    assert host.adopt(1).error == ""
    assert all(host.engine.tensors[name].equal(host.tensors[name]) for name in host.tensors)


def test_no_descriptor_is_left_of_a_version_that_is_hidden(host: Host):
    gc.collect()  # what earlier tests left open is closed now, not in between
    before = len(list(Path("/proc/self/fd").iterdir()))
    for step in range(1, 5):
        host.receive(host.write(step % 2, step), step % 2)
        host.adopt(step)
    host.staging.free()
    assert len(list(Path("/proc/self/fd").iterdir())) == before


def test_a_slot_that_was_written_anew_before_the_load_is_not_loaded(host: Host):
    host.receive(host.write(0, 1), 0)
    host.write(0, 2)
    before = {name: tensor.clone() for name, tensor in host.engine.tensors.items()}
    outcome = host.adopt(1, is_checked=False)
    assert outcome.error == "the memory holds v1.2, not v1.1"
    assert all(host.engine.tensors[name].equal(before[name]) for name in before)


def test_a_slot_that_holds_no_whole_version_is_refused(host: Host):
    manifest = host.write(0, 1)
    host.memory.label(0, None)
    assert host.receive(manifest, 0).error.endswith("a part of another version, not v1.1")
    assert host.adopt(1).error == "v1.1 was not received"


def test_a_version_is_fetched_where_the_learners_memory_is_out_of_sight(host: Host):
    manifest = host.write(0, 1)
    host.memory.close()
    command = ReceiveVersion(command_id=2, manifest=manifest, mapped="/proc/0/fd/9")
    with pytest.raises(AssertionError, match="it is fetched"):
        host.do(command)
    assert host.fetcher.num_asked == 1
