"""What an agent accepts: every byte of the manifest's, or nothing."""

import asyncio
import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from slipstream.weightbus.agent.staging import Staging
from slipstream.weightbus.version.disk import (
    WEIGHTS,
    check_folder,
    copies_in,
    number_after,
    remove_copies,
    write_version,
)
from slipstream.wire.errors import PublishError
from slipstream.wire.messages.codec import Frame
from slipstream.wire.messages.versions import PolicyVersion
from tests.support.bus.snapshots import CopiedSnapshot


def snapshot(step: int = 1, count: int = 5) -> CopiedSnapshot:
    tensors = {f"t{i}": torch.full((7, 3), float(step * 10 + i)) for i in range(count)}
    return CopiedSnapshot.of(PolicyVersion(1, step), tensors, bucket_bytes=200)


def receive(staging: Staging, sent: CopiedSnapshot, change: dict[int, bytes] | None = None) -> Path:
    buckets = {i: sent.bucket(i).numpy().data for i in range(len(sent.layout.buckets))}

    async def fetch(index: int) -> Frame:
        await asyncio.sleep(0)
        return (change or {}).get(index, buckets[index])

    return asyncio.run(staging.receive(sent.manifest(), fetch))


def test_what_was_received_is_a_folder_that_can_be_loaded_again_and_again(tmp_path: Path):
    staging = Staging(tmp_path, "agent")
    for step, count in ((1, 5), (2, 5), (3, 2), (4, 9)):
        sent = snapshot(step, count)
        folder = receive(staging, sent)
        loaded = load_file(folder / WEIGHTS)
        assert loaded.keys() == sent.tensors.keys()
        assert all(torch.equal(loaded[name], sent.tensors[name]) for name in loaded)
    staging.close()
    assert not list(tmp_path.iterdir())


def test_a_version_is_found_under_its_label_while_it_is_whole_and_no_longer(tmp_path: Path):
    staging, sent = Staging(tmp_path, "agent"), snapshot(2)
    first = receive(staging, snapshot(1))
    assert [path.parent.name for path in staging.folder.glob(f"*/{WEIGHTS}")] == ["v1.1"]
    seen: list[bool] = []

    async def fetch(index: int) -> Frame:
        seen.append(first.exists() or (staging.folder / "v1.2").exists())
        return sent.bucket(index).numpy().data

    asyncio.run(staging.receive(sent.manifest(), fetch))
    assert seen == [False] * len(sent.layout.buckets)
    assert [path.parent.name for path in staging.folder.glob(f"*/{WEIGHTS}")] == ["v1.2"]
    with pytest.raises(PublishError):
        receive(staging, snapshot(3), {0: b""})
    assert not list(staging.folder.glob(f"*/{WEIGHTS}"))
    assert (receive(staging, sent) / WEIGHTS).exists()
    staging.free()
    assert not list(staging.folder.glob(f"*/{WEIGHTS}"))
    staging.close()


def test_received_weights_are_readable_by_their_owner_only(tmp_path: Path):
    staging = Staging(tmp_path / "of-agents", "agent")
    assert (tmp_path / "of-agents").stat().st_mode & 0o777 == 0o700
    (folder,) = (tmp_path / "of-agents").iterdir()
    assert folder.stat().st_mode & 0o777 == 0o700
    staging.close()


