"""Files and folders that appear whole or not at all.

One rule for fsync: files that a restarted process or another host relies on are ``durable``, on
disk once the call returns. Figures and traces, which are only shown, are not: a power failure may
lose them.
"""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

_UNFINISHED = ".unfinished"
_REPLACED = ".replaced"


def replace_file(path: Path, data: bytes, *, durable: bool = True, mode: int = 0o666) -> None:
    """Replace a file in one rename: readers see the old bytes or the new ones."""
    with replacing_file(path, durable=durable, mode=mode) as file:
        file.write(data)


@contextmanager
def replacing_file(path: Path, *, durable: bool = True, mode: int = 0o666) -> Iterator[BinaryIO]:
    """Open a file that takes the place of ``path`` when the block ends, unless it raises.

    One process writes the file at a time. If ``durable``, it is on disk once the block has ended.
    """
    unfinished = _beside(path, _UNFINISHED)
    unfinished.unlink(missing_ok=True)  # left by a writer that was killed
    descriptor = os.open(unfinished, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode)
    try:
        with os.fdopen(descriptor, "wb") as file:
            yield file
            if durable:
                file.flush()
                os.fsync(file.fileno())
        unfinished.replace(path)
    except BaseException:
        unfinished.unlink(missing_ok=True)
        raise
    if durable:
        sync(path.parent)


@contextmanager
def replacing_folder(folder: Path, *, durable: bool = True, mode: int = 0o777) -> Iterator[Path]:
    """Make a folder that takes the place of ``folder`` when the block ends, unless it raises.

    One process writes the folder at a time. If ``durable``, it is on disk once the block has ended.
    """
    unfinished = _beside(folder, _UNFINISHED)
    shutil.rmtree(unfinished, ignore_errors=True)  # left by a writer that was killed
    unfinished.mkdir(parents=True, mode=mode)
    try:
        yield unfinished
        put_in_place(unfinished, folder, durable=durable)
    except BaseException:
        shutil.rmtree(unfinished, ignore_errors=True)
        raise


def put_in_place(unfinished: Path, folder: Path, *, durable: bool = True) -> None:
    """Rename a folder that is complete; an older one of that name is removed.

    A process that is killed between the two renames leaves the older one as ``.NAME.replaced``.
    """
    if durable:
        for path in [*unfinished.rglob("*"), unfinished]:
            sync(path)
    replaced = _beside(folder, _REPLACED)
    if folder.exists():
        shutil.rmtree(replaced, ignore_errors=True)
        folder.rename(replaced)
    unfinished.rename(folder)
    if durable:
        sync(folder.parent)
    shutil.rmtree(replaced, ignore_errors=True)


def sync(path: Path) -> None:
    """Put a file, or the names in a folder, on disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def is_unfinished(name: str) -> bool:
    """Return whether such a file is being written, or was left by a writer that was killed."""
    return name.startswith(".") and name.endswith(_UNFINISHED)


def _beside(path: Path, ending: str) -> Path:
    return path.with_name(f".{path.name}{ending}")
