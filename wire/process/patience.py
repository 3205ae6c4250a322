"""Waits for another process for as long as it shows activity.

The speed of a machine decides how long something takes, never whether it works. So a wait for a
process on this host ends after a time without a sign of life of that process, not after a fixed
time; its parent notices its end at once. Waits of more than ten seconds are logged.
"""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable, Collection
from contextlib import asynccontextmanager
from pathlib import Path
from typing import NamedTuple

from slipstream.wire.process.usage import tree_of, use_of

_log = logging.getLogger(__name__)
_OBSERVE_S = 1.0  # time between two observations
_LONGEST_GAP_S = 5.0  # longer gaps are time in which the waiter did not run
_LEAST_SHARE = 0.01  # share of a core; a process that only polls uses less
AT_MOST = 20  # multiple of the limit, for a process that is busy without progress
END_AT_MOST = 6  # the same for a process that should end
_LOG_FIRST_S = 10.0


class Signs(NamedTuple):
    """Counters that grow while a process works."""

    cpu_s: float  # total of the process and its descendants
    page_ins: int  # pages read from files
    log_bytes: int


class Patience:
    """One wait. Call ``is_over`` repeatedly, at least every second."""

    def __init__(
        self,
        what: str,
        limit_s: float,
        signs: Callable[[], Signs] | None = None,
        *,
        at_most: float = AT_MOST,
        log: Callable[[str], None] = _log.info,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        """Start to wait.

        Args:
            what: Awaited event, as in "waiting for WHAT".
            limit_s: Limit without a sign of life.
            signs: Signs of the awaited process; None if it shows none: then the wait ends after
                ``limit_s`` of this process's own running time.
            at_most: Multiple of ``limit_s`` after which even a busy process has failed.
            log: called with a line about the wait, first after ten seconds.
            now: monotonic seconds.
        """
        self._what = what
        self._limit_s = limit_s
        self._signs = signs
        self._most_s = limit_s * (at_most if signs is not None else 1.0)
        self._log_line = log
        self._now = now
        self._observed_s = now()
        self._seen = signs() if signs is not None else None
        self._next_line_s = _LOG_FIRST_S
        self.waited_s = 0.0
        self.idle_s = 0.0  # time since the last sign of life

    def is_over(self) -> bool:
        """True if waiting longer is useless."""
        gap_s = self._now() - self._observed_s
        if gap_s >= min(_OBSERVE_S, self._limit_s / 4):
            self._observed_s += gap_s
            self._observe(min(gap_s, _LONGEST_GAP_S))
        return self.idle_s >= self._limit_s or self.waited_s >= self._most_s

    def _observe(self, gap_s: float) -> None:
        self.waited_s += gap_s
        self.idle_s += gap_s
        if self._signs is not None:
            seen, before = self._signs(), self._seen
            if before is None or _is_alive(before, seen, self.idle_s):
                self.idle_s, self._seen = 0.0, seen
        if self.waited_s >= self._next_line_s:
            self._next_line_s *= 2
            state = f", which has done nothing for {self.idle_s:.0f} s"
            is_idle = self._signs is not None and self.idle_s >= _LOG_FIRST_S
            self._log_line(
                f"waiting for {self._what}{state if is_idle else ''}: {self.waited_s:.0f} s"
            )

    @property
    def why(self) -> str:
        """Reason why the wait is over, as a predicate of the awaited process."""
        if self._signs is None:
            return f"was not there within {self._limit_s:g} s"
        if self.idle_s >= self._limit_s:
            return f"used no CPU and wrote no log for {self._limit_s:g} s"
        return f"was busy for {self._most_s:.0f} s without finishing"


class Silence:
    """Silence of a peer, in this process's own running time.

    A process that did not run could not read its messages. So call ``is_over`` often, and only
    after reading everything that has arrived: a gap between calls counts for at most ``look_s``.
    """

    def __init__(
        self, limit_s: float, *, look_s: float, now: Callable[[], float] = time.monotonic
    ) -> None:
        """Begin with a sign of life.

        Args:
            limit_s: Running time without a sign of life after which the peer is gone.
            look_s: Longest gap that counts in full.
            now: Monotonic seconds.
        """
        self._limit_s = limit_s
        self._look_s = look_s
        self._now = now
        self._seen_s = now()
        self._silent_s = 0.0

    def heard(self) -> None:
        """Note a sign of life."""
        self._seen_s = self._now()
        self._silent_s = 0.0

    def is_over(self) -> bool:
        """Return whether the peer is gone."""
        gap_s = self._now() - self._seen_s
        self._seen_s += gap_s
        self._silent_s += min(gap_s, self._look_s)
        return self._silent_s > self._limit_s


@asynccontextmanager
async def log_wait(what: str, log: Callable[[str], None] = _log.info) -> AsyncIterator[None]:
    """Log the wait for ``what`` while the block runs, first after ten seconds."""

    async def log_lines() -> None:
        waited_s = _LOG_FIRST_S
        await asyncio.sleep(waited_s)
        while True:
            log(f"waiting for {what}: {waited_s:.0f} s")
            await asyncio.sleep(waited_s)
            waited_s *= 2

    logging_lines = asyncio.create_task(log_lines())
    try:
        yield
    finally:
        logging_lines.cancel()


def signs_of(
    pids: Callable[[], Collection[int]], log_file: Path | None = None, *, alone: bool = False
) -> Callable[[], Signs]:
    """Return a function that observes processes, their descendants and their log.

    Args:
        pids: Current processes; an ended one counts as idle.
        log_file: Log of the processes; may not exist yet.
        alone: True to leave out descendants.
    """

    def observe() -> Signs:
        uses = [use_of(pid) for pid in (pids() if alone else tree_of(pids()))]
        page_ins = sum(use.page_ins for use in uses)
        return Signs(sum(use.cpu_s for use in uses), page_ins, _size_of(log_file))

    return observe


def _is_alive(before: Signs, seen: Signs, idle_s: float) -> bool:
    if seen.cpu_s < before.cpu_s:  # a process has ended or was replaced
        return True
    if seen.page_ins != before.page_ins or seen.log_bytes != before.log_bytes:
        return True
    return seen.cpu_s - before.cpu_s > _LEAST_SHARE * idle_s


def _size_of(log_file: Path | None) -> int:
    try:
        return log_file.stat().st_size if log_file is not None else 0
    except OSError:
        return 0
