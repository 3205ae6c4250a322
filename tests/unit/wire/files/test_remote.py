"""URLs and object names that are refused."""

from importlib.util import find_spec
from pathlib import Path

import fsspec
import pytest
from fsspec.spec import AbstractFileSystem

from slipstream.wire.errors import ConfigError
from slipstream.wire.files.remote import RemoteFolder, StorageError, is_url, refuse_unusable


def test_a_path_is_no_url():
    assert [is_url(text) for text in ("/m", "a/b", "C:\\m", "s3:/b", "", "file.jsonl")] == [
        False
    ] * 6
    assert is_url("s3://bucket/model")
    assert is_url("file:///m")


@pytest.mark.parametrize(
    ("url", "why"),
    [
        ("s3://key:S3CRET@bucket/model", "must not hold a user"),
        ("s3://S3CRET@bucket/model", "must not hold a user"),
        ("https://host/train.jsonl?X-Amz-Signature=S3CRET", "must not hold a user"),
        ("https://host/train.jsonl#S3CRET", "must not hold a user"),
        ("s3://key:S3/CRET@bucket/model", "must not hold a user"),
        ("zip://train.jsonl::https://user:S3CRET@host/a.zip", "one URL"),
        ("user:S3CRET@host/model", "one URL"),
        ("s3://bucket/a\nb", "one URL"),
        ("s3://bucket/../other", "names no place"),
        ("s3://", "names no place"),
        ("nosuch://bucket/model", "Protocol not known: nosuch"),
        ("gs://bucket/model", r"pip install 'slipstream\[storage\]'"),
    ],
)
def test_url_is_refused_with_its_setting_and_without_its_secret(url: str, why: str):
    if url.startswith("gs:") and find_spec("gcsfs") is not None:
        pytest.skip("its driver is installed")
    with pytest.raises(ConfigError, match=why) as caught:
        RemoteFolder(url, "run.model")
    assert "run.model" in str(caught.value)
    assert "CRET" not in str(caught.value)


class _Leaky(AbstractFileSystem):
    """A driver whose errors hold what it was given."""

    protocol = "leaky"

    def cat_file(self, path: str, **_: object) -> bytes:
        raise PermissionError(f"{path} of https://a:S3CRET@b/?c=S3CRET: SecretKey=S3CRET, region=d")


def test_a_drivers_error_is_shown_without_the_secrets_in_it():
    fsspec.register_implementation("leaky", _Leaky, clobber=True)
    with pytest.raises(StorageError) as caught:
        RemoteFolder("leaky://bucket", "run.model").read("x")
    assert str(caught.value) == (
        "cannot read leaky://bucket/x (run.model): PermissionError: bucket/x of "
        "https://b/ SecretKey=***, region=d"
    )


def test_port_and_at_sign_in_a_path_are_no_secret():
    for url in ("https://host:8080/a", "s3://bucket/a@b", "file:///a:b"):
        refuse_unusable(url, "run.model")


@pytest.mark.parametrize("name", ["../evil", "a/../../evil", "a/./b", "a//b", "a\\..\\b", "a\nb"])
def test_object_whose_name_leads_elsewhere_is_refused(name: str):
    store = fsspec.filesystem("memory").store
    path = f"/names/{name}"
    store[path] = fsspec.filesystem("memory").open("/scratch", "wb")
    store[path].path = path
    try:
        with pytest.raises(StorageError, match="has a name that is refused"):
            RemoteFolder("memory://names", "run.model").files()
    finally:
        del store[path]


def test_link_to_a_file_or_a_folder_is_refused(tmp_path: Path):
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "secret").write_text("of this host")
    for name, to in (("config.json", "elsewhere/secret"), ("below", "elsewhere")):
        folder = tmp_path / f"model of {name}"
        folder.mkdir()
        (folder / name).symlink_to(tmp_path / to)
        with pytest.raises(StorageError, match=f"{name} is a link"):
            RemoteFolder(f"file://{folder}", "run.model").files()
