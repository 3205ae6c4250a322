"""CPU, memory and GPUs that a process and its descendants use, for its reports."""

import logging
import os
import subprocess
import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import NamedTuple

from slipstream.wire.gpus import gpus_of_host

_log = logging.getLogger(__name__)
_PROC = Path("/proc")
_EVERY_S = 5.0  # a look at /proc costs about a millisecond
_ASK_S = 10.0  # limit for nvidia-smi, and time between two questions
_MAX_PROCESSES = 1_000  # limit for one tree
_TICK_S = 1.0 / os.sysconf("SC_CLK_TCK")
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
_MIB = 1 << 20
_APPS = "--query-compute-apps=pid,gpu_uuid,used_memory"
_GPUS = "--query-gpu=uuid,utilization.gpu"


class ProcessUsage:
    """Readings of this process and all its descendants, renewed every few seconds."""

    def __init__(
        self,
        *,
        gpus: bool = False,
        root: int | None = None,
        proc: Path = _PROC,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        """Take the first reading.

        Args:
            gpus: ask the driver too, from a short-lived thread; not for processes that fork.
            root: id of the uppermost process; None for this one.
            proc: folder in which the system shows processes.
            now: clock in seconds.
        """
        self._gpus = gpus
        self._root = root if root is not None else os.getpid()
        self._proc = proc
        self._now = now
        self._pids: tuple[int, ...] = ()
        self._at_s = now()
        self._cpu_s, memory = self._look()
        self._gauges = {"memory_bytes": float(memory)}
        self._gpu_gauges: dict[str, float] = {}
        self._asking = threading.Lock()
        self._asked_s = -_ASK_S

    def gauges(self) -> dict[str, float]:
        """Return the newest readings by name.

        ``cpu_cores`` is CPU seconds per second since the previous reading, ``memory_bytes``
        resident memory, in which memory shared by processes counts for each. With GPUs that show
        their processes: ``gpu_bytes`` of these processes, and ``gpu_busy``, the mean share of the
        time that their GPUs were busy, for any process.
        """
        now_s = self._now()
        if now_s - self._at_s >= _EVERY_S:
            cpu_s, memory = self._look()
            cores = max(0.0, cpu_s - self._cpu_s) / (now_s - self._at_s)
            self._gauges = {"cpu_cores": cores, "memory_bytes": float(memory)}
            self._at_s, self._cpu_s = now_s, cpu_s
        if self._gpus and now_s - self._asked_s >= _ASK_S and self._asking.acquire(blocking=False):
            self._asked_s = now_s
            threading.Thread(target=self._ask, name="gpu usage", daemon=True).start()
        return self._gauges | self._gpu_gauges

    def _look(self) -> tuple[float, int]:
        """Return CPU seconds and resident bytes of the tree."""
        self._pids = tree_of((self._root,), self._proc)
        uses = [use_of(pid, self._proc) for pid in self._pids]
        return sum(use.cpu_s for use in uses), sum(use.memory_bytes for use in uses)

    def _ask(self) -> None:
        """Ask the driver, in a thread; a host without GPUs is asked only once."""
        if not gpus_of_host():
            return  # and keep the lock
        try:
            self._gpu_gauges = gpu_gauges(self._pids, _nvidia(_APPS), _nvidia(_GPUS))
        except (OSError, subprocess.SubprocessError, ValueError) as error:
            _log.debug("the use of GPUs is not known: %s", error)
            self._gpu_gauges = {}
        finally:
            self._asking.release()


class ProcessUse(NamedTuple):
    """Use of one process, with its ended children; 0 for a missing process."""

    cpu_s: float = 0.0
    page_ins: int = 0  # pages read from files
    memory_bytes: int = 0  # resident


def use_of(pid: int, proc: Path = _PROC) -> ProcessUse:
    """Return the use of a process."""
    try:
        text = (proc / str(pid) / "stat").read_text(errors="replace")
        fields = [int(field) for field in text.rpartition(")")[2].split()[1:]]
        # majflt, cmajflt; utime, stime, cutime, cstime; rss
        return ProcessUse(sum(fields[10:14]) * _TICK_S, sum(fields[8:10]), fields[20] * _PAGE_BYTES)
    except (OSError, ValueError, IndexError):
        return ProcessUse()


def tree_of(roots: Iterable[int], proc: Path = _PROC) -> tuple[int, ...]:
    """Return processes and their descendants, as far as the system shows them."""
    found = dict.fromkeys(roots)
    waiting = list(found)
    while waiting and len(found) < _MAX_PROCESSES:
        for task in _names(proc / str(waiting.pop()) / "task"):
            try:
                children = [int(pid) for pid in (task / "children").read_text().split()]
            except (OSError, ValueError):
                continue
            waiting += (pid for pid in children if pid not in found)
            found |= dict.fromkeys(children)
    return tuple(found)


def gpu_gauges(pids: Iterable[int], apps: str, gpus: str) -> dict[str, float]:
    """Return what processes use of GPUs; empty if the driver does not know these processes.

    Args:
        pids: Processes.
        apps: lines of process, UUID of a GPU, MiB.
        gpus: lines of UUID, percent of the last second or less that the GPU was busy.

    Raises:
        ValueError: a line is not of this form.
    """
    own = frozenset(pids)
    used = [(row[1], row[2]) for row in _rows(apps, 3) if int(row[0]) in own]
    if not used:
        return {}
    busy = {row[0]: row[1] for row in _rows(gpus, 2)}
    memory = [_known(mib) for _, mib in used]
    shares = [_known(busy.get(uuid, "")) for uuid in {uuid for uuid, _ in used}]
    gauges: dict[str, float] = {}
    if None not in memory:
        gauges["gpu_bytes"] = _MIB * sum(size for size in memory if size is not None)
    if shares and None not in shares:
        gauges["gpu_busy"] = (
            sum(share for share in shares if share is not None) / len(shares) / 100.0
        )
    return gauges


def _rows(text: str, count: int) -> list[list[str]]:
    rows = [
        [part.strip() for part in line.split(",")] for line in text.splitlines() if line.strip()
    ]
    if any(len(row) != count for row in rows):
        raise ValueError(f"{count} columns expected: {text[:100]!r}")
    return rows


def _known(text: str) -> float | None:
    """Return a number; None for an unknown value such as [N/A]."""
    try:
        return float(text)
    except ValueError:
        return None


def _names(folder: Path) -> list[Path]:
    try:
        return list(folder.iterdir())
    except OSError:
        return []


def _nvidia(query: str) -> str:
    command = ["nvidia-smi", query, "--format=csv,noheader,nounits"]
    done = subprocess.run(  # noqa: S603 a fixed command
        command, capture_output=True, text=True, check=True, timeout=_ASK_S
    )
    return done.stdout
