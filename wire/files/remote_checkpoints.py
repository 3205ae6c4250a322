"""Checkpoints in remote storage.

URL/step-000040-epoch-3/ holds the files of a checkpoint, each an object, and ``manifest.json``,
which is written last and removed first: without it there is no checkpoint. It has the names, sizes
and SHA-256 of the objects, and the info that checkpoint.json holds in a run folder.
"""

import hashlib
import logging
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path, PurePath

import msgspec

from slipstream.wire.errors import ConfigError
from slipstream.wire.files.checkpoints import (
    FORMAT_REVISION,
    INFO_FILE,
    CheckpointInfo,
    checkpoint_name,
    encode_info,
    read_checkpoint_info,
)
from slipstream.wire.files.remote import RemoteFolder, StorageError
from slipstream.wire.files.replace import is_unfinished, replacing_folder
from slipstream.wire.messages.versions import PolicyVersion
from slipstream.wire.unreadable import UNREADABLE

_log = logging.getLogger(__name__)
MANIFEST = "manifest.json"
_MAX_MANIFEST_BYTES = 1 << 24


class RemoteObject(msgspec.Struct, frozen=True, kw_only=True):
    """One file of a checkpoint."""

    name: str
    size: int  # bytes
    sha256: str


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    """Content of manifest.json."""

    info: CheckpointInfo
    objects: tuple[RemoteObject, ...]

    def __post_init__(self) -> None:
        """Refuse what cannot be a checkpoint of ours; ValueError says why."""
        if self.info.format_revision != FORMAT_REVISION:
            raise ValueError(f"checkpoint format {self.info.format_revision}")
        if not self.objects:
            raise ValueError("it names no file")
        for name in [item.name for item in self.objects]:
            if PurePath(name).name != name or name in {"", "..", INFO_FILE} or "\0" in name:
                raise ValueError(f"it names {name!r:.200}, which is no file of a checkpoint")

    @property
    def version(self) -> PolicyVersion:
        """Of the weights."""
        return self.info.version

    @property
    def folder(self) -> str:
        """Name of its folder."""
        return f"{checkpoint_name(self.info.step)}-epoch-{self.info.version.epoch}"


