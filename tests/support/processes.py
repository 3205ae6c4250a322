"""Processes of a test, and those that they started."""

import psutil


def tree_of(pid: int) -> list[int]:
    """Return a process and its descendants; nothing if it has ended."""
    try:
        return [pid, *(child.pid for child in psutil.Process(pid).children(recursive=True))]
    except psutil.NoSuchProcess:
        return []
