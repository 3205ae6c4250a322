"""Takes a snapshot of a run every second, for all viewers, and keeps the page's data.

Nothing here may end the broker or hold it up: failures are logged once and left out, and slow
work (rules, encoding, writing) runs in threads on copies.
"""

import asyncio
import logging
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import TypeAlias

import msgspec

from slipstream.broker.advisories.advise import advise, is_ready
from slipstream.broker.advisories.view import Advisory, Trends
from slipstream.broker.dashboard.items import shown_letters
from slipstream.broker.history.columns import (
    HistoryColumns,
    StoredState,
    claim_state,
    trends_of,
    write_state,
)
from slipstream.broker.history.history import RunHistory, steady_time
from slipstream.broker.history.table import Row
from slipstream.broker.history.trajectories import Letter
from slipstream.broker.report.telemetry import with_newest_steps
from slipstream.wire.messages.dead_letters import DeadLetter
from slipstream.wire.messages.status import RunStatus

_log = logging.getLogger(__name__)
_POLL_S = 1.0
_WRITE_S = 10.0
_ADVISE_S = 5.0
_LAST_WRITE_S = 10.0  # limit for a slow disk as the broker ends
_SHOWN_PUBLISHES = 60
_SHOWN_EVALUATIONS = 500
Advise: TypeAlias = Callable[[RunStatus, Trends], list[Advisory]]
Write: TypeAlias = Callable[[Path, StoredState], None]


class Snapshot(msgspec.Struct, frozen=True, kw_only=True):
    """Data for the page, taken every second."""

    status: RunStatus  # contains only the newest step, publishes and evaluations
    advisories: list[Advisory]
    advice_ready: bool = True  # false: too early
    live: bool
    point: dict[str, float | None]


class ErrorLog:
    """Logs failures on the way to the page."""

    def __init__(self) -> None:
        self._known: set[tuple[str, str]] = set()

    @contextmanager
    def suppress(self, what: str) -> Iterator[None]:
        """Suppress the errors of a block; each kind of failure is logged once."""
        try:
            yield
        except Exception as error:  # noqa: BLE001 no bug of the page may end a run
            kind = (what, type(error).__name__)
            if kind not in self._known:
                self._known.add(kind)
                _log.error(
                    "the page continues without %s (logged once): %s",
                    what,
                    error,
                    exc_info=None if isinstance(error, OSError) else error,
                )


class _Background:
    """Runs one call at a time in a thread."""

    def __init__(self) -> None:
        self._task: asyncio.Task[None] | None = None

    def start(self, call: Callable[[], None]) -> bool:
        """Start a call unless the one before is running; True if it was started."""
        if self._task is not None and not self._task.done():
            return False
        self._task = asyncio.create_task(asyncio.to_thread(call))
        return True

    async def over(self, timeout_s: float) -> bool:
        """Wait for the running call; True once it is over."""
        if self._task is None:
            return True
        done, _ = await asyncio.wait({self._task}, timeout=timeout_s)
        return bool(done)


