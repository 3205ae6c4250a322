"""What every remote storage promises: a folder, memory, and S3."""

import uuid
from collections.abc import Iterator
from pathlib import Path

import huggingface_hub.constants
import pytest

from slipstream.learner.checkpoints.digests import damage_of
from slipstream.wire.errors import ConfigError
from slipstream.wire.files.checkpoints import CheckpointInfo, read_checkpoint_info
from slipstream.wire.files.fetched import (
    Fetch,
    content_hash,
    fetched_file,
    fetched_model,
    hub_model,
)
from slipstream.wire.files.remote import RemoteFolder, StorageError
from slipstream.wire.files.remote_checkpoints import MANIFEST, RemoteCheckpoints
from slipstream.wire.messages.versions import PolicyVersion
from slipstream.wire.settings.sections import RunSection, model_folder
from tests.support.checkpoint_infos import saved_checkpoint
from tests.support.hub_server import Commits, hub_server
from tests.support.stores import BUCKET, s3_server

INDEX = b'{"weight_map": {"a": "part-1.safetensors", "b": "part-2.safetensors"}}'
MODEL = {
    "additional_chat_templates/tools.jinja": b"{{ tools }}",
    "config.json": b"{}",
    "consolidated.safetensors": b"the same weights under names of Mistral's",
    "model.safetensors": b"w" * 100_000,
    "model.safetensors.index.json": INDEX,  # of an earlier upload in parts
    "modeling.py": b"pass",
    "pytorch_model.bin": b"a pickle",
    "original/model.safetensors": b"not read",
}
SMALL = {
    "additional_chat_templates/tools.jinja",
    "config.json",
    "model.safetensors.index.json",
    "modeling.py",
}


@pytest.fixture(scope="module")
def s3() -> Iterator[None]:
    with s3_server():
        yield


@pytest.fixture(params=["file", "memory", pytest.param("s3", marks=pytest.mark.integration)])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """Return the URL of a folder that does not exist yet."""
    if request.param == "s3":
        request.getfixturevalue("s3")
    places = {"file": f"file://{tmp_path}/remote", "memory": "memory://bucket", "s3": BUCKET}
    return f"{places[request.param]}/{uuid.uuid4().hex}"


def put(url: str, files: dict[str, bytes]) -> None:
    for name, data in files.items():
        RemoteFolder(url, "test").write(data, name)


def fetch(url: str, cache: Path, expected: str = "", *, with_weights: bool = True) -> Path:
    """Fetch as another process would."""
    fetched_model.cache_clear()
    return fetched_model(Fetch(url, "run.model", cache, expected), with_weights=with_weights)


