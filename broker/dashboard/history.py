"""How the figures of a run moved: bounded however long it runs, and kept in the run folder.

Two tables of columns: one row per interval of time, and one per learner step. A table that is full
merges its rows pairwise, so that old and new are shown at the same, coarser, resolution.
"""

import math
from array import array
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated

import msgspec

from broker.dashboard.items import Letter
from broker.dashboard.rates import Rates
from wire.status import RunStatus, StepPoint

EVERY_S = 2.0  # of a new run
MAX_ROWS = 2_000
MAX_SERIES = 512  # names in a table
_MAX_NAME = 100  # characters
_COUNTED = (
    "dropped:",
    "version:",
    "issued",
    "trained",
    "answers",
    "retracted",
)  # of two rows the later one counts
_MISSING = math.nan


class Table:
    """Rows of numbers by name, in order of a growing key."""

    def __init__(self, *, max_rows: int = MAX_ROWS, max_series: int = MAX_SERIES) -> None:
        """Make an empty table.

        Args:
            max_rows: an even number; a full table is merged to half of it.
            max_series: further names are counted, not kept.
        """
        self._max_rows = max_rows
        self._max_series = max_series
        self.keys: array[float] = array("d")
        self.series: dict[str, array[float]] = {}
        self.num_left_out = 0  # values of names that there was no room for

    def __len__(self) -> int:
        """Return how many rows there are."""
        return len(self.keys)

    @property
    def num_bytes(self) -> int:
        """Return how much memory the numbers take."""
        return self.keys.itemsize * len(self.keys) * (1 + len(self.series))

    def add(self, key: float, values: Mapping[str, float | None]) -> bool:
        """Append a row; tell whether rows were merged for it."""
        is_full = len(self.keys) >= self._max_rows
        if is_full:
            self._merge()
        self.keys.append(key)
        for name, value in values.items():
            column = self._column(name[:_MAX_NAME])
            if column is None:
                self.num_left_out += 1
            elif value is not None:
                column[-1] = value
        for column in self.series.values():
            if len(column) < len(self.keys):
                column.append(_MISSING)
        return is_full

    def _column(self, name: str) -> "array[float] | None":
        """Return a column with a place for the newest row; None if there is no room for it."""
        column = self.series.get(name)
        if column is None:
            if len(self.series) >= self._max_series:
                return None
            column = self.series[name] = array("d", [_MISSING]) * (len(self.keys) - 1)
        if len(column) < len(self.keys):
            column.append(_MISSING)
        return column

    def forget_after(self, key: float) -> None:
        """Remove the rows of larger keys: they did not happen."""
        count = bisect_right(self.keys, key)
        del self.keys[count:]
        for column in self.series.values():
            del column[count:]

    def _merge(self) -> None:
        self.keys = self.keys[1::2]
        for name, column in self.series.items():
            pairs = zip(column[::2], column[1::2], strict=True)
            merge = _later if name.startswith(_COUNTED) else _mean
            self.series[name] = array("d", [merge(*pair) for pair in pairs])

    def columns(self) -> dict[str, list[float | None]]:
        """Return the columns; None where a row has no such value."""
        return {name: _shown(column) for name, column in sorted(self.series.items())}

    def row(self, place: int) -> dict[str, float | None]:
        """Return a row."""
        return {name: _number(column[place]) for name, column in sorted(self.series.items())}


class TimeColumns(msgspec.Struct, frozen=True, kw_only=True):
    """One row per interval."""

    every_s: float
    at_s: list[float]  # since the run began
    series: dict[str, list[float | None]]


class StepColumns(msgspec.Struct, frozen=True, kw_only=True):
    """One row per learner step, or per some of them."""

    step: list[float]
    at_s: list[float]
    series: dict[str, list[float | None]]


class HistoryColumns(msgspec.Struct, frozen=True, kw_only=True):
    """All that is kept, as the page gets it and as it is written."""

    began_s: float  # unix time
    time: TimeColumns
    steps: StepColumns


