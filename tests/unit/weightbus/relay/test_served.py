"""Which memory a relay serves versions from."""

import asyncio
from pathlib import Path

import pytest
import torch
from msgspec.structs import replace

from slipstream.weightbus.relay.served import Versions
from slipstream.weightbus.version.layout import plan_layout
from slipstream.weightbus.version.shared_memory import SharedSlots
from slipstream.wire.errors import PublishError, SupersededError
from slipstream.wire.messages.manifest import TensorSpec
from slipstream.wire.messages.probe import ProbeLogprobs
from slipstream.wire.messages.relay import OpenMemory
from slipstream.wire.messages.versions import PolicyVersion

LAYOUT = plan_layout([TensorSpec("w", "float32", (4,))], bucket_bytes=64)


def memory() -> SharedSlots:
    return SharedSlots.make(LAYOUT, num_slots=3)


def shown(slots: SharedSlots, epoch: int, step: int, slot: int = 0) -> OpenMemory:
    whole = PolicyVersion(epoch, step)
    return OpenMemory(epoch=epoch, paths=slots.paths, layout=LAYOUT, whole=whole, slot=slot)


def test_another_memory_of_a_known_epoch_is_refused_and_nothing_changes(tmp_path: Path):
    versions, mine, other = Versions(tmp_path), memory(), memory()
    versions.open(shown(mine, 1, 3))
    with pytest.raises(PublishError, match="epoch 1 was granted twice"):
        versions.open(shown(other, 1, 4))
    with pytest.raises(PublishError, match="epoch 1 was granted twice"):
        versions.open(OpenMemory(epoch=1, paths=("/proc/0/fd/9",) * 3, layout=LAYOUT))
    assert versions.newest == PolicyVersion(1, 3)


def test_the_same_memory_may_be_shown_again_and_a_newer_epoch_brings_its_own(tmp_path: Path):
    versions, mine, next_one = Versions(tmp_path), memory(), memory()
    versions.open(shown(mine, 1, 3))
    versions.open(shown(mine, 1, 4, slot=1))
    assert versions.newest == PolicyVersion(1, 4)
    versions.open(shown(next_one, 2, 4))
    assert versions.newest == PolicyVersion(2, 4)
    with pytest.raises(SupersededError):
        versions.open(shown(mine, 1, 5))


def test_a_relay_for_one_host_refuses_a_learner_on_several(tmp_path: Path):
    versions, mine = Versions(tmp_path), memory()
    with pytest.raises(PublishError, match="for a learner on one host"):
        versions.open(replace(shown(mine, 1, 3), part_keys=("a-key",)))
    assert versions.newest is None


def test_a_former_learners_version_stays_at_a_part_while_it_is_held(tmp_path: Path):
    versions, mine, next_one = Versions(tmp_path), memory(), memory()
    before, held = PolicyVersion(1, 3), {PolicyVersion(1, 3)}
    versions.held = lambda: held
    versions.open(shown(mine, 1, 3))
    versions.open(replace(shown(next_one, 2, 4), whole=None))
    held.clear()
    versions.let_go()
    assert versions.newest == before  # there is no other yet
    held.add(before)
    versions.written(2, 0, PolicyVersion(2, 4))
    assert versions.newest == PolicyVersion(2, 4)
    assert versions.find(before) is not None
    held.clear()
    versions.let_go()
    assert versions.find(before) is None


async def test_a_version_keeps_its_probe_also_in_another_relay(tmp_path: Path):
    probe = ProbeLogprobs(sequences=((1, 2, 3),), logprobs=((-0.5,),), num_context=2)
    mine = memory()

    versions = Versions(tmp_path / "first")
    versions.open(shown(mine, 1, 3))
    assert versions.read().publication.probe is None
    versions.written(1, versions.reserve(1), PolicyVersion(1, 4), probe)
    assert versions.read().publication.probe == probe
    another = Versions(tmp_path / "second")
    another.open(replace(shown(mine, 1, 4), probe=probe))
    assert another.read().publication.probe == probe


def test_waiter_for_a_change_is_woken_once_per_change(tmp_path: Path):
    versions = Versions(tmp_path)
    before = versions.changed
    versions.wake()
    assert before.is_set()
    assert not versions.changed.is_set()


async def test_copies_on_a_gpu_go_with_the_last_reader(tmp_path: Path):
    versions, mine = Versions(tmp_path), memory()
    versions.open(shown(mine, 1, 3))
    first, second = versions.read(), versions.read()
    assert first is not None
    assert second is not None
    buckets = first.publication.on_gpu
    copy = buckets.get(0, torch.device("meta"))
    await first.end()
    assert buckets.get(0, torch.device("meta")) is copy
    await second.end()
    await asyncio.sleep(0)
    assert buckets.get(0, torch.device("meta")) is not copy