def test_memory_is_there_before_a_version_and_gone_after_it(tmp_path: Path):
    def held() -> int:
        (folder,) = tmp_path.iterdir()
        return (folder / "memory").stat().st_blocks * 512

    staging = Staging(tmp_path, "agent")
    staging.reserve(1 << 20)
    assert held() >= 1 << 20
    sent = snapshot()
    mapped = load_file(receive(staging, sent) / WEIGHTS)
    descriptors = os.listdir("/proc/self/fd")  # noqa: PTH208 of the listing itself, too
    staging.free()
    assert held() == 0
    assert os.listdir("/proc/self/fd") == descriptors, "one is left open"  # noqa: PTH208
    assert torch.equal(mapped["t0"], sent.tensors["t0"])  # a process that maps it does not fail
    again = snapshot(2)
    loaded = load_file(receive(staging, again) / WEIGHTS)
    assert torch.equal(loaded["t3"], again.tensors["t3"])
    staging.close()
    staging.reserve(1 << 20)  # by a thread that is late
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda data: bytes([data[0] ^ 1]) + data[1:], "t0 arrived with digest"),
        (lambda data: data[:-1], "bucket 0 has 167 bytes, expected 168"),
        (lambda data: data + b"0", "bucket 0 has 169 bytes, expected 168"),
    ],
    ids=["flipped", "short", "long"],
)
def test_other_bytes_than_those_of_the_manifest_are_refused(
    tmp_path: Path, change: Callable[[bytes], bytes], why: str
):
    sent = snapshot()
    staging = Staging(tmp_path, "agent")
    with pytest.raises(PublishError, match=why):
        receive(staging, sent, {0: change(bytes(sent.bucket(0).numpy()))})
    staging.close()


def write(folder: Path, sent: CopiedSnapshot, number: int = 1) -> Path:
    return write_version(folder, sent.manifest(), sent.memory.numpy().data, number=number)


def test_a_version_on_disk_is_whole_and_checked(tmp_path: Path):
    sent = snapshot()
    folder = write(tmp_path, sent)
    check_folder(folder, sent.manifest())
    assert torch.equal(load_file(folder / WEIGHTS)["t3"], sent.tensors["t3"])
    assert write(tmp_path, sent, number=2) != folder


@pytest.mark.parametrize(
    ("damage", "why"),
    [
        (lambda data: data[:-1] + bytes([data[-1] ^ 1]), "t4 arrived with digest"),
        (lambda data: data[:-1], "does not hold the offered version"),
        (lambda data: data + b"0", "does not hold the offered version"),
        (lambda data: data[:9] + b"!" + data[10:], "does not hold the offered version"),
        (None, "cannot read .* same folder on every host"),
    ],
    ids=["flipped", "short", "long", "header", "gone"],
)
def test_a_damaged_version_on_disk_is_refused(
    tmp_path: Path, damage: Callable[[bytes], bytes] | None, why: str
):
    sent = snapshot()
    folder = write(tmp_path, sent)
    file = folder / WEIGHTS
    if damage is None:
        file.unlink()
    else:
        file.write_bytes(damage(file.read_bytes()))
    with pytest.raises(PublishError, match=why):
        check_folder(folder, sent.manifest())


def test_old_versions_are_removed_and_nothing_of_anybody_else(tmp_path: Path):
    for step in (1, 2):
        write(tmp_path, snapshot(step))
    for name in ("my-model", "v1", "v2.1", "notes-v1.2-3"):
        (tmp_path / name).mkdir()
    (tmp_path / ".v1.9-1.unfinished").mkdir()
    left = copies_in(tmp_path)
    assert [path.name for path in left] == [".v1.9-1.unfinished", "v1.1-1", "v1.2-1"]
    assert number_after(left) == 2
    write(tmp_path, snapshot(3))  # by another relay, meanwhile
    remove_copies(left, unfinished_only=True)
    assert [path.name for path in copies_in(tmp_path)] == ["v1.1-1", "v1.2-1", "v1.3-1"]
    remove_copies(left)
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "my-model",
        "notes-v1.2-3",
        "v1",
        "v1.3-1",
        "v2.1",
    ]
    assert copies_in(tmp_path / "nowhere") == []
    assert number_after([]) == 1


def test_a_disk_that_refuses_is_named_with_its_setting(tmp_path: Path):
    (tmp_path / "file").write_text("")
    with pytest.raises(PublishError, match=r"cannot write v1\.1 .*weightbus\.folder"):
        write(tmp_path / "file", snapshot())
