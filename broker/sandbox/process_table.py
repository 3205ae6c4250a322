"""The processes of this host, by the kernel's own table: parent, start, memory, processor time.

Linux only. Read ten times per second for the children of a worker and forty times for a sandboxed
run, which is why it is not psutil's: that takes seven times as long for a table (docs/adr/0034).
"""

import asyncio
import os
import signal
import time
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import psutil

_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
_STAT_BYTES = 1024
_POLL_S = 0.01


class ProcessRow(NamedTuple):
    """One process."""

    pid: int
    parent: int
    state: str  # state of its first thread, as in ps: R, S, D, Z ...
    cpu_s: float  # its own time, and that of reaped children
    num_threads: int
    started_s: float  # since the host started
    rss_bytes: int
    reaped_cpu_s: float = 0.0  # time of reaped children alone

    @property
    def is_zombie(self) -> bool:
        """True if it has ended and its parent has not waited for it."""
        return self.state in "ZX" and self.num_threads <= 1  # the first thread may end alone


class Usage(NamedTuple):
    """Total usage of several processes."""

    num_tasks: int  # processes and threads
    cpu_s: float
    rss_bytes: int


def process_table() -> dict[int, ProcessRow]:
    """Return every process that we can see, by PID."""
    rows = map(row_of, psutil.pids())
    return {row.pid: row for row in rows if row is not None}


def row_of(pid: int) -> ProcessRow | None:
    """Return one process, or one thread of a process by its id; None if it has ended."""
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
    row = parsed_row(pid, line)
    return (
        row._replace(rss_bytes=_rss_of_others(pid)) if row.num_threads > 1 > row.rss_bytes else row
    )


def _rss_of_others(pid: int) -> int:
    """Return the memory of a process whose first thread has ended."""
    with suppress(OSError):
        for task in os.listdir(f"/proc/{pid}/task"):  # noqa: PTH208 as children_of
            with suppress(OSError):
                row = parsed_row(pid, Path(f"/proc/{pid}/task/{task}/stat").read_bytes())
                if row.rss_bytes:
                    return row.rss_bytes
    return 0


def parsed_row(pid: int, line: bytes) -> ProcessRow:
    """Parse a line of /proc/PID/stat (proc_pid_stat(5))."""
    fields = line[line.rfind(b")") + 2 :].split()  # its name may hold blanks and brackets
    reaped_ticks = int(fields[13]) + int(fields[14])
    cpu_ticks = int(fields[11]) + int(fields[12]) + reaped_ticks
    return ProcessRow(
        pid=pid,
        parent=int(fields[1]),
        state=fields[0].decode(),
        cpu_s=cpu_ticks / _TICKS_PER_S,
        num_threads=int(fields[17]),
        started_s=int(fields[19]) / _TICKS_PER_S,
        rss_bytes=int(fields[21]) * _PAGE_BYTES,
        reaped_cpu_s=reaped_ticks / _TICKS_PER_S,
    )


def children_of(pid: int) -> list[int]:
    """Return the children of all threads of a process, without reading the whole table."""
    children: list[int] = []
    with suppress(OSError):
        for task in os.listdir(f"/proc/{pid}/task"):  # noqa: PTH208 many times per second
            with suppress(OSError):
                listed = Path(f"/proc/{pid}/task/{task}/children").read_bytes()
                children += map(int, listed.split())
    return children


def children_by_parent(table: Mapping[int, ProcessRow]) -> dict[int, list[int]]:
    """Return the children of each process, by PID."""
    children: dict[int, list[int]] = {}
    for row in table.values():
        children.setdefault(row.parent, []).append(row.pid)
    return children


def descendants(root: int, children: Mapping[int, list[int]]) -> list[int]:
    """Return all descendants of a process.

    Raises:
        ValueError: ``root`` is 0 or less, below which the whole host would be.
    """
    if root <= 0:
        raise ValueError(f"process {root} has no descendants that are ours")
    below: list[int] = []
    open_ = list(children.get(root, ()))
    while open_:
        pid = open_.pop()
        below.append(pid)
        open_ += children.get(pid, ())
    return below


def ids_inside(pids: Iterable[int], *, levels: int) -> dict[int, int]:
    """Return processes by the ids that they have in a PID namespace below ours.

    Args:
        pids: Ids of processes here; those that have ended or are not inside are left out.
        levels: Number of levels between our namespace and that one.
    """
    inside: dict[int, int] = {}
    for pid in pids:
        with suppress(OSError):
            status = Path(f"/proc/{pid}/status").read_text(errors="replace")
            line = next(row for row in status.splitlines() if row.startswith("NSpid:"))
            ids = line.split()[1:]
            if len(ids) > levels:
                inside[int(ids[levels])] = pid
    return inside


def usage_of(pids: Iterable[int], table: Mapping[int, ProcessRow]) -> Usage:
    """Return the total usage of these processes."""
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


async def kill_all(started: Mapping[int, float], *, timeout_s: float) -> list[int]:
    """Kill processes, given with their start times, until they are gone; return the rest."""
    deadline_s = time.monotonic() + timeout_s
    while True:
        rows = [row for pid, row in process_table().items() if started.get(pid) == row.started_s]
        left = [row.pid for row in rows if not row.is_zombie]
        if not left or time.monotonic() > deadline_s:
            return left
        for pid in left:
            kill(pid)
        await asyncio.sleep(_POLL_S)
