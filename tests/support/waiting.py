"""How tests wait: until something is so. How long that takes decides nothing."""

import asyncio
import subprocess
import time
from collections.abc import Awaitable, Callable
from inspect import isawaitable

HANG_S = 600.0  # ends what hangs; nothing that works comes near it
NEVER_S = 2 * HANG_S  # of a deadline that must not be what ends a wait: the test fails before
_POLL_S = 0.02


def until(
    is_so: Callable[[], object], what: str | Callable[[], str] = "", *, every_s: float = _POLL_S
) -> None:
    """Wait until something is so.

    Args:
        is_so: checked again and again.
        what: of the failure: text or what makes it.
        every_s: between checks, longer where one takes much of a core.
    """
    hangs_s = time.monotonic() + HANG_S
    while not is_so():
        assert time.monotonic() < hangs_s, _text(what)
        time.sleep(every_s)


async def until_async(
    is_so: Callable[[], object | Awaitable[object]], what: str | Callable[[], str] = ""
) -> None:
    """Wait until something is so, or the check returns so, while the event loop runs."""
    hangs_s = time.monotonic() + HANG_S
    while not (await seen if isawaitable(seen := is_so()) else seen):
        assert time.monotonic() < hangs_s, _text(what)
        await asyncio.sleep(_POLL_S)


def until_ended(pid: int) -> None:
    """Wait until a process has ended, whichever process is to collect it."""
    until(lambda: state_of(pid) in "ZX", f"process {pid} still runs")


def until_stopped(pid: int) -> None:
    """Wait until a process is stopped by a signal."""
    until(lambda: state_of(pid) == "T", f"process {pid} is not stopped")


def state_of(pid: int) -> str:
    """Return the letter of a process's state as in /proc/PID/stat; X if there is none."""
    try:
        with open(f"/proc/{pid}/stat") as file:  # noqa: PTH123
            return file.read().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return "X"


def output_of(process: subprocess.Popen[str]) -> tuple[str, str]:
    """Return what a process printed until it ended; it does not outlive the call."""
    try:
        return process.communicate(timeout=HANG_S)
    finally:
        process.kill()
        process.wait()


def _text(what: str | Callable[[], str]) -> str:
    return what if isinstance(what, str) else what()
