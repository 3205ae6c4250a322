"""Versions as safetensors files in a folder that every host sees and no other program uses."""

import mmap
import os
import re
import shutil
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from slipstream.weightbus.version.digests import difference
from slipstream.weightbus.version.layout import safetensors_header, tensor_offsets
from slipstream.wire.errors import PublishError
from slipstream.wire.files.replace import replacing_folder
from slipstream.wire.messages.manifest import TensorSpec, WeightManifest
from slipstream.wire.models.model_files import WEIGHTS

_UNFINISHED = ".unfinished"
_COPY = "-"
_OURS = re.compile(r"\.?(v[0-9]+\.[0-9]+)-([0-9]+)(?:\.unfinished|\.replaced)?")
_CHUNK = 64 * 1024 * 1024


def write_version(
    parent: Path, manifest: WeightManifest, data: memoryview, *, number: int = 1
) -> Path:
    """Write a version durably; its folder appears whole or not at all.

    ``number`` distinguishes this copy; earlier copies stay.

    Raises:
        PublishError: writing failed.
    """
    folder = parent / f"{manifest.version.label}{_COPY}{number}"
    try:
        with (
            replacing_folder(folder, mode=0o700) as unfinished,
            (unfinished / WEIGHTS).open("xb", buffering=0) as file,
        ):
            file.write(safetensors_header(manifest))
            for start in range(0, len(data), _CHUNK):
                part = data[start : start + _CHUNK]
                while part:
                    part = part[file.write(part) :]
    except OSError as error:
        raise PublishError(
            f"cannot write {manifest.version.label} to {parent} (weightbus.folder): {error}"
        ) from error
    return folder


def copies_in(parent: Path) -> list[Path]:
    """Return the copies that earlier relays left in a folder."""
    try:
        return sorted(path for path in parent.iterdir() if _OURS.fullmatch(path.name))
    except FileNotFoundError:
        return []


def number_after(copies: Iterable[Path]) -> int:
    """Return a number larger than those of all these copies."""
    found = (_OURS.fullmatch(path.name) for path in copies)
    return 1 + max((int(match[2]) for match in found if match is not None), default=0)


def remove_copies(copies: Iterable[Path], *, unfinished_only: bool = False) -> None:
    """Remove copies. Unfinished ones have no readers."""
    for path in copies:
        if not unfinished_only or path.name.endswith(_UNFINISHED):
            shutil.rmtree(path, ignore_errors=True)


def data_start(folder: Path, manifest: WeightManifest) -> int:
    """Return the offset of a version's bytes in its file, whose header may have its label.

    Raises:
        PublishError: the file is missing, or holds other tensors.
    """
    headers = [safetensors_header(manifest, label=it) for it in (None, manifest.version.label)]
    try:
        with (folder / WEIGHTS).open("rb") as file:
            found = file.read(max(map(len, headers)))
            size = os.fstat(file.fileno()).st_size
    except OSError as error:
        raise PublishError(
            f"cannot read {folder / WEIGHTS}: {error.strerror} (is weightbus.folder the same "
            "folder on every host?)"
        ) from error
    for header in headers:
        if found.startswith(header) and size == len(header) + manifest.num_bytes:
            return len(header)
    raise PublishError(f"{folder / WEIGHTS} does not hold the offered version")


def check_folder(folder: Path, manifest: WeightManifest, *, threads: int = 2) -> None:
    """Check every digest of a version on disk.

    Raises:
        PublishError: the version is missing, or not the offered one.
    """
    start = data_start(folder, manifest)
    with (
        (folder / WEIGHTS).open("rb") as file,
        mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped,
        memoryview(mapped) as whole,
        ThreadPoolExecutor(threads) as pool,
    ):
        offsets = tensor_offsets(manifest)

        def check(spec: TensorSpec) -> None:
            at = start + offsets[spec.name]
            with whole[at : at + spec.num_bytes] as data:
                check_digest(spec.name, spec.digest, data)

        for _ in pool.map(check, manifest.tensors):
            pass


def check_digest(name: str, digest: str, data: memoryview) -> None:
    """Check a tensor's bytes against its digest in the manifest.

    Raises:
        PublishError: they differ.
    """
    if found := difference(data, digest):
        raise PublishError(f"{name} arrived with {found}")
