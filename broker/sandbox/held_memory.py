"""Memory that no process has mapped: open files (memfd, /dev/shm), and files of sandboxes."""

import os
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from slipstream.broker.sandbox.jail import SHARED_MEMORY
from slipstream.broker.sandbox.run_usage import FOLDERS_IN_MEMORY

_BLOCK_BYTES = 512  # unit of ``st_blocks``
_IN_MEMORY = (
    "/memfd:",
    f"{SHARED_MEMORY}/",
)  # beginnings of links in /proc/PID/fd, also of removed files


def held_bytes(pids: Iterable[int]) -> int:
    """Return the bytes of open files in memory; mapped bytes are resident and do not count.

    A file counts once, however many processes have it open. Processes that have ended are left out;
    so are those that keep their memory private, unless this process is root.
    """
    files: dict[tuple[int, int], int] = {}
    mapped = 0
    for pid in pids:
        with suppress(OSError):
            open_files = _open_files(pid)
            files |= open_files
            mapped += _mapped_bytes(pid) if open_files else 0
    return max(0, sum(files.values()) - mapped)


def sandboxes_bytes(pids: Iterable[int]) -> int:
    """Return the bytes of files in the work folders of sandboxes.

    Sandboxes without a process that the kernel shows to this one are left out.

    Args:
        pids: Processes in sandboxes, and those that started them, which see our folders.
    """
    folders = map(Path, FOLDERS_IN_MEMORY)
    ours = {folder.stat().st_dev for folder in folders if folder.exists()}
    held: dict[int, int] = {}  # keys are devices
    for pid in pids:
        for folder in FOLDERS_IN_MEMORY:
            with suppress(OSError):
                path = f"/proc/{pid}/root{folder}"
                if (device := os.stat(path).st_dev) not in ours | held.keys():  # noqa: PTH116
                    system = os.statvfs(path)
                    held[device] = (system.f_blocks - system.f_bfree) * system.f_frsize
    return sum(held.values())


def _open_files(pid: int) -> dict[tuple[int, int], int]:
    """Return the bytes of each file in memory that a process has open, by device and inode."""
    files: dict[tuple[int, int], int] = {}
    folder = f"/proc/{pid}/fd"
    for name in os.listdir(folder):  # noqa: PTH208 of many processes
        with suppress(OSError):  # it was closed meanwhile
            if os.readlink(f"{folder}/{name}").startswith(_IN_MEMORY):  # noqa: PTH115 the same
                status = os.stat(f"{folder}/{name}")  # noqa: PTH116 the same
                files[status.st_dev, status.st_ino] = status.st_blocks * _BLOCK_BYTES
    return files


def _mapped_bytes(pid: int) -> int:
    """Return the shared memory that a process has mapped and touched."""
    for line in Path(f"/proc/{pid}/status").read_text(errors="replace").splitlines():
        if line.startswith("RssShmem:"):
            return int(line.split()[1]) << 10
    return 0
