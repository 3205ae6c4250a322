"""Memory that no process has mapped: open files (memfd, /dev/shm), and files of sandboxes."""

import os
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from slipstream.broker.sandbox.jail import SHARED_MEMORY
from slipstream.broker.sandbox.run_usage import FOLDERS_IN_MEMORY

_BLOCK_BYTES = 512  # of ``st_blocks``
_IN_MEMORY = ("/memfd:", f"{SHARED_MEMORY}/")  # begins of links in /proc/PID/fd, removed ones too


def held_bytes(pids: Iterable[int]) -> int:
    """Return the bytes of open files in memory, beyond those that are mapped: these are resident.

    A file is counted once, whoever has it open. Left out are processes that have ended, and, unless
    we are root, those that keep their memory private: the kernel shows nobody their files.
    """
    files: dict[tuple[int, int], int] = {}
    mapped = 0
    for pid in pids:
        with suppress(OSError):
            found = _open_files(pid)
            files |= found
            mapped += _mapped_bytes(pid) if found else 0
    return max(0, sum(files.values()) - mapped)


def sandboxes_bytes(pids: Iterable[int]) -> int:
    """Return the bytes of files in the work folders of sandboxes.

    Left out are those that the kernel shows us no process of.

    Args:
        pids: processes in sandboxes, and those that started them, which see our folders.
    """
    ours = {one.stat().st_dev for one in map(Path, FOLDERS_IN_MEMORY) if one.exists()}
    held: dict[int, int] = {}  # by device
    for pid in pids:
        for folder in FOLDERS_IN_MEMORY:
            with suppress(OSError):
                path = f"/proc/{pid}/root{folder}"
                if (device := os.stat(path).st_dev) not in ours | held.keys():  # noqa: PTH116
                    found = os.statvfs(path)
                    held[device] = (found.f_blocks - found.f_bfree) * found.f_frsize
    return sum(held.values())


def _open_files(pid: int) -> dict[tuple[int, int], int]:
    """Return the bytes of each file in memory that a process has open, by device and inode."""
    files: dict[tuple[int, int], int] = {}
    folder = f"/proc/{pid}/fd"
    for name in os.listdir(folder):  # noqa: PTH208 of many processes
        with suppress(OSError):  # it was closed meanwhile
            if os.readlink(f"{folder}/{name}").startswith(_IN_MEMORY):  # noqa: PTH115 the same
                found = os.stat(f"{folder}/{name}")  # noqa: PTH116 the same
                files[found.st_dev, found.st_ino] = found.st_blocks * _BLOCK_BYTES
    return files


def _mapped_bytes(pid: int) -> int:
    """Return the shared memory that a process has mapped and touched."""
    for line in Path(f"/proc/{pid}/status").read_text(errors="replace").splitlines():
        if line.startswith("RssShmem:"):
            return int(line.split()[1]) << 10
    return 0
