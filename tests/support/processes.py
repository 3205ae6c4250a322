"""Processes of a test, and those that they started."""

import ctypes
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil

_SHARED = "/dev/shm/"  # noqa: S108
_SET_SUBREAPER = 36


@contextmanager
def adopted_orphans() -> Iterator[None]:
    """Have orphans come back to us, not to init, so that all that is left is found below us."""
    ctypes.CDLL(None).prctl(_SET_SUBREAPER, 1, 0, 0, 0)
    try:
        yield
    finally:
        ctypes.CDLL(None).prctl(_SET_SUBREAPER, 0, 0, 0, 0)


def tree_of(pid: int) -> list[int]:
    """Return a process and its descendants; nothing if it has ended."""
    try:
        return [pid, *(child.pid for child in psutil.Process(pid).children(recursive=True))]
    except psutil.NoSuchProcess:
        return []


def shared_memory_of(pids: Iterable[int]) -> set[Path]:
    """Return the shared memory that processes have mapped under a name."""
    found: set[Path] = set()
    for pid in pids:
        with suppress(OSError):
            lines = Path(f"/proc/{pid}/maps").read_text().splitlines()
            found |= {Path(line.split(maxsplit=5)[5]) for line in lines if _SHARED in line}
    return {path for path in found if "(deleted)" not in path.name}
