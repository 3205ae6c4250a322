"""Looks at a run every second, for all who look on, and keeps what the page shows."""

import asyncio
import logging
import time
from collections.abc import Callable, Iterable
from pathlib import Path

import msgspec

from broker.dashboard.advisories import Advisory, Trends, advise
from broker.dashboard.history import History, HistoryColumns, StoredState, read_state, write_state
from broker.dashboard.items import Letter, shown_letters
from wire.dead_letters import DeadLetter
from wire.status import RunStatus

_log = logging.getLogger(__name__)
_LOOK_S = 1.0
_WRITE_S = 10.0
_ADVISE_S = 5.0
_SHOWN_PUBLISHES = 60


class Look(msgspec.Struct, frozen=True, kw_only=True):
    """What the page is told every second."""

    status: RunStatus  # with the newest step and publishes only
    advisories: list[Advisory]
    live: bool
    point: dict[str, float | None]


class Recorder:
    """Samples the state of a run; many may read what it saw last. Use it in one event loop."""

    def __init__(
        self,
        status: Callable[[], RunStatus],
        path: Path,
        *,
        letters: Callable[[], Iterable[DeadLetter]] = tuple,
        high_water_bytes: int,
        fsync: str,
        now: Callable[[], float] = time.time,
    ) -> None:
        """Go on with what the file holds, if it is there.

        Args:
            status: returns the state of the run.
            path: of the file that is kept.
            letters: returns the dead letters.
            high_water_bytes: of untrained payloads.
            fsync: how often the store writes to disk.
            now: unix time.
        """
        self._status = status
        self._path = path
        self._letters = letters
        self._high_water_bytes = high_water_bytes
        self._fsync = fsync
        self._now = now
        stored = read_state(path)
        self.history = History.of(stored.history) if stored else History(began_s=now())
        self._step = max(self.history.columns().steps.step, default=0.0)
        self._advisories: list[Advisory] = []
        self._advised_s = 0.0
        self.seen = asyncio.Condition()
        self.look = self._take()

    async def run(self) -> None:
        """Look and write until cancelled; the last look is written too."""
        written_s = 0.0
        try:
            while True:
                self.look = self._take()
                async with self.seen:
                    self.seen.notify_all()
                if self._now() - written_s >= _WRITE_S:
                    written_s = self._now()
                    await asyncio.to_thread(self._write, self._stored())
                await asyncio.sleep(_LOOK_S)
        finally:
            self.look = self._take()
            self._write(self._stored())

    def columns(self) -> HistoryColumns:
        """Return how the run came to what was seen last."""
        return self.history.columns()

    def steps_after(self, step: float) -> list[dict[str, float | None]]:
        """Return the rows of learner steps after this one."""
        return self.history.steps_after(step)

    def letters(self) -> list[Letter]:
        """Return the newest dead letters."""
        return shown_letters(self._letters())

    async def next_look(self) -> None:
        """Return when the run was looked at again."""
        async with self.seen:
            await self.seen.wait()

    def _take(self) -> Look:
        status, now = self._status(), self._now()
        if status.steps < self._step:
            self.history.went_back(status.steps)
            self._step = status.steps
        for point in status.steps_history:
            if point.step > self._step:
                self.history.step(point, now - max(0.0, status.elapsed_s - point.at_s))
                self._step = point.step
        self.history.sample(status, now)
        shown = msgspec.structs.replace(
            status,
            steps_history=status.steps_history[-1:],
            publish_history=status.publish_history[-_SHOWN_PUBLISHES:],
        )
        return Look(
            status=shown,
            advisories=self._advised(status, now),
            live=True,
            point=self.history.newest_point(),
        )

    def _advised(self, status: RunStatus, now_s: float) -> list[Advisory]:
        if now_s - self._advised_s >= _ADVISE_S:
            self._advised_s = now_s
            self._advisories = advise(status, self._trends())
        return self._advisories

    def _trends(self) -> Trends:
        return _trends(
            self.history.columns(), high_water_bytes=self._high_water_bytes, fsync=self._fsync
        )

    def _stored(self) -> StoredState:
        return StoredState(
            at_s=self._now(),
            status=self.look.status,
            history=self.history.columns(),
            letters=self.letters(),
        )

    def _write(self, state: StoredState) -> None:
        try:
            write_state(self._path, state)
        except OSError as error:
            _log.error("%s cannot be written: %s", self._path, error.strerror)


class FinishedRun:
    """What a run folder holds of a run that has ended."""

    def __init__(self, stored: StoredState, *, high_water_bytes: int, fsync: str) -> None:
        """Show it.

        Args:
            stored: as it was written last.
            high_water_bytes: of untrained payloads.
            fsync: how often the store wrote to disk.
        """
        self._stored = stored
        trends = _trends(stored.history, high_water_bytes=high_water_bytes, fsync=fsync)
        self.look = Look(
            status=stored.status, advisories=advise(stored.status, trends), live=False, point={}
        )

    def columns(self) -> HistoryColumns:
        """Return how the run went."""
        return self._stored.history

    def steps_after(self, step: float) -> list[dict[str, float | None]]:
        """Return nothing: no step follows."""
        del step
        return []

    def letters(self) -> list[Letter]:
        """Return the newest dead letters."""
        return self._stored.letters

    async def next_look(self) -> None:
        """Wait a little: nothing changes any more."""
        await asyncio.sleep(_WRITE_S)


def _trends(columns: HistoryColumns, *, high_water_bytes: int, fsync: str) -> Trends:
    return Trends(
        at_s=columns.time.at_s,
        series=columns.time.series,
        steps_at_s=columns.steps.at_s,
        steps=columns.steps.series,
        high_water_bytes=high_water_bytes,
        fsync=fsync,
    )
