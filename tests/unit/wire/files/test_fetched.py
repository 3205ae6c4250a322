"""A copy is whole or not there."""

import errno
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import fsspec
import pytest

from slipstream.wire.errors import ConfigError
from slipstream.wire.files.fetched import Fetch, default_cache, fetched_file
from slipstream.wire.files.remote import RemoteFolder
from slipstream.wire.settings.sections import RunSection, model_folder
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
