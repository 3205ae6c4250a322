"""Memory of versions: who sees what, and pinning, for which a driver that takes notes is CUDA."""

import os
from pathlib import Path

import msgspec
import pytest
import torch
from safetensors.torch import load_file

from slipstream.weightbus.version.layout import label_in, plan_layout, safetensors_header
from slipstream.weightbus.version.mapped_file import open_mapped, watched
from slipstream.weightbus.version.shared_memory import SharedSlots
from slipstream.wire.errors import PublishError
from slipstream.wire.messages.manifest import TensorSpec
from slipstream.wire.messages.versions import PolicyVersion
from slipstream.wire.models.model_files import WEIGHTS

LAYOUT = plan_layout([TensorSpec("w", "float32", (25,))], bucket_bytes=100)
VERSION = PolicyVersion(1, 5)


class Driver:
    """Refuses to pin what is pinned, as CUDA does."""

    def __init__(self) -> None:
        self.pinned: dict[int, int] = {}
        self.num_asked = 0

    def register(self, address: int, num_bytes: int) -> int:
        self.num_asked += 1
        if address in self.pinned:
            return 712
        self.pinned[address] = num_bytes
        return 0

    def pin(self, slots: SharedSlots) -> None:
        slots.pin(self.register, self.pinned.pop)


def test_memory_is_pinned_once_and_unpinned_when_its_mapping_ends():
    driver = Driver()
    slots = SharedSlots.make(LAYOUT, num_slots=3)
    driver.pin(slots)
    driver.pin(slots)
    assert driver.num_asked == 3
    for index in range(3):
        (address,) = (at for at in driver.pinned if 0 < slots.slot(index).data_ptr() - at <= 4096)
        assert driver.pinned[address] == 4096 + LAYOUT.num_bytes
    read = slots.slot(1)  # by a transaction that outlives the learner
    slots.close()
    del slots
    assert len(driver.pinned) == 1, "a GPU may still copy from it"
    del read
    assert not driver.pinned


def test_the_next_memory_at_the_same_address_is_pinned_anew():
    driver = Driver()
    addresses = set()
    for _ in range(4):
        slots = SharedSlots.make(LAYOUT, num_slots=3)
        driver.pin(slots)
        addresses.add(slots.slot(0).data_ptr())
        slots.close()
        del slots
    assert driver.num_asked == 12
    assert len(addresses) < 4, "the kernel gives the same address again"


def test_a_driver_that_refuses_is_reported():
    asked: list[int] = []

    def refuse(address: int, _num_bytes: int) -> int:
        asked.append(address)
        return 2

    slots = SharedSlots.make(LAYOUT, num_slots=1)
    with pytest.raises(PublishError, match="cannot be pinned: CUDA error 2"):
        slots.pin(refuse)
    slots.pin(refuse)
    assert len(asked) == 1, "it is tried again"


def test_another_mapping_sees_what_is_written_and_keeps_it_after_the_writer_has_gone():
    memory = SharedSlots.make(LAYOUT, num_slots=3)
    mapped = SharedSlots.open(memory.paths, LAYOUT)
    memory.slot(1).fill_(7)
    assert mapped.slot(1).tolist() == [7] * 100
    assert mapped.slot(0).sum() == mapped.slot(2).sum() == 0
    paths = memory.paths
    memory.close()
    assert mapped.slot(1).tolist() == [7] * 100
    with pytest.raises(PublishError, match="cannot map the weights at"):
        SharedSlots.open(paths, LAYOUT)
    mapped.close()


def test_a_memory_of_another_size_is_refused_and_its_size_cannot_change():
    memory = SharedSlots.make(LAYOUT, num_slots=3)
    longer = plan_layout([TensorSpec("w", "float32", (26,))], bucket_bytes=200)
    with pytest.raises(PublishError, match="have 4196 bytes, expected 4200"):
        SharedSlots.open(memory.paths, longer)
    for size in (0, 100, 1 << 20):
        with pytest.raises(PermissionError):
            os.truncate(memory.paths[0], size)
    unsealed = os.memfd_create("unsealed", os.MFD_ALLOW_SEALING)
    os.ftruncate(unsealed, 4096 + LAYOUT.num_bytes)
    with pytest.raises(PublishError, match="can change in size"):
        SharedSlots.open([f"/proc/self/fd/{unsealed}"], LAYOUT)
    os.close(unsealed)


def test_a_slot_is_a_file_of_the_version_that_it_holds_whole():
    memory = SharedSlots.make(LAYOUT, num_slots=3)
    path, version = Path(memory.paths[1]), PolicyVersion(2**63 - 1, 2**63 - 1)
    for step in (1, 2):
        with memory.writing(1, PolicyVersion(1, step)) as data:
            assert label_in(path.read_bytes()) == ""
            data.view(torch.float32).fill_(step)
        assert label_in(path.read_bytes()) == f"v1.{step}"
        assert load_file(path)["w"].tolist() == [step] * 25
    memory.label(1, version)
    assert label_in(path.read_bytes()) == version.label
    assert load_file(path)["w"].tolist() == [2] * 25
    assert label_in(Path(memory.paths[0]).read_bytes()) == ""


