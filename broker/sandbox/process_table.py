"""What runs on this host, by the kernel's own table: whose child, since when, how much.

Linux only. One look at it serves all children of a worker, ten times per second.
"""

import os
import signal
import time
from collections.abc import Iterable, Mapping
from contextlib import suppress
from typing import NamedTuple

_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
_STAT_BYTES = 1024
_PAUSE_S = 0.005


class ProcessRow(NamedTuple):
    """One process."""

    pid: int
    parent: int
    is_zombie: bool
    cpu_s: float  # its own, and that of children that it has waited for
    num_threads: int
    started_s: float  # since the host started
    rss_bytes: int


class Usage(NamedTuple):
    """What several processes take together."""

    num_tasks: int  # processes and threads
    cpu_s: float
    rss_bytes: int


def process_table() -> dict[int, ProcessRow]:
    """Return every process that we can see, by PID."""
    table = {}
    for name in os.listdir("/proc"):  # noqa: PTH208 pathlib takes twice as long
        if name.isdecimal() and (row := _row(int(name))) is not None:
            table[row.pid] = row
    return table


def _row(pid: int) -> ProcessRow | None:
    try:
        descriptor = os.open(f"/proc/{pid}/stat", os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        line = os.read(descriptor, _STAT_BYTES)
    except OSError:  # it ended meanwhile
        return None
    finally:
        os.close(descriptor)
    fields = line[line.rfind(b")") + 2 :].split()  # its name may hold blanks and brackets
    cpu_ticks = int(fields[11]) + int(fields[12]) + int(fields[13]) + int(fields[14])
    return ProcessRow(
        pid=pid,
        parent=int(fields[1]),
        is_zombie=fields[0] in {b"Z", b"X"},
        cpu_s=cpu_ticks / _TICKS_PER_S,
        num_threads=int(fields[17]),
        started_s=int(fields[19]) / _TICKS_PER_S,
        rss_bytes=int(fields[21]) * _PAGE_BYTES,
    )


def children_by_parent(table: Mapping[int, ProcessRow]) -> dict[int, list[int]]:
    """Return the children of each process, by PID."""
    children: dict[int, list[int]] = {}
    for row in table.values():
        children.setdefault(row.parent, []).append(row.pid)
    return children


def descendants(root: int, children: Mapping[int, list[int]]) -> list[int]:
    """Return all that a process has started, and what that has started; not itself.

    Raises:
        ValueError: ``root`` is 0 or less, below which the whole host would be.
    """
    if root <= 0:
        raise ValueError(f"process {root} has no descendants that are ours")
    found: list[int] = []
    open_ = list(children.get(root, ()))
    while open_:
        pid = open_.pop()
        found.append(pid)
        open_ += children.get(pid, ())
    return found


def usage_of(pids: Iterable[int], table: Mapping[int, ProcessRow]) -> Usage:
    """Return what these processes take together."""
    rows = [table[pid] for pid in pids if pid in table]
    return Usage(
        num_tasks=sum(row.num_threads for row in rows if not row.is_zombie),
        cpu_s=sum(row.cpu_s for row in rows),
        rss_bytes=sum(row.rss_bytes for row in rows),
    )


def now_s() -> float:
    """Return the seconds since the host started, as in ``ProcessRow.started_s``."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


def kill(pid: int) -> None:
    """Kill a process, if it is still there."""
    with suppress(ProcessLookupError, PermissionError):
        os.kill(pid, signal.SIGKILL)


def kill_descendants(root: int, *, within_s: float) -> bool:
    """Kill all below a process, again until nothing is left; return whether nothing is."""
    deadline_s = time.monotonic() + within_s
    while True:
        table = process_table()
        left = [
            pid for pid in descendants(root, children_by_parent(table)) if not table[pid].is_zombie
        ]
        if not left:
            return True
        if time.monotonic() > deadline_s:
            return False
        for pid in left:
            kill(pid)
        time.sleep(_PAUSE_S)
