"""Processes that are killed, servers that are away, keys that are refused, disks that are full."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.request import Request, urlopen

import pytest

from slipstream.wire.errors import ConfigError
from slipstream.wire.files.fetched import Fetch, fetched_file
from slipstream.wire.files.remote import RemoteFolder, StorageError
from slipstream.wire.files.remote_checkpoints import RemoteCheckpoints
from slipstream.wire.messages.versions import PolicyVersion
from tests.support.checkpoint_infos import saved_checkpoint
from tests.support.stores import BUCKET, s3_server, variables_set
from tests.support.tiny_run import ROOT
from tests.support.waiting import HANG_S

pytestmark = pytest.mark.integration
KILLED_AFTER = """
import os, signal, sys
from pathlib import Path
from fsspec.core import url_to_fs
from slipstream.wire.files.checkpoints import read_checkpoint_info
from slipstream.wire.files.fetched import Fetch, fetched_file
from slipstream.wire.files.remote_checkpoints import RemoteCheckpoints

what, url, path, count = sys.argv[1:]
driver = url_to_fs(url, **({"auto_mkdir": True} if url.startswith("file") else {}))[0]
name = {"upload": "put_file", "remove": "rm_file", "fetch": "get"}[what]
request, left = getattr(driver, name), int(count)

def killing(*arguments, **options):
    global left
    if left == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    left -= 1
    request(*arguments, **options)
    if what == "fetch":  # in the middle of it, as far as the disk shows
        (target,) = arguments[1]
        os.truncate(target, 3)
        os.kill(os.getpid(), signal.SIGKILL)

setattr(driver, name, killing)
remote = RemoteCheckpoints(url)
if what == "upload":
    remote.upload(Path(path), read_checkpoint_info(Path(path)), None)
elif what == "remove":
    remote.remove(remote.known()[0])
else:
    fetched_file(Fetch(url, "data.file", Path(path)))
"""


@pytest.fixture
def s3() -> Iterator[dict[str, str]]:
    with s3_server() as variables:
        yield variables


@pytest.fixture(params=["file", "s3"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "s3":
        request.getfixturevalue("s3")
        return f"{BUCKET}/remote"
    return f"file://{tmp_path}/remote"


def killed(what: str, url: str, path: Path, count: int) -> None:
    done = subprocess.run(
        [sys.executable, "-c", KILLED_AFTER, what, url, str(path), str(count)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        timeout=HANG_S,
    )
    assert done.returncode == -signal.SIGKILL, done.stderr


def labels(url: str) -> list[str]:
    return [one.version.label for one in RemoteCheckpoints(url).known()]


@pytest.mark.parametrize("count", [0, 2, 3])
def test_upload_that_is_killed_leaves_no_checkpoint_and_the_next_one_completes_it(
    tmp_path: Path, url: str, count: int
):
    remote = RemoteCheckpoints(url)
    remote.upload(*saved_checkpoint(tmp_path / "a", PolicyVersion(1, 1)), None)
    path, info = saved_checkpoint(tmp_path / "a", PolicyVersion(1, 2))
    killed("upload", url, path, count)
    assert labels(url) == ["v1.1"]
    remote.upload(path, info, None)
    assert labels(url) == ["v1.1", "v1.2"]
    fetched = remote.fetch_newest(tmp_path / "b", newer_than=None)
    assert fetched is not None
    assert (fetched / "__0_0.distcp").read_bytes() == b"tensors of v1.2"


@pytest.mark.parametrize("count", [1, 3])
def test_removal_that_is_killed_leaves_no_half_of_a_checkpoint(
    tmp_path: Path, url: str, count: int
):
    remote = RemoteCheckpoints(url)
    for step in (1, 2):
        remote.upload(*saved_checkpoint(tmp_path / "a", PolicyVersion(1, step)), None)
    killed("remove", url, tmp_path, count)
    assert labels(url) == ["v1.2"]


def test_fetch_that_is_killed_leaves_no_copy_and_the_next_one_makes_it(tmp_path: Path, url: str):
    RemoteFolder(url, "test").write(b"rows" * 1000, "train.jsonl")
    cache = tmp_path / "cache"
    killed("fetch", f"{url}/train.jsonl", cache, 1)
    (left,) = (path for path in cache.iterdir() if path.is_dir())
    assert left.name.endswith(".unfinished")
    copy = fetched_file(Fetch(f"{url}/train.jsonl", "data.file", cache))
    assert copy.read_bytes() == b"rows" * 1000
    assert [path for path in cache.iterdir() if path.is_dir()] == [copy.parent]


def test_server_that_is_away_is_one_line(tmp_path: Path):
    with s3_server() as variables:
        pass
    with (
        variables_set(variables),
        pytest.raises(ConfigError, match=r"cannot list s3://bucket/a \(data\.file\)") as caught,
    ):
        fetched_file(Fetch("s3://bucket/a", "data.file", tmp_path))
    assert len(str(caught.value).splitlines()) == 1


@contextmanager
def asking_for_keys(address: str) -> Iterator[None]:
    """Have the server refuse requests without a key that it knows."""

    def after(requests: bytes) -> None:
        headers = {"Content-Type": "text/plain"}
        with urlopen(Request(address, data=requests, headers=headers)):  # noqa: S310
            pass

    after(b"0")
    try:
        yield
    finally:
        after(b"inf")


@pytest.mark.parametrize("key", ["another", ""])
def test_key_that_is_refused_or_missing_is_one_line_without_it(s3: dict[str, str], key: str):
    RemoteFolder(BUCKET, "test").write(b"rows", "train.jsonl")
    secret = "S3CRET" if key else ""
    with (
        asking_for_keys(f"{s3['AWS_ENDPOINT_URL']}/moto-api/reset-auth"),
        variables_set(
            {
                "AWS_ACCESS_KEY_ID": key,
                "AWS_SECRET_ACCESS_KEY": secret,
                "AWS_EC2_METADATA_DISABLED": "true",
            }
        ),
        pytest.raises(StorageError, match=r"cannot list s3://bucket/train") as caught,
    ):
        RemoteFolder(f"{BUCKET}/train.jsonl", "data.file").files()
    text = str(caught.value)
    assert "(data.file)" in text
    assert "S3CRET" not in text
    assert "another" not in text
    assert len(text.splitlines()) == 1


@pytest.mark.skipif(os.geteuid() != 0, reason="mounts a small disk")
def test_cache_on_a_full_disk_is_one_line_and_leaves_no_copy(tmp_path: Path):
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(disk)]
    if subprocess.run(mount, check=False, capture_output=True).returncode:
        pytest.skip("this container may not mount a disk")
    try:
        (tmp_path / "train.jsonl").write_bytes(bytes(2 << 20))
        with pytest.raises(ConfigError, match=r"No space left on device.*run\.cache_dir"):
            fetched_file(Fetch(f"file://{tmp_path}/train.jsonl", "data.file", disk))
        assert [path for path in disk.iterdir() if path.is_dir()] == []
    finally:
        subprocess.run(["umount", str(disk)], check=True)
