"""The history of a run as one who looks on collects it, and what there is to say about it."""

import time
from collections.abc import Callable, Mapping, Sequence

from broker.dashboard.advisories import Advisory, Trends, advise
from broker.dashboard.history import History, HistoryColumns
from wire.status import RunStatus

_NOW_S = 10.0  # over which a share of now is taken
_LOOK_S = 5.0


class Recent:
    """Goes on with the history that the broker wrote, from states of the run as they come."""

    def __init__(
        self,
        written: HistoryColumns | None,
        *,
        high_water_bytes: int,
        fsync: str,
        now: Callable[[], float] = time.time,
    ) -> None:
        """Begin with what was written, or with nothing.

        Args:
            written: by the broker of the run.
            high_water_bytes: broker.high_water_bytes.
            fsync: how the store is synced; empty is not known.
            now: unix time.
        """
        self._high_water_bytes = high_water_bytes
        self._fsync = fsync
        self._now = now
        self._history = History.of(written) if written else None
        self._step = max(written.steps.step, default=0.0) if written else 0.0
        self._looked_s = 0.0
        self._newest: RunStatus | None = None
        self._advisories: list[Advisory] = []
        self._busy: dict[str, float | None] = {}
        self._steps: Mapping[str, Sequence[float | None]] = {}

    def add(self, status: RunStatus) -> None:
        """Take in the next state; one that was there before is known already."""
        if status is self._newest:
            return
        self._newest = status
        now_s = self._now()
        if self._history is None:
            self._history = History(began_s=now_s - status.elapsed_s)
        if status.steps < self._step:
            self._history.went_back(status.steps)
            self._step = status.steps
        for point in status.steps_history:
            if point.step > self._step:
                self._history.step(point, now_s - max(0.0, status.elapsed_s - point.at_s))
                self._step = point.step
        self._history.sample(status, now_s)
        self.look(status)

    def look(self, status: RunStatus) -> None:
        """Look at what is known so far, once every few seconds."""
        now_s = self._now()
        if self._history is not None and now_s - self._looked_s >= _LOOK_S:
            self._looked_s = now_s
            self._look(status, self._history.columns())

    def busy(self, process: str) -> float | None:
        """Return the share of the last seconds that a process was not waiting."""
        return self._busy.get(f"busy:{process}")

    def curve(self, name: str) -> list[float]:
        """Return a figure of the learner steps so far, without those that lack it."""
        return [value for value in self._steps.get(name, ()) if value is not None]

    def advisories(self) -> list[Advisory]:
        """Return what there is to say, the worst first."""
        return self._advisories

    def _look(self, status: RunStatus, columns: HistoryColumns) -> None:
        at_s, series = columns.time.at_s, columns.time.series
        rows = sum(1 for one in at_s if one >= at_s[-1] - _NOW_S)
        names = (name for name in series if name.startswith("busy:"))
        self._busy = {name: _mean(series[name][-rows:]) for name in names}
        self._steps = columns.steps.series
        trends = Trends(
            at_s=at_s,
            series=series,
            steps_at_s=columns.steps.at_s,
            steps=columns.steps.series,
            high_water_bytes=self._high_water_bytes,
            fsync=self._fsync,
        )
        self._advisories = advise(status, trends)


def _mean(column: Sequence[float | None]) -> float | None:
    known = [value for value in column if value is not None]
    return sum(known) / len(known) if known else None
