"""Objects in remote storage by fsspec URL (s3://, gs://, file://, ...); the home of fsspec.

Credentials and endpoints are the driver's business: its environment variables and files. Every
request is bounded and repeated by the driver.
"""

import errno
import logging
import re
import threading
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slipstream.wire.errors import ConfigError, SlipstreamError
from slipstream.wire.redaction import without_secrets

_log = logging.getLogger(__name__)
_PROGRESS_S = 10.0
_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://")
_AUTHORITY = re.compile(r"[^@:]*(:[0-9]+)?")  # a bucket, or a host with a port
_CHECKSUMS = ("ETag", "md5Hash", "etag", "checksum")  # names used by drivers
_TIMES = ("mtime", "LastModified", "last_modified", "updated", "created")
_DISK_FULL = {errno.ENOSPC, errno.EDQUOT}  # a disk of this host, not the store
_SHOWN_CHARACTERS = 300  # length of a driver's error


class StorageError(SlipstreamError):
    """Remote storage failed or refused a request, or holds something else than it should."""


def is_url(text: str) -> bool:
    """True if a setting names an object by URL, not a path."""
    return _SCHEME.match(text) is not None


@dataclass(frozen=True, slots=True, order=True)
class RemoteFile:
    """One object, as its store lists it."""

    name: str  # below the folder, parts separated by /; empty: the URL is that of an object
    size: int  # bytes
    content: str  # checksum of the store's own, or else a time: another one for other content


class RemoteFolder:
    """The objects under one URL."""

    def __init__(self, url: str, setting: str) -> None:
        """Find the driver of a folder, or of a single object to read; nothing is requested yet.

        Raises:
            ConfigError: it may hold a secret, or there is no driver for it.
        """
        self.url = url.rstrip("/")
        self.setting = setting
        refuse_unusable(url, setting)
        try:
            from fsspec.core import url_to_fs

            options = {"auto_mkdir": True} if url.startswith(("file://", "local://")) else {}
            self._fs, path = url_to_fs(self.url, **options)
        except ImportError as error:
            raise ConfigError(
                f"{setting} = {url} needs a driver: pip install 'slipstream[storage]' ({error})"
            ) from error
        except Exception as error:  # drivers raise whatever their libraries do
            reason = without_secrets(str(error))
            raise ConfigError(f"{setting} = {url} cannot be used: {reason}") from error
        self._path: str = path.rstrip("/")

    def files(self) -> list[RemoteFile]:
        """Return what is there, by name; nothing if the folder does not exist.

        Raises:
            StorageError: it cannot be listed, or an object's name leads out of the folder, or one
                is a link.
        """
        with self._requesting("list"):
            self._fs.invalidate_cache()
            found: dict[str, dict[str, Any]] = self._fs.find(self._path, withdirs=True, detail=True)
        files = []
        for path, info in found.items():
            name = self._name(path)
            if info.get("islink"):
                raise StorageError(f"{self.url}: {name} is a link: put the file there instead")
            if info["type"] == "file":
                files.append(RemoteFile(name, int(info["size"] or 0), self._content(path, info)))
        return sorted(files)

    def fetch(self, targets: Mapping[str, Path], *, total: int) -> None:
        """Download objects to local paths, several at a time where the driver can.

        Raises:
            StorageError: one could not be downloaded.
            OSError: the disk is full.
        """
        for path in targets.values():
            path.parent.mkdir(parents=True, exist_ok=True)
        with self._requesting("download"), _progress(self.url, targets.values(), total):
            self._fs.get([self._at(name) for name in targets], list(map(str, targets.values())))

    def read(self, name: str) -> bytes:
        """Return the content of a small object.

        Raises:
            StorageError: it cannot be read.
        """
        with self._requesting("read", name):
            data: bytes = self._fs.cat_file(self._at(name))
            return data

    def put(self, path: Path, name: str) -> None:
        """Upload a file.

        Raises:
            StorageError: it could not be uploaded.
        """
        with self._requesting("write", name):
            self._fs.put_file(str(path), self._at(name))

    def write(self, data: bytes, name: str) -> None:
        """Write a small object.

        Raises:
            StorageError: it could not be written.
        """
        with self._requesting("write", name):
            self._fs.pipe_file(self._at(name), data)

    def remove(self, name: str) -> None:
        """Remove an object.

        Raises:
            StorageError: it could not be removed.
        """
        with self._requesting("remove", name):
            self._fs.rm_file(self._at(name))

    def _at(self, name: str) -> str:
        return f"{self._path}/{name}" if name else self._path

    def _name(self, path: str) -> str:
        if path == self._path:
            return ""
        inside, name = path[: len(self._path) + 1], path[len(self._path) + 1 :].rstrip("/")
        parts = name.split("/")
        if (
            inside != f"{self._path}/"
            or any(part in {"", ".", ".."} for part in parts)
            or not name.isprintable()
            or "\\" in name
        ):
            raise StorageError(f"{self.url}: the object {path!r:.200} has a name that is refused")
        return name

    def _content(self, path: str, info: Mapping[str, Any]) -> str:
        for key in (*_CHECKSUMS, *_TIMES):
            if info.get(key):
                return str(info[key]).strip('"')
        with self._requesting("read", path):
            return str(self._fs.ukey(path))

    @contextmanager
    def _requesting(self, what: str, name: str = "") -> Iterator[None]:
        where = f"{self.url}/{name}" if name else self.url
        try:
            yield
        except Exception as error:  # drivers raise whatever their libraries do
            if isinstance(error, OSError) and error.errno in _DISK_FULL:
                raise
            line = without_secrets((str(error).splitlines() or [""])[0])
            reason = f"{type(error).__name__}: {line[:_SHOWN_CHARACTERS]}"
            raise StorageError(f"cannot {what} {where} ({self.setting}): {reason}") from error


@contextmanager
def _progress(url: str, targets: Collection[Path], total: int) -> Iterator[None]:
    """Log how much of a download has arrived, every ten seconds."""
    ended = threading.Event()

    def report() -> None:
        while not ended.wait(_PROGRESS_S):
            size = sum(path.stat().st_size for path in targets if path.exists())
            _log.info("fetching %s: %d of %d MB", url, size // 10**6, total // 10**6)

    thread = threading.Thread(target=report, name="progress", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def refuse_unusable(url: str, setting: str) -> None:
    """Refuse a URL of an unknown kind, or one that may hold a secret.

    Raises:
        ConfigError: naming the setting, but not the secret.
    """
    scheme = _SCHEME.match(url)
    if scheme is None or "::" in url or not url.isprintable():
        raise ConfigError(f"{setting} must be one URL, SCHEME://PATH, such as s3://BUCKET/PATH")
    rest = url[scheme.end() :]
    if not _AUTHORITY.fullmatch(rest.partition("/")[0]) or "?" in rest or "#" in rest:
        raise ConfigError(
            f"{setting} = {scheme[0]}... must not hold a user, a password or a query: settings are "
            "written down; credentials are the driver's, in its environment variables or files"
        )
    if any(part in {".", ".."} for part in rest.split("/")) or not rest.strip("/"):
        raise ConfigError(f"{setting} = {url} names no place: a path without . and .. is needed")
