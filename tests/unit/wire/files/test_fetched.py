"""A copy is whole or not there."""

import errno
import os
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import fsspec
import huggingface_hub.constants
import pytest

from slipstream.wire.errors import ConfigError
from slipstream.wire.files.fetched import (
    Fetch,
    content_hash,
    default_cache,
    fetched_file,
    hub_model,
    is_hub_name,
)
from slipstream.wire.files.remote import RemoteFolder
from slipstream.wire.settings.sections import RunSection, local_model, model_folder
from tests.support.faulty_store import FaultyStore, faulty_folder
from tests.support.waiting import HANG_S, until

ROWS = b"rows" * 1000


@pytest.fixture
def url() -> Iterator[str]:
    with faulty_folder() as folder:
        RemoteFolder(folder, "test").write(ROWS, "train.jsonl")
        yield f"{folder}/train.jsonl"


def fetch(url: str, cache: Path) -> Path:
    fetched_file.cache_clear()
    return fetched_file(Fetch(url, "data.file", cache))


def copies(cache: Path) -> list[str]:
    return [path.name for path in cache.iterdir() if path.is_dir()]


def is_waiting_for_a_lock() -> bool:
    lines = Path("/proc/locks").read_text().splitlines()
    return any("->" in line and str(os.getpid()) in line.split() for line in lines)


def does(action: Callable[[str], object]) -> None:
    FaultyStore.before_get = staticmethod(action)


@pytest.mark.parametrize(
    ("arrives", "why"),
    [
        (ROWS[:7], r"train.jsonl.* came with 7 bytes, expected 4000"),
        (b"size" * 1000, "changed while it was fetched"),
    ],
    ids=["in part", "changed"],
)
def test_object_that_arrives_in_part_or_changes_is_no_copy(
    url: str, tmp_path: Path, arrives: bytes, why: str
):
    does(lambda path: fsspec.filesystem("faulty").pipe_file(path, arrives))
    with pytest.raises(ConfigError, match=why):
        fetch(url, tmp_path)
    assert copies(tmp_path) == []


@pytest.mark.parametrize(
    ("error", "why"),
    [
        (
            OSError(errno.ENOSPC, "No space left on device", "x"),
            r"No space left on device: .*run\.cache_dir",
        ),
        (PermissionError("Forbidden"), r"train\.jsonl \(data\.file\): PermissionError: Forbidden"),
        (
            OSError('no answer of "https://me:S3CRET@host:1/b?sig=S3CRET" in time\nS3CRET'),
            r'OSError: no answer of "https://host:1/b" in time$',
        ),
    ],
    ids=["full disk", "failure of the store", "user and query in the address"],
)
def test_failure_names_its_setting_and_shows_no_secret(
    url: str, tmp_path: Path, error: OSError, why: str
):
    def fail(_path: str) -> None:
        raise error

    does(fail)
    with pytest.raises(ConfigError, match=why):
        fetch(url, tmp_path)
    assert copies(tmp_path) == []


def test_two_processes_at_once_fetch_once(url: str, tmp_path: Path):
    fetches: list[str] = []
    second = threading.Thread(target=lambda: results.append(fetch(url, tmp_path)))
    results: list[Path] = []

    def count(path: str) -> None:
        fetches.append(path)
        if len(fetches) == 1:
            second.start()
            until(is_waiting_for_a_lock, "the other to wait")

    does(count)
    results.append(fetch(url, tmp_path))
    second.join(HANG_S)
    assert len(fetches) == 1
    assert results[0] == results[1]
    assert results[0].read_bytes() == ROWS


def test_process_that_is_killed_leaves_no_copy_and_the_next_one_makes_it(tmp_path: Path):
    source = tmp_path / "remote" / "train.jsonl"
    source.parent.mkdir()
    source.write_bytes(ROWS)
    cache = tmp_path / "cache"
    copy = fetch(f"file://{source}", cache)
    whole = copy.parent
    whole.rename(cache / f".{whole.name}.unfinished")  # as a process that was killed leaves it
    (cache / f".{whole.name}.unfinished" / "train.jsonl").write_bytes(b"half")
    assert fetch(f"file://{source}", cache) == copy
    assert copy.read_bytes() == ROWS
    assert copies(cache) == [whole.name]


def test_run_section_fetches_a_model_by_url_for_its_checks_without_weights(tmp_path: Path):
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors").write_text("weights")
    run = RunSection(model=f"file://{folder}", cache_dir=str(tmp_path / "cache"))
    assert [path.name for path in model_folder(run).iterdir()] == ["config.json"]
    whole = model_folder(run, with_weights=True)
    assert sorted(path.name for path in whole.iterdir()) == ["config.json", "model.safetensors"]


POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 988097824\n"
INDEX = "model.safetensors.index.json"