class StoredState(msgspec.Struct, frozen=True, kw_only=True):
    """What a run folder holds for whoever looks at a run that has ended."""

    revision: Annotated[int, msgspec.Meta(ge=1, le=1)] = 1
    at_s: float  # unix time
    status: RunStatus
    history: HistoryColumns
    letters: list[Letter] = []


class History:
    """Takes samples of the state of a run."""

    def __init__(self, *, began_s: float, every_s: float = EVERY_S) -> None:
        """Begin a history.

        Args:
            began_s: unix time at which the run began.
            every_s: seconds between two samples.
        """
        self.began_s = began_s
        self.every_s = every_s
        self._time = Table()
        self._steps = Table()
        self._rates = Rates()
        self._sampled_s = -math.inf  # unix time

    def sample(self, status: RunStatus, now_s: float) -> bool:
        """Add a row if it is time for one; tell whether it was.

        Args:
            status: the state of the run.
            now_s: unix time.
        """
        if now_s - self._sampled_s < self.every_s:
            return False
        self._sampled_s = now_s
        if self._time.add(now_s - self.began_s, self._rates.take(status)):
            self.every_s *= 2
        return True

    def step(self, point: StepPoint, now_s: float) -> None:
        """Add a learner step."""
        self._steps.add(point.step, {"at_s": now_s - self.began_s, **point.metrics})

    def went_back(self, step: int) -> None:
        """Forget learner steps after this one: they did not happen."""
        self._steps.forget_after(step)

    @property
    def num_bytes(self) -> int:
        """Return how much memory the numbers take."""
        return self._time.num_bytes + self._steps.num_bytes

    def newest_point(self) -> dict[str, float | None]:
        """Return the newest sample, with its ``at_s``; empty if there is none."""
        if not len(self._time):
            return {}
        return {"at_s": self._time.keys[-1], **self._time.row(-1)}

    def steps_after(self, step: float) -> list[dict[str, float | None]]:
        """Return the rows of learner steps after this one, with ``step`` and ``at_s``."""
        return [
            {"step": self._steps.keys[row], **self._steps.row(row)}
            for row in range(bisect_right(self._steps.keys, step), len(self._steps))
        ]

    def columns(self) -> HistoryColumns:
        """Return all that is kept."""
        steps = self._steps.columns()
        return HistoryColumns(
            began_s=self.began_s,
            time=TimeColumns(
                every_s=self.every_s, at_s=list(self._time.keys), series=self._time.columns()
            ),
            steps=StepColumns(
                step=list(self._steps.keys),
                at_s=[one or 0.0 for one in steps.pop("at_s", [])],
                series=steps,
            ),
        )

    @classmethod
    def of(cls, columns: HistoryColumns) -> "History":
        """Go on with what another broker wrote."""
        history = cls(began_s=columns.began_s, every_s=columns.time.every_s)
        _fill(history._time, columns.time.at_s, columns.time.series)
        _fill(
            history._steps,
            columns.steps.step,
            {**columns.steps.series, "at_s": list(columns.steps.at_s)},
        )
        return history


def write_state(path: Path, state: StoredState) -> None:
    """Write a state, at once or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(f".{path.name}.unfinished")
    unfinished.write_bytes(msgspec.msgpack.encode(state))
    unfinished.replace(path)


def read_state(path: Path) -> StoredState | None:
    """Return the state in a file; None if there is none that can be read."""
    try:
        return msgspec.msgpack.decode(path.read_bytes(), type=StoredState)
    except (OSError, msgspec.DecodeError):
        return None


def _fill(
    table: Table, keys: Sequence[float], series: Mapping[str, Sequence[float | None]]
) -> None:
    count = min([len(keys), MAX_ROWS, *map(len, series.values())])
    table.keys = array("d", keys[:count])
    table.series = {
        name: array("d", [_MISSING if one is None else one for one in column[:count]])
        for name, column in list(series.items())[:MAX_SERIES]
    }


def _shown(values: Sequence[float]) -> list[float | None]:
    return [_number(one) for one in values]


def _number(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _mean(first: float, second: float) -> float:
    if math.isnan(first):
        return second
    return first if math.isnan(second) else (first + second) / 2


def _later(first: float, second: float) -> float:
    return first if math.isnan(second) else second
