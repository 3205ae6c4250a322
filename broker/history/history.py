"""History of the figures of a run, bounded however long it runs.

Two tables of columns: one row per interval of time, and one per learner step or per so many of
them.
"""

import math
import time
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from slipstream.broker.history.columns import HistoryColumns, StepColumns, TimeColumns
from slipstream.broker.history.rates import RunRates
from slipstream.broker.history.table import Row, Rows, Table
from slipstream.wire.messages.status import RunStatus, StepPoint

EVERY_S = 2.0  # interval of a new run


def steady_time(
    unix: Callable[[], float] = time.time, monotonic: Callable[[], float] = time.monotonic
) -> Callable[[], float]:
    """Return a clock that shows unix time now, and from here on never jumps."""
    began_s = unix() - monotonic()
    return lambda: began_s + monotonic()


class RunHistory:
    """Takes samples of the state of a run."""

    def __init__(self, *, began_s: float, every_s: float = EVERY_S) -> None:
        """Start a history at a unix time, with a sample every so many seconds."""
        self.began_s = began_s
        self.every_s = every_s
        self.shared_cores = 0  # CPU cores that all processes share; 0 if they do not
        self.every_steps = 1  # learner steps in a row
        self._time = Table()
        self._steps = Table()
        self._rates = RunRates()
        self._back_s = 0.0  # total time that the clock was set back
        self._sampled_s = -math.inf  # since the run started
        self._step = 0.0  # the newest that is known

    def take(self, status: RunStatus, now_s: float) -> bool:
        """Take in all that is new in a state; True if a row of time was added."""
        self._since_began(now_s)
        if status.steps < self._step:
            self.went_back(status.steps)
        for point in status.steps_history:
            if point.step > self._step:
                self.step(point, now_s - max(0.0, status.elapsed_s - point.at_s))
        return self.sample(status, now_s)

    def sample(self, status: RunStatus, now_s: float) -> bool:
        """Add a row if one is due, and return whether it was; ``now_s`` may go back."""
        at_s = self._since_began(now_s)
        if at_s - self._sampled_s < self.every_s:
            return False
        self._sampled_s = at_s
        if self._time.add(at_s, self._rates.take(status)):
            self.every_s *= 2
        return True

    def _since_began(self, now_s: float) -> float:
        """Return the time of the run, which grows although the clock was set back."""
        at_s = now_s - self.began_s + self._back_s
        newest_s = self._time.keys[-1] if len(self._time) else -math.inf
        if at_s < newest_s:
            self._back_s += newest_s - at_s
            return newest_s
        return at_s

    def step(self, point: StepPoint, now_s: float) -> None:
        """Add a learner step."""
        at_s = now_s - self.began_s + self._back_s
        values = {"at_s": at_s, **point.metrics}
        keys = self._steps.keys
        self._step = point.step
        if len(keys) > 1 and point.step - keys[-2] <= self.every_steps:
            share = (point.step - keys[-1]) / (point.step - keys[-2])
            self._steps.blend(point.step, values, share=share)
        elif self._steps.add(point.step, values):
            self.every_steps *= 2

    def fill(self, missed: Mapping[int, Mapping[str, float]], now_s: float) -> None:
        """Add figures of learner steps that were not observed, at times evenly spread."""
        steps = sorted(step for step in missed if step > self._step)
        at_s = self._steps.series.get("at_s", self._steps.keys)
        newest_s = max([*self._time.keys[-1:], *at_s[-1:]], default=0.0)
        lasted_s = max(0.0, self._since_began(now_s) - newest_s)
        began_s = now_s - lasted_s
        for place, step in enumerate(steps, start=1):
            point = StepPoint(step=step, at_s=0.0, metrics=dict(missed[step]))
            self.step(point, began_s + lasted_s * place / (len(steps) + 1))

    def went_back(self, step: int) -> None:
        """Discard learner steps after this one."""
        self._steps.forget_after(step)
        self._step = min(self._step, step)

    @property
    def num_bytes(self) -> int:
        """Memory of the numbers."""
        return self._time.num_bytes + self._steps.num_bytes

    def newest_point(self) -> Row:
        """Return the newest sample, with its ``at_s``, or an empty row."""
        if not len(self._time):
            return {}
        return {"at_s": float(self._time.keys[-1]), **self._time.row(-1)}

    def steps_after(self, step: float) -> Rows:
        """Return the rows that hold learner steps after this one, with ``step`` and ``at_s``."""
        return self._steps.rows(bisect_right(self._steps.keys, step))

    def columns(self) -> HistoryColumns:
        """Return all that is kept, as lists with None where a row has no value."""
        return self._columns(self._time.keys.tolist(), self._time.columns(), self._steps.columns())

    def snapshot(self) -> HistoryColumns:
        """Return all that is kept as copies that a thread may read; cheap."""
        return self._columns(self._time.keys.tolist(), self._time.copies(), self._steps.copies())

    def _columns(
        self, at_s: Sequence[float], series: Mapping[str, Any], steps: Mapping[str, Any]
    ) -> HistoryColumns:
        figures = dict(steps)
        return HistoryColumns(
            began_s=self.began_s,
            shared_cores=self.shared_cores,
            time=TimeColumns(every_s=self.every_s, at_s=at_s, series=series),
            steps=StepColumns(
                step=self._steps.keys.tolist(),
                every_steps=self.every_steps,
                at_s=[float(value or 0.0) for value in figures.pop("at_s", ())],
                series=figures,
            ),
        )

    @classmethod
    def of(cls, columns: HistoryColumns) -> "RunHistory":
        """Continue the history that another broker wrote."""
        history = cls(began_s=columns.began_s, every_s=columns.time.every_s)
        history.shared_cores = columns.shared_cores
        history.every_steps = columns.steps.every_steps
        history._time.fill(columns.time.at_s, columns.time.series)
        history._sampled_s = float(history._time.keys[-1]) if len(history._time) else -math.inf
        series = {"at_s": columns.steps.at_s, **columns.steps.series}
        history._steps.fill(columns.steps.step, series)
        history._step = max(history._steps.keys, default=0.0)
        return history