@pytest.mark.parametrize(
    ("files", "why"),
    [
        ({"params.json": ""}, r"no config\.json in URL: .*hf download NAME"),
        ({"adapter_config.json": "{}"}, r"no config\.json in URL: .* by lora\.adapter"),
        ({"model-q4_k_m.gguf": ""}, r"no config\.json in URL: .*that they were made from"),
        ({"config.json": "{}", "model.gguf": ""}, r"URL holds neither .*were made from"),
        ({"config.json": "{}", "pytorch_model.bin": ""}, r"URL holds neither .*save_pretrained's"),
        ({"config.json": "{}", "original/a.pth": ""}, r"URL holds neither \S+ nor \S+"),
        (
            {"config.json": "{}", "model-00001-of-00002.safetensors": ""},
            r"URL holds neither .*weights under other names are not read: fetch",
        ),
        ({"config.json": "{}", INDEX: "[]"}, rf"URL/{INDEX}: "),
        (
            {"config.json": "{}", INDEX: '{"weight_map": {"a": "a.safetensors"}}'},
            rf"URL/{INDEX} names 'a\.safetensors', which is no file beside it: fetch",
        ),
        (
            {"config.json": "{}", "model.safetensors": POINTER},
            r"URL/model\.safetensors is a pointer",
        ),
        (
            {"config.json": "{}", "tokenizer.json": POINTER, "model.safetensors": ""},
            r"URL/tokenizer\.json is a pointer of Git LFS.*hf download NAME --local-dir DIR",
        ),
    ],
)
def test_a_url_of_no_model_is_refused_with_the_way_to_one(
    tmp_path: Path, files: dict[str, str], why: str
):
    """Some were taken without their weights, and others refused without the way out."""
    url, cache = f"file://{tmp_path}/there", tmp_path / "cache"
    for name, text in files.items():
        path = tmp_path / "there" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    run = RunSection(model=url, cache_dir=str(cache))
    with pytest.raises(ConfigError, match=rf"^{why.replace('URL', url)}.* \(run\.model\)$"):
        model_folder(run, with_weights=True)
    assert not cache.exists() or copies(cache) == []