def test_a_mapped_file_is_refused_unless_it_is_the_offered_version(tmp_path: Path):
    memory = SharedSlots.make(LAYOUT, num_slots=3)
    path, offered = Path(memory.paths[0]), msgspec.structs.replace(LAYOUT, version=VERSION)
    with pytest.raises(PublishError, match=r"holds a part of another version, not v1\.5"):
        open_mapped(path, offered)
    memory.label(0, PolicyVersion(1, 4))
    with pytest.raises(PublishError, match=r"the memory holds v1\.4, not v1\.5"):
        open_mapped(path, offered)
    memory.label(0, VERSION)
    os.close(open_mapped(path, offered))
    other = plan_layout([TensorSpec("u", "float32", (25,))], bucket_bytes=100)
    with pytest.raises(OSError, match=r"does not hold the tensors of v1\.5"):
        open_mapped(path, msgspec.structs.replace(other, version=VERSION))
    whole = path.read_bytes()
    for damaged in (whole[:-1], whole + b"0", whole[:5000][:20], b""):
        (tmp_path / "damaged").write_bytes(damaged)
        with pytest.raises(OSError, match=r"does not hold the tensors of v1\.5"):
            open_mapped(tmp_path / "damaged", offered)
    with pytest.raises(FileNotFoundError):
        open_mapped(tmp_path / "absent", offered)


def test_only_sealed_memory_of_this_user_is_mapped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Another engine names the path, and digests are not compared."""
    memory = SharedSlots.make(LAYOUT, num_slots=1)
    memory.label(0, VERSION)
    path, offered = Path(memory.paths[0]), msgspec.structs.replace(LAYOUT, version=VERSION)
    (tmp_path / "copy").write_bytes(path.read_bytes())
    unsealed = os.memfd_create("unsealed", os.MFD_ALLOW_SEALING)
    os.write(unsealed, path.read_bytes())
    for other in (tmp_path / "copy", Path(f"/proc/self/fd/{unsealed}")):
        with pytest.raises(OSError):  # noqa: PT011 a file system may not know seals at all
            open_mapped(other, offered)
    os.close(unsealed)
    user = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: user + 1)
    with pytest.raises(OSError, match="no memory of this user"):
        open_mapped(path, offered)


def test_a_descriptor_of_another_process_with_the_same_number_does_not_stop_an_agent():
    offered = msgspec.structs.replace(LAYOUT, version=VERSION)
    reading, writing = os.pipe()
    for descriptor in (reading, writing):
        with pytest.raises(OSError, match="does not hold the tensors"):
            open_mapped(Path(f"/proc/self/fd/{descriptor}"), offered)
        os.close(descriptor)


def test_a_label_that_is_half_written_is_no_label():
    memory = SharedSlots.make(LAYOUT, num_slots=1)
    empty = Path(memory.paths[0]).read_bytes()[:4096]
    memory.label(0, PolicyVersion(1, 25))
    whole = Path(memory.paths[0]).read_bytes()[:4096]
    for at in range(4096):
        for half in (whole[:at] + empty[at:], empty[:at] + whole[at:]):
            assert label_in(half) not in {"v1.2", "v1.5", "v1"}


def test_a_reader_notices_that_a_version_was_overwritten(tmp_path: Path):
    memory = SharedSlots.make(LAYOUT, num_slots=3)
    (tmp_path / WEIGHTS).symlink_to(memory.paths[0])
    memory.label(0, VERSION)
    with watched(tmp_path, VERSION.label) as difference:
        assert difference() == ""
        memory.label(0, None)
        assert "holds a part of another version, not v1.5" in difference()
        memory.label(0, PolicyVersion(1, 8))
        assert "holds v1.8, not v1.5" in difference()


def test_a_reader_notices_it_although_the_name_is_gone_meanwhile(tmp_path: Path):
    memory = SharedSlots.make(LAYOUT, num_slots=3)
    (tmp_path / WEIGHTS).symlink_to(memory.paths[0])
    memory.label(0, VERSION)
    with watched(tmp_path, VERSION.label) as difference:
        assert difference() == ""
        (tmp_path / WEIGHTS).unlink()  # its agent hides it, or the learner dies
        assert difference() == ""
        memory.label(0, None)
        assert "holds a part of another version, not v1.5" in difference()


def test_only_a_file_with_a_label_is_compared(tmp_path: Path):
    with watched(tmp_path, VERSION.label) as difference:
        assert difference() == "", "the load says that there is nothing"
        (tmp_path / WEIGHTS).write_bytes(safetensors_header(LAYOUT) + bytes(100))
        assert difference() == "v1.5 came as it was loaded"
    with watched(tmp_path, VERSION.label) as difference:
        assert difference() == "", "it has no label"
    (tmp_path / WEIGHTS).unlink()
    (tmp_path / WEIGHTS).symlink_to("/proc/0/fd/9")
    with watched(tmp_path, VERSION.label) as difference:
        assert "v1.5 is not there any more" in difference()
