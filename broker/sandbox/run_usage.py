"""Usage of a sandboxed run, measured from outside."""

import os
from contextlib import suppress
from dataclasses import dataclass

import psutil

from slipstream.broker.sandbox.process_table import ProcessRow, children_of, row_of

FOLDERS_IN_MEMORY = ("/tmp", "/box")  # noqa: S108 those of the sandbox
_BYTES_OF_FILE = 1024  # kernel memory for the name and owner of one, whatever it holds
_MOST_PROCESSES = 4096
_WANTS_CORE, _WAITS_FOR_DISK = "R", "D"


@dataclass
class RunUsage:
    """Current and peak usage of all processes of a run."""

    num_tasks: int = 0
    cpu_s: float = 0.0
    memory_bytes: int = 0
    peak_bytes: int = 0
    wants_core: bool = False  # a thread of it runs, or waits for a core
    waits_for_disk: bool = False  # or seems to, see ``ChargedTime``

    def update(self, root: int, *, levels: int, enough_bytes: int) -> None:
        """Measure the tree under a process.

        Args:
            root: Bubblewrap, or ``init.py`` without namespaces.
            levels: 1 if the code's first process is its child, 2 if it is its grandchild.
            enough_bytes: Limit above which memory is measured again, slowly and exactly.
        """
        above, pids = list[int](), [root]  # processes of ours, and of the code
        for _ in range(levels):
            above += pids
            pids = [child for pid in pids for child in children_of(pid)]
        seen = set(above)
        for pid in pids:
            if pid not in seen and len(seen) < _MOST_PROCESSES:
                seen.add(pid)
                pids += children_of(pid)
        pids = list(dict.fromkeys(pids))
        rows = [row for row in map(row_of, pids) if row is not None]
        overhead = [row.reaped_cpu_s for row in map(row_of, above) if row is not None]
        memory = sum(row.rss_bytes for row in rows)
        if memory > enough_bytes:
            memory = sum(map(_proportional_bytes, pids))  # pages that they share counted once
        if levels > 1 and pids:  # else the files may be those of the host
            for folder in FOLDERS_IN_MEMORY:
                with suppress(OSError):  # it has ended
                    system = os.statvfs(f"/proc/{pids[0]}/root{folder}")
                    memory += (system.f_files - system.f_ffree) * _BYTES_OF_FILE
        states = {state for row in rows for state in _states(row)}
        self.num_tasks = sum(row.num_threads for row in rows)
        self.wants_core, self.waits_for_disk = _WANTS_CORE in states, _WAITS_FOR_DISK in states
        self.cpu_s = max(self.cpu_s, sum(overhead) + sum(row.cpu_s for row in rows))
        self.memory_bytes, self.peak_bytes = memory, max(self.peak_bytes, memory)


def _states(row: ProcessRow) -> set[str]:
    """Return the states of a process's threads; where one wants a core, perhaps of it alone."""
    if row.state == _WANTS_CORE or row.num_threads == 1:
        return {row.state}
    tasks: list[str] = []
    with suppress(OSError):  # it has ended
        tasks = os.listdir(f"/proc/{row.pid}/task")  # noqa: PTH208 many times per second
    threads = (row_of(int(task)) for task in tasks)
    return {row.state, *(thread.state for thread in threads if thread is not None)}


def _proportional_bytes(pid: int) -> int:
    """Return the memory of a process, a page that n processes share counted as 1/n."""
    with suppress(psutil.NoSuchProcess):
        process = psutil.Process(pid)
        try:
            return int(process.memory_full_info().pss)
        except psutil.AccessDenied:
            return int(process.memory_info().rss)
    return 0