def contents(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def test_objects_are_written_listed_read_and_removed(url: str, tmp_path: Path):
    folder = RemoteFolder(url, "test")
    assert folder.files() == []
    (tmp_path / "large").write_bytes(b"x" * 300_000)
    folder.put(tmp_path / "large", "below/large")
    folder.write(b"small", "small")
    assert [(one.name, one.size) for one in folder.files()] == [
        ("below/large", 300_000),
        ("small", 5),
    ]
    assert folder.read("small") == b"small"
    folder.remove("small")
    assert [one.name for one in folder.files()] == ["below/large"]
    with pytest.raises(StorageError, match="small"):
        folder.read("small")


def test_folder_beside_of_a_longer_name_is_not_listed(url: str):
    put(url, {"a": b"1"})
    put(f"{url}-2", {"b": b"2"})
    assert [one.name for one in RemoteFolder(url, "test").files()] == ["a"]


def test_content_that_changed_is_another(url: str):
    folder = RemoteFolder(url, "test")
    folder.write(b"one", "a")
    before = folder.files()
    folder.write(b"two", "a")
    assert folder.files() != before
    assert folder.files() == folder.files()


def test_model_is_fetched_with_the_files_that_roles_read_alone(url: str, tmp_path: Path):
    put(url, MODEL)
    copy = fetch(url, tmp_path / "cache")
    assert contents(copy) == {name: MODEL[name] for name in (*SMALL, "model.safetensors")}
    assert copy.name == content_hash(url, "run.model", is_model=True)
    assert set(contents(fetch(url, tmp_path / "cache", with_weights=False))) == SMALL


@pytest.mark.integration
def test_model_of_the_hub_is_fetched_with_the_files_that_roles_read_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    parts = {"model.safetensors.index.json": INDEX, "part-1.safetensors": b"1"}
    first, second, third, fourth = (digit * 40 for digit in "1234")
    commits: Commits = {
        third: {"config.json": b"{}", "pytorch_model.bin": b"a pickle"},
        fourth: {"config.json": b"{}", **parts},
        first: MODEL,
        second: MODEL | parts | {"part-2.safetensors": b"2"},
    }
    commits[second].pop("model.safetensors")
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.chdir(tmp_path)
    hub_model.cache_clear()
    pinned = RunSection(model="org/tiny", contents={"org/tiny": first})
    with hub_server("org/tiny", commits, monkeypatch) as downloads:
        assert content_hash("org/tiny", "run.model", is_model=True) == second
        assert set(downloads) == SMALL
        newest = model_folder(RunSection(model="org/tiny"), with_weights=True)
        assert set(contents(newest)) == {*SMALL, *parts, "part-2.safetensors"}
        assert set(contents(model_folder(pinned))) == SMALL
        whole = model_folder(pinned, with_weights=True)
        assert contents(whole) == {name: MODEL[name] for name in (*SMALL, "model.safetensors")}
        assert len(downloads) == len(set(downloads))
        for commit, why in (
            (third, r"org/tiny holds neither .* its weights are torch's"),
            (
                fourth,
                r"org/tiny/model\.safetensors\.index\.json names 'part-2\.safetensors', which",
            ),
        ):
            other = RunSection(model="org/tiny", contents={"org/tiny": commit})
            with pytest.raises(ConfigError, match=rf"^{why}.*\(run\.model\)$"):
                model_folder(other, with_weights=True)
    hub_model.cache_clear()
    assert model_folder(pinned, with_weights=True) == whole  # where the hub does not answer
    hub_model.cache_clear()


def test_file_is_fetched_under_its_own_name(url: str, tmp_path: Path):
    put(url, {"train.jsonl": b"rows"})
    copy = fetched_file(Fetch(f"{url}/train.jsonl", "data.file", tmp_path / "cache"))
    assert copy.name == "train.jsonl"
    assert copy.read_bytes() == b"rows"


def test_copy_with_the_expected_content_needs_no_store(url: str, tmp_path: Path):
    put(url, MODEL)
    copy = fetch(url, tmp_path / "cache")
    for one in RemoteFolder(url, "test").files():
        RemoteFolder(url, "test").remove(one.name)
    assert fetch(url, tmp_path / "cache", copy.name) == copy
    with pytest.raises(ConfigError, match=r"no config\.json in .*run\.model"):
        fetch(url, tmp_path / "cache")


def test_content_that_is_not_the_expected_one_is_refused(url: str, tmp_path: Path):
    put(url, MODEL)
    expected = content_hash(url, "run.model", is_model=True)
    put(url, {"model.safetensors": b"v" * 100_000})
    with pytest.raises(ConfigError, match=f"has changed.*{expected}.*run.contents"):
        fetch(url, tmp_path / "cache", expected)
    assert not (tmp_path / "cache").exists()


def test_file_and_folder_are_not_taken_for_each_other(url: str, tmp_path: Path):
    put(url, MODEL)
    with pytest.raises(ConfigError, match=r"is no file \(data\.file\)"):
        fetched_file(Fetch(url, "data.file", tmp_path))
    with pytest.raises(ConfigError, match=r"no config\.json"):
        fetch(f"{url}/model.safetensors", tmp_path)


def save(folder: Path, step: int, epoch: int = 1) -> tuple[Path, CheckpointInfo]:
    return saved_checkpoint(folder, PolicyVersion(epoch, step))


def upload(url: str, folder: Path, *steps: int) -> RemoteCheckpoints:
    remote = RemoteCheckpoints(url)
    for step in steps:
        remote.upload(*save(folder, step), None)
    return remote


def labels(remote: RemoteCheckpoints) -> list[str]:
    return [one.version.label for one in remote.known()]


def test_fetched_checkpoint_is_the_one_that_was_uploaded(url: str, tmp_path: Path):
    remote = upload(url, tmp_path / "a", 1, 2)
    fetched = remote.fetch_newest(tmp_path / "b", newer_than=PolicyVersion(1, 1))
    assert fetched == tmp_path / "b" / "step-000002"
    original = tmp_path / "a" / "checkpoints" / "step-000002"
    assert contents(fetched) == contents(original)
    assert damage_of(fetched) == ""
    assert remote.fetch_newest(tmp_path / "b", newer_than=PolicyVersion(1, 2)) is None


def test_same_step_of_a_later_epoch_is_another_checkpoint(url: str, tmp_path: Path):
    remote = upload(url, tmp_path / "a", 4, 6)
    remote.upload(*save(tmp_path / "a", 4, epoch=2), None)
    assert labels(remote) == ["v1.4", "v1.6", "v2.4"]
    fetched = remote.fetch_newest(tmp_path / "b", newer_than=None)
    assert fetched is not None
    assert read_checkpoint_info(fetched).version == PolicyVersion(2, 4)


@pytest.mark.parametrize("content", [None, b"{", b"[]", b"", b"\xff"])
def test_checkpoint_without_a_manifest_does_not_exist(
    url: str, tmp_path: Path, content: bytes | None
):
    remote = upload(url, tmp_path / "a", 1, 2)
    manifest = f"step-000002-epoch-1/{MANIFEST}"
    if content is None:
        RemoteFolder(url, "test").remove(manifest)
    else:
        RemoteFolder(url, "test").write(content, manifest)
    assert labels(remote) == ["v1.1"]


@pytest.mark.parametrize("damage", [b"tensors", b""])
def test_object_that_was_cut_is_noticed_before_a_download(url: str, tmp_path: Path, damage: bytes):
    remote = upload(url, tmp_path / "a", 1, 2)
    RemoteFolder(url, "test").write(damage, "step-000002-epoch-1/__0_0.distcp")
    assert labels(remote) == ["v1.1"]


def test_object_that_was_changed_is_passed_over_for_the_checkpoint_before(
    url: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    remote = upload(url, tmp_path / "a", 1, 2)
    RemoteFolder(url, "test").write(b"tensors of v9.9", "step-000002-epoch-1/__0_0.distcp")
    fetched = remote.fetch_newest(tmp_path / "b", newer_than=None)
    assert fetched == tmp_path / "b" / "step-000001"
    assert [path.name for path in fetched.parent.iterdir()] == ["step-000001"]
    assert "__0_0.distcp is not as it was uploaded" in caplog.text


def test_removed_checkpoint_leaves_no_object(url: str, tmp_path: Path):
    remote = upload(url, tmp_path / "a", 1, 2)
    remote.remove(remote.known()[0])
    assert labels(remote) == ["v1.2"]
    assert {one.name.partition("/")[0] for one in RemoteFolder(url, "test").files()} == {
        "step-000002-epoch-1"
    }
