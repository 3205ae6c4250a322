"""Folders for temporary files, which the next one removes if their process was killed."""

import os
import shutil
import tempfile
from contextlib import suppress
from pathlib import Path

from slipstream.generators.sglang.process import remove_leftovers
from slipstream.wire.process.processes import keep_folder, remove_abandoned

MEMORY = Path("/dev/shm")  # noqa: S108 memory, never a disk
_PREFIX = "slipstream-"
_MARK, _OURS = "owner", "locked while it is used"  # file in a folder of ours, and its content


def own_folder(parent: Path | None = None) -> Path:
    """Make a folder that is locked until this process ends, and is marked as ours.

    Args:
        parent: Folder to make it in; None for that of temporary files.
    """
    folder = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=parent))
    keep_folder(folder)
    (folder / _MARK).write_text(_OURS)
    return folder


def remove_folders_of_the_dead() -> None:
    """Remove the folders of killed processes, which are no longer locked.

    A living process may be in another container that shares them: process ids prove nothing.
    """
    for parent in {Path(tempfile.gettempdir()), MEMORY}:
        for folder in parent.glob(f"{_PREFIX}*"):
            with suppress(OSError, UnicodeDecodeError):
                own = folder.stat().st_uid == os.geteuid()
                if own and (folder / _MARK).read_text() == _OURS:
                    remove_abandoned(folder, remove_folder)


def remove_folder(folder: Path) -> None:
    """Remove a folder, and the shared memory of engines that were killed."""
    for left in folder.glob("*-*"):
        remove_leftovers(left)
    shutil.rmtree(folder, ignore_errors=True)
