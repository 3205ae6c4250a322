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
_MARK = "owner"  # file in a folder of ours
_BOOT = Path("/proc/sys/kernel/random/boot_id")


def own_folder(parent: Path | None = None) -> Path:
    """Make a folder that is locked until this process ends, and is marked as ours.

    Args:
        parent: Folder to make it in; None for that of temporary files.
    """
    folder = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=parent))
    keep_folder(folder)
    (folder / _MARK).write_text(_owner())
    return folder


def remove_folders_of_the_dead() -> None:
    """Remove the folders of killed processes, which are no longer locked.

    A living process may be in another container that shares them: process ids prove nothing. On
    another host it may hold a lock that is not seen here: folders of other boots stay.
    """
    for parent in {Path(tempfile.gettempdir()), MEMORY}:
        for folder in parent.glob(f"{_PREFIX}*"):
            with suppress(OSError, UnicodeDecodeError):
                own = folder.stat().st_uid == os.geteuid()
                if own and (folder / _MARK).read_text() == _owner():
                    remove_abandoned(folder, remove_folder)


def _owner() -> str:
    """Return the content of the file that marks a folder: locks may end at this kernel."""
    return f"locked while it is used, on boot {_BOOT.read_text().strip()}"


def remove_folder(folder: Path) -> None:
    """Remove a folder, and the shared memory of engines that were killed."""
    for left in folder.glob("*-*"):
        remove_leftovers(left)
    shutil.rmtree(folder, ignore_errors=True)
