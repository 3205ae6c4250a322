"""Starting and ending child processes: a child dies with its parent, without orphans."""

import ctypes
import fcntl
import os
import resource
import signal
import sys
from collections.abc import Callable, Collection, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from slipstream.wire.errors import ConfigError

LIFELINE_VARIABLE = (
    "SLIPSTREAM_LIFELINE"  # descriptor; its end of file ends processes that outlive a role
)
_PR_SET_PDEATHSIG = 1
_ENOUGH_DESCRIPTORS = 1 << 20  # number without a limit


def die_with_parent(parent_pid: int) -> None:
    """Make the kernel kill this process when ``parent_pid`` ends (Linux; elsewhere a no-op)."""
    if sys.platform != "linux":
        return
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent_pid:  # the parent ended before the call
        os.kill(os.getpid(), signal.SIGKILL)


def bound_to_me(cores: Collection[int] = ()) -> Callable[[], None]:
    """Return a ``preexec_fn`` that makes the child die with the calling process.

    Call it on the main thread only: the kernel watches the thread that forked.

    Args:
        cores: Cores for the child and its own children; empty for all.
    """
    parent_pid = os.getpid()

    def prepare() -> None:
        die_with_parent(parent_pid)
        if cores and hasattr(os, "sched_setaffinity"):
            os.sched_setaffinity(0, cores)

    return prepare


def raise_descriptor_limit(least: int) -> int:
    """Raise the number of open files to the hard limit; return that number.

    Raises:
        ConfigError: the limit is below ``least``.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < least:
        raise ConfigError(
            f"the limit of open files is {hard}, and every client needs one: at least {least} are "
            "needed (ulimit -Hn, LimitNOFILE of systemd)"
        )
    most = _ENOUGH_DESCRIPTORS if hard == resource.RLIM_INFINITY else hard
    if soft < most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
    return max(soft, most)


def spare_cores(*, least: int, most: int) -> int:
    """Return an eighth of the cores that this process may use, within limits."""
    return min(max(len(os.sched_getaffinity(0)) // 8, least), most)


@contextmanager
def locked(path: Path, what: str) -> Iterator[None]:
    """Hold the lock on a file; the kernel releases it when this process ends.

    Args:
        path: File to create; holds the id of the process with the lock.
        what: Exclusive activity, for the error.

    Raises:
        ConfigError: another process holds the lock.
    """
    with path.open("a+") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            file.seek(0)
            holder = file.read(20).strip() or "unknown"
            raise ConfigError(f"another process (pid {holder}) {what}: end it first") from error
        except OSError as error:
            raise ConfigError(f"{path} cannot be locked (run.dir): {error.strerror}") from error
        file.truncate(0)
        file.write(f"{os.getpid()}\n")
        file.flush()
        yield


def is_locked(path: Path) -> bool:
    """True if a living process holds the lock on a file."""
    try:
        with path.open("r") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except FileNotFoundError:
        return False
    except BlockingIOError:
        return True
    return False


def keep_folder(folder: Path) -> None:
    """Lock a folder until this process ends; processes in any container see the lock."""
    descriptor = os.open(folder, os.O_RDONLY)
    os.set_inheritable(descriptor, True)  # inherited by the program that may replace this one
    with suppress(OSError):  # no such locks here: nothing is removed as abandoned
        fcntl.flock(descriptor, fcntl.LOCK_EX)


def remove_abandoned(folder: Path, remove: Callable[[Path], None]) -> None:
    """Call ``remove`` with a folder that was locked by a process and no longer is."""
    with suppress(OSError), ExitStack() as closing:
        descriptor = os.open(folder, os.O_RDONLY)
        closing.callback(os.close, descriptor)
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        remove(folder)


def last_lines(log_file: Path, count: int = 12) -> str:
    """Return the end of a log, indented, for an error message."""
    try:
        lines = log_file.read_text(errors="replace").splitlines()
    except OSError:
        return "    (no log)"
    return "\n".join(f"    {line}" for line in lines[-count:])