class SnapshotRecorder:
    """Samples the state of a run; many may read the last sample. Use it in one event loop."""

    def __init__(
        self,
        status: Callable[[], RunStatus],
        path: Path,
        *,
        letters: Callable[[], Iterable[DeadLetter]] = tuple,
        high_water_bytes: int,
        fsync: str,
        missed: Mapping[int, Mapping[str, float]] = MappingProxyType({}),
        shared_cores: int = 0,
        now: Callable[[], float] | None = None,
        advise: Advise = advise,
        write: Write = write_state,
    ) -> None:
        """Continue with the contents of the file at ``path``, if it is there.

        ``missed`` are figures of learner steps that the file may lack; ``fsync`` is how often the
        store writes to disk, empty if not known; ``shared_cores`` are CPU cores on which all
        processes of the run are, 0 if it is not so; ``now`` is a unix time that never goes back.
        """
        self._status = status
        self._path = path
        self._letters = letters
        self._high_water_bytes = high_water_bytes
        self._fsync = fsync
        self._now = now if now is not None else steady_time()
        self._advise = advise
        self._write_state = write
        self._errors = ErrorLog()
        stored = claim_state(path)
        self.history = RunHistory.of(stored.history) if stored else RunHistory(began_s=self._now())
        self.history.shared_cores = shared_cores
        with self._errors.suppress("steps of before the broker's start"):
            self.history.fill(missed, self._now())
        self._advisories: list[Advisory] = []
        self._advice_ready = False
        self._advising, self._writing = _Background(), _Background()
        self._advised_s = self._written_s = 0.0
        self._newest: RunStatus | None = None  # whole
        self.seen = asyncio.Condition()
        self.snapshot: Snapshot | None = None  # None until the state could be read
        self._take()

    async def run(self) -> None:
        """Take snapshots and write them until cancelled; the last one is written too."""
        try:
            while True:
                self._take()
                async with self.seen:
                    self.seen.notify_all()
                with self._errors.suppress("advice and a current file"):
                    self._start_chores()
                await asyncio.sleep(_POLL_S)
        finally:
            self._take()
            await self._write_last()

    def columns(self) -> HistoryColumns:
        """Return the history up to the newest snapshot, as copies that a thread may read."""
        return self.history.snapshot()

    def steps_after(self, step: float) -> Sequence[Row]:
        """Return the rows of learner steps after this one."""
        return self.history.steps_after(step)

    def letters(self) -> list[Letter]:
        """Return the newest dead letters."""
        return shown_letters(self._letters())

    async def next_change(self) -> None:
        """Return when the next snapshot was taken."""
        async with self.seen:
            await self.seen.wait()

    def _take(self) -> None:
        point = self.snapshot.point if self.snapshot is not None else {}
        with self._errors.suppress("the state of the run"):
            status = self._newest = self._status()
            with self._errors.suppress("the history of the run"):
                self.history.take(status, self._now())
                point = self.history.newest_point()
            self.snapshot = Snapshot(
                status=shown_status(status),
                advisories=self._advisories,
                advice_ready=self._advice_ready,
                live=True,
                point=point,
            )

    def _start_chores(self) -> None:
        """Have threads advise and write, where it is time for it and the last time is over."""
        now_s, snapshot, status = self._now(), self.snapshot, self._newest
        advises = now_s - self._advised_s >= _ADVISE_S
        writes = now_s - self._written_s >= _WRITE_S
        if snapshot is None or status is None or not (advises or writes):
            return
        columns = self.history.snapshot()

        def renew_advice() -> None:
            with self._errors.suppress("advice"):
                trends = trends_of(
                    columns, high_water_bytes=self._high_water_bytes, fsync=self._fsync
                )
                self._advisories = self._advise(status, trends)
                self._advice_ready = is_ready(status, trends)

        if advises and self._advising.start(renew_advice):
            self._advised_s = now_s
        if writes:
            state = self._stored(snapshot, columns)
            if self._writing.start(lambda: self._write(state)):
                self._written_s = now_s

    async def _write_last(self) -> None:
        """Write the last snapshot, after a running write, which must not overwrite it."""
        if self.snapshot is None:
            return
        if await self._writing.over(_LAST_WRITE_S):
            with self._errors.suppress("its last figures"):
                state = self._stored(self.snapshot, self.history.snapshot())
                self._writing.start(lambda: self._write(state))
        if not await self._writing.over(_LAST_WRITE_S):
            _log.error("%s was not written within %.0f s", self._path, _LAST_WRITE_S)

    def _stored(self, snapshot: Snapshot, columns: HistoryColumns) -> StoredState:
        return StoredState(
            at_s=self._now(), status=snapshot.status, history=columns, letters=self.letters()
        )

    def _write(self, state: StoredState) -> None:
        with self._errors.suppress(f"a current {self._path}"):
            self._write_state(self._path, state)


class FinishedRun:
    """A finished run, read from its folder."""

    def __init__(
        self, stored: StoredState, *, high_water_bytes: int, fsync: str, outcome: str = ""
    ) -> None:
        """Show the last stored state, with a better known ``outcome`` if one is given."""
        self._stored = stored
        status = shown_status(stored.status)
        if outcome:
            status = msgspec.structs.replace(status, outcome=outcome)
        trends = trends_of(stored.history, high_water_bytes=high_water_bytes, fsync=fsync)
        self.snapshot = Snapshot(
            status=status,
            advisories=advise(status, trends),
            advice_ready=is_ready(status, trends),
            live=False,
            point={},
        )

    def columns(self) -> HistoryColumns:
        """Return the history of the run."""
        return self._stored.history

    def steps_after(self, step: float) -> Sequence[Row]:
        """Return nothing: no step follows."""
        del step
        return []

    def letters(self) -> list[Letter]:
        """Return the newest dead letters."""
        return self._stored.letters

    async def next_change(self) -> None:
        """Wait a little: nothing changes any more."""
        await asyncio.sleep(_WRITE_S)


def shown_status(
    status: RunStatus,
    *,
    publishes: int = _SHOWN_PUBLISHES,
    evaluations: int = _SHOWN_EVALUATIONS,
    steps: int = 1,
) -> RunStatus:
    """Return a state with only the newest of what grows; all counts at most as many as given."""
    return msgspec.structs.replace(
        with_newest_steps(status, steps),
        publish_history=status.publish_history[-publishes:],
        eval=status.eval[-evaluations:],
    )


def fsync_of(durability: str) -> str:
    """Return a store's sync policy from its own description; empty if it names none.

    It describes itself as in "appendfsync everysec: a crash can lose the last second".
    """
    if durability.startswith("no append-only file"):
        return "no"
    found = re.match(r"appendfsync (always|everysec|no)\b", durability)
    return found[1] if found else ""