def test_default_cache_is_where_users_keep_caches(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("XDG_CACHE_HOME", "/large/disk")
    assert default_cache() == Path("/large/disk/slipstream")


@pytest.mark.parametrize("expected", ["..", "/etc", "0" * 31, "0" * 32 + "\n"])
def test_hash_that_is_none_leads_to_no_folder(url: str, tmp_path: Path, expected: str):
    fetched_file.cache_clear()
    with pytest.raises(ConfigError, match=r"run\.contents: .* must be 32 hexadecimal digits"):
        fetched_file(Fetch(url, "data.file", tmp_path, expected))


def test_lock_that_is_a_link_empties_no_file(url: str, tmp_path: Path):
    copy = fetch(url, tmp_path / "first").parent
    other = tmp_path / "other"
    other.write_text("kept")
    cache = tmp_path / "second"
    cache.mkdir()
    (cache / f".{copy.name}.lock").symlink_to(other)
    with pytest.raises(ConfigError, match=r"symbolic links.*\.lock \(run\.cache_dir\)"):
        fetch(url, cache)
    assert other.read_text() == "kept"


@pytest.mark.parametrize("url", ["dir:///x", "reference://x", "zip://."])
def test_driver_that_cannot_be_made_names_the_setting(url: str):
    with pytest.raises(ConfigError, match=r"data\.file = \S+ (cannot be used|names no place)"):
        RemoteFolder(url, "data.file")


COMMIT = "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Yield the cache of a hub that cannot be asked, as its library lays it out."""
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.chdir(tmp_path)
    hub_model.cache_clear()
    yield tmp_path / "hub"
    hub_model.cache_clear()


def cached(hub: Path, name: str, commit: str, *, newest: bool = True) -> Path:
    """Lay out a model of the hub in its cache."""
    folder = hub / f"models--{name.replace('/', '--')}"
    snapshot = folder / "snapshots" / commit
    snapshot.mkdir(parents=True)
    (folder / "blobs").mkdir(exist_ok=True)
    for file in ("config.json", "tokenizer.json", "model.safetensors"):
        blob = folder / "blobs" / f"{commit[:4]}-{file}"
        blob.write_text("{}")
        (snapshot / file).symlink_to(Path("../../blobs") / blob.name)
    if newest:
        (folder / "refs").mkdir(exist_ok=True)
        (folder / "refs" / "main").write_text(commit)
    return snapshot


def test_a_name_of_the_hub_is_no_path_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    named = ("Qwen/Qwen3-0.6B", "deepseek-ai/DeepSeek-V3.1", "org/a_b")
    others = ("model", "/org/a", "./a", "../a", "a/b/c", "s3://a/b", "~/a", "a/..", "a\\b/c", "")
    assert [is_hub_name(text) for text in (*named, *others)] == [True] * 3 + [False] * len(others)
    (tmp_path / "org" / "a_b").mkdir(parents=True)
    (tmp_path / "org" / "gone").symlink_to("nowhere")
    assert not is_hub_name("org/a_b")
    assert not is_hub_name("org/gone")


def test_a_model_of_the_hub_is_its_newest_snapshot_in_the_cache(hub: Path):
    snapshot = cached(hub, "org/Tiny-1.5B", COMMIT)
    cached(hub, "org/Tiny-1.5B", "f" * 40, newest=False)
    run = RunSection(model="org/Tiny-1.5B")
    assert model_folder(run) == model_folder(run, with_weights=True) == snapshot
    # So that all roles take the same one, and a resumed run takes it again.
    assert content_hash("org/Tiny-1.5B", "run.model", is_model=True) == COMMIT


def test_the_commit_that_a_run_began_with_stays(hub: Path):
    snapshot = cached(hub, "org/tiny", "f" * 40, newest=False)
    cached(hub, "org/tiny", COMMIT)
    run = RunSection(model="org/tiny", contents={"org/tiny": "f" * 40})
    assert model_folder(run) == snapshot
    Path("org/tiny").mkdir(parents=True)  # appears beside the run
    assert model_folder(run, with_weights=True) == snapshot


@pytest.mark.parametrize("contents", [{}, {"org/tiny": COMMIT}], ids=["newest", "a commit"])
def test_a_model_that_is_nowhere_is_refused(hub: Path, contents: dict[str, str]):
    cached(hub, "org/other", COMMIT)
    why = r"org/tiny is no folder here, and .* neither in its cache .*HF_HUB_OFFLINE.*run\.model"
    with pytest.raises(ConfigError, match=why):
        model_folder(RunSection(model="org/tiny", contents=contents))


def test_what_the_cache_has_of_a_model_is_named(hub: Path):
    """A broken index was said to be a model that is nowhere."""
    snapshot = cached(hub, "org/tiny", COMMIT)
    (snapshot / "model.safetensors").unlink()
    run = RunSection(model="org/tiny")
    assert model_folder(run) == snapshot
    why = r"^org/tiny holds neither .* \(run\.model, cached: .*offline"
    with pytest.raises(ConfigError, match=why):
        model_folder(run, with_weights=True)
    (snapshot / INDEX).write_text("[]")
    with pytest.raises(ConfigError, match=rf"^org/tiny/{INDEX}: .* \(run\.model, cached: "):
        model_folder(run, with_weights=True)


def test_a_policy_beside_the_trained_one_may_be_a_model_of_the_hub(hub: Path):
    snapshot = cached(hub, "org/teacher", "f" * 40, newest=False)
    run = RunSection(model="org/tiny", contents={"org/teacher": "f" * 40})
    assert local_model(run, "org/teacher", "algo.teacher.model", with_weights=True) == snapshot
    with pytest.raises(ConfigError, match=r"org/other is no folder .*\(algo\.teacher\.model\)"):
        local_model(run, "org/other", "algo.teacher.model")


def test_a_snapshot_that_is_named_by_its_folder_is_taken(hub: Path):
    snapshot = cached(hub, "org/tiny", COMMIT)
    assert model_folder(RunSection(model=str(snapshot))) == snapshot
    with pytest.raises(ConfigError, match=r"name a folder in its snapshots/"):
        model_folder(RunSection(model=str(snapshot.parents[1])))


def test_a_tokenizer_that_no_library_is_here_for_is_refused_by_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    folder = tmp_path / "model"
    folder.mkdir()
    for name in ("config.json", "tokenizer_config.json", "tokenizer.model"):
        (folder / name).write_text("{}")
    monkeypatch.setitem(sys.modules, "sentencepiece", None)
    run = RunSection(model=str(folder), cache_dir=str(tmp_path / "cache"))
    why = r"no tokenizer\.json, and sentencepiece .*tokenizer\.model .*'slipstream\[conversion\]'"
    with pytest.raises(ConfigError, match=rf"{why} \(run\.model\)"):
        model_folder(run)
    assert copies(tmp_path / "cache") == []


@pytest.mark.parametrize("beside", [(), ("vocab.json",)], ids=["nothing", "half of one"])
def test_a_folder_with_a_tokenizer_or_without_any_stays_where_it_is(
    tmp_path: Path, beside: tuple[str, ...]
):
    for name in ("config.json", *beside):
        (tmp_path / name).write_text("{}")
    run = RunSection(model=str(tmp_path), cache_dir=str(tmp_path / "cache"))
    assert model_folder(run) == tmp_path
    for name in ("tokenizer.json", "tokenizer.model"):
        (tmp_path / name).write_text("{}")
    assert model_folder(run) == tmp_path
    assert not (tmp_path / "cache").exists()