class RemoteCheckpoints:
    """All checkpoints of one run under a URL. One process writes there at a time."""

    def __init__(self, url: str, setting: str = "checkpoint.upload") -> None:
        """Find the driver; nothing is requested yet.

        Raises:
            ConfigError: the URL cannot be used.
        """
        self.url = url
        self._remote = RemoteFolder(url, setting)

    def known(self) -> list[Manifest]:
        """Return the complete checkpoints, the newest last; others are logged and left out.

        Raises:
            StorageError: they cannot be listed or read.
        """
        sizes = {file.name: file.size for file in self._remote.files()}
        found = []
        for name in sizes:
            folder, _, file = name.rpartition("/")
            if file != MANIFEST or "/" in folder:
                continue
            try:
                found.append(self._read(folder, sizes))
            except (ValueError, *UNREADABLE) as error:
                _log.error("%s/%s is passed over: %s", self.url, folder, error)
        return sorted(found, key=lambda manifest: manifest.version)

    def _read(self, folder: str, sizes: Mapping[str, int]) -> Manifest:
        name = f"{folder}/{MANIFEST}"
        if sizes[name] > _MAX_MANIFEST_BYTES:
            raise ValueError(f"{MANIFEST} has {sizes[name]} bytes")
        manifest = msgspec.json.decode(self._remote.read(name), type=Manifest)
        if folder != manifest.folder:
            raise ValueError(f"{MANIFEST} is that of {manifest.folder}")
        for item in manifest.objects:
            size = sizes.get(f"{folder}/{item.name}")
            if size != item.size:
                raise ValueError(f"{item.name} has {size} bytes, expected {item.size}")
        return manifest

    def upload(self, checkpoint: Path, info: CheckpointInfo, known: Manifest | None) -> Manifest:
        """Upload a checkpoint that is complete; one that is there already is not sent again.

        ``known`` is the manifest of this version, if there is one. Files of the checkpoint may be
        removed or replaced meanwhile.

        Raises:
            StorageError: it is not there in whole.
            OSError: its files cannot be read.
        """
        if known is not None and known.info.saved_at == info.saved_at:
            if known.info != info:
                known = msgspec.structs.replace(known, info=info)
                self._write(known)
            return known
        if known is not None:
            self.remove(known)
        with _held(checkpoint) as held:
            if read_checkpoint_info(held).saved_at != info.saved_at:
                raise StorageError(f"{checkpoint} was replaced while it was uploaded")
            names = {path.name for path in held.iterdir()} - {INFO_FILE}
            files = [held / name for name in sorted(names) if not is_unfinished(name)]
            manifest = Manifest(info=info, objects=tuple(map(_described, files)))
            for path in files:
                self._remote.put(path, f"{manifest.folder}/{path.name}")
        sizes = {file.name: file.size for file in self._remote.files()}
        for item in manifest.objects:
            if (size := sizes.get(f"{manifest.folder}/{item.name}")) != item.size:
                where = f"{self.url}/{manifest.folder}/{item.name}"
                raise StorageError(f"{where} has {size} bytes, expected {item.size}")
        self._write(manifest)
        return manifest

    def _write(self, manifest: Manifest) -> None:
        data = msgspec.json.format(msgspec.json.encode(manifest))
        self._remote.write(data, f"{manifest.folder}/{MANIFEST}")

    def remove(self, manifest: Manifest) -> None:
        """Remove a checkpoint: the manifest, then the objects that it names, and nothing else.

        Raises:
            StorageError: a part of it is still there.
        """
        for name in (MANIFEST, *(item.name for item in manifest.objects)):
            self._remote.remove(f"{manifest.folder}/{name}")

    def fetch(self, manifest: Manifest, checkpoints: Path) -> Path:
        """Download a checkpoint into RUN/checkpoints and return its folder there.

        One of that step is replaced.

        Raises:
            StorageError: it cannot be downloaded, or is not as it was uploaded.
            OSError: it cannot be written.
        """
        final = checkpoints / checkpoint_name(manifest.info.step)
        with replacing_folder(final) as unfinished:
            names = [item.name for item in manifest.objects]
            self._remote.fetch(
                {f"{manifest.folder}/{name}": unfinished / name for name in names},
                total=sum(item.size for item in manifest.objects),
            )
            for item in manifest.objects:
                if _described(unfinished / item.name) != item:
                    raise StorageError(
                        f"{self.url}/{manifest.folder}/{item.name} is not as it was uploaded"
                    )
            (unfinished / INFO_FILE).write_bytes(encode_info(manifest.info))
        return final

    def fetch_newest(self, checkpoints: Path, *, newer_than: PolicyVersion | None) -> Path | None:
        """Download the newest checkpoint that is whole; None if none is newer than a version.

        Raises:
            StorageError: they cannot be listed.
            OSError: it cannot be written.
        """
        for manifest in reversed(self.known()):
            if newer_than is not None and manifest.version <= newer_than:
                return None
            _log.info("fetching %s/%s", self.url, manifest.folder)
            try:
                return self.fetch(manifest, checkpoints)
            except StorageError as error:
                _log.error("%s/%s is passed over: %s", self.url, manifest.folder, error)
        return None


def refuse_other_run(known: list[Manifest], run_id: str, url: str) -> None:
    """Refuse a place where another run's checkpoints are.

    Raises:
        ConfigError: naming that run.
    """
    for manifest in known:
        if manifest.info.run_id != run_id:
            raise ConfigError(
                f"{url} (checkpoint.upload) holds checkpoints of another run, "
                f"{manifest.info.run_name!r}: resume that one with --resume auto, or choose "
                "another URL"
            )


def _described(path: Path) -> RemoteObject:
    with path.open("rb") as file:
        sha256 = hashlib.file_digest(file, "sha256").hexdigest()
        return RemoteObject(name=path.name, size=os.fstat(file.fileno()).st_size, sha256=sha256)


@contextmanager
def _held(checkpoint: Path) -> Iterator[Path]:
    """Yield a folder with the files of a checkpoint, linked a second time, which copies nothing.

    On a file system without such links it is the checkpoint itself.
    """
    held = checkpoint.with_name(f".{checkpoint.name}-uploading.unfinished")
    shutil.rmtree(held, ignore_errors=True)
    try:
        shutil.copytree(checkpoint, held, copy_function=os.link, ignore=_unfinished)
    except (shutil.Error, OSError):
        shutil.rmtree(held, ignore_errors=True)
        yield checkpoint
        return
    try:
        yield held
    finally:
        shutil.rmtree(held, ignore_errors=True)


def _unfinished(_folder: str, names: list[str]) -> list[str]:
    return list(filter(is_unfinished, names))
