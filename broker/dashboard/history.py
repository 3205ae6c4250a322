"""How the figures of a run moved: bounded however long it runs, and kept in the run folder.

Two tables of columns: one row per interval of time, and one per learner step or per so many of
them. A table that is full merges its rows pairwise, and takes its next rows at the same, coarser,
resolution: all rows of a table cover equally much, but for the newest one, which may still
grow.
"""

import logging
import math
import secrets
import time
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import islice
from pathlib import Path
from typing import Annotated, Any, TypeAlias, overload

import msgspec
import numpy as np
from typing_extensions import override

from slipstream.broker.dashboard.advisories import Column, Trends
from slipstream.broker.dashboard.items import Letter
from slipstream.broker.dashboard.rates import Rates
from slipstream.wire.messages.status import RunStatus, StepPoint

_log = logging.getLogger(__name__)
EVERY_S = 2.0  # of a new run
MAX_ROWS = 2_000
MAX_SERIES = 512  # names in a table
KEPT_FREE = 128  # of them for figures of a whole step: those by lag do not take the last places
_MAX_NAME = 100  # characters
_COUNTED = (
    "dropped:",
    "version:",
    "issued",
    "trained",
    "answers",
    "retracted",
    "at_s",
)  # of two rows the later one counts
_BY_LAG = "@lag"
_HIGHEST = "_max"  # ends the names of figures of which, of two rows, the larger counts
_MISSING = math.nan
Row: TypeAlias = dict[str, float | None]
Numbers: TypeAlias = np.ndarray[tuple[int], np.dtype[np.float64]]  # NaN: there is no value


def steady_time(
    unix: Callable[[], float] = time.time, monotonic: Callable[[], float] = time.monotonic
) -> Callable[[], float]:
    """Return a clock that shows unix time now, and from here on never jumps.

    Args:
        unix: may be set at any time, also back.
        monotonic: only grows.
    """
    began_s = unix() - monotonic()
    return lambda: began_s + monotonic()


class KnownColumns(Mapping[str, Column]):
    """Columns with None where a row has no value; each is converted when it is read first."""

    def __init__(self, columns: Mapping[str, Column]) -> None:
        self._columns = dict(columns)

    @override
    def __getitem__(self, name: str) -> Column:
        column: object = self._columns[name]
        if isinstance(column, np.ndarray):
            self._columns[name] = _shown(column)
        return self._columns[name]

    @override
    def __iter__(self) -> Iterator[str]:
        return iter(self._columns)

    @override
    def __len__(self) -> int:
        return len(self._columns)


class Rows(Sequence[Row]):
    """Rows of a table, made one by one as they are read."""

    def __init__(self, columns: Mapping[str, Numbers], count: int) -> None:
        """Show columns of equal length as rows."""
        self._columns = columns
        self._count = count

    @override
    def __len__(self) -> int:
        return self._count

    @overload
    def __getitem__(self, place: int) -> Row: ...
    @overload
    def __getitem__(self, place: slice) -> list[Row]: ...
    @override
    def __getitem__(self, place: int | slice) -> Row | list[Row]:
        if isinstance(place, slice):
            return [self[i] for i in range(*place.indices(self._count))]
        if not -self._count <= place < self._count:
            raise IndexError(place)
        return {name: _number(float(column[place])) for name, column in self._columns.items()}


class Table:
    """Rows of numbers by name, in order of a growing key."""

    def __init__(
        self,
        *,
        max_rows: int = MAX_ROWS,
        max_series: int = MAX_SERIES,
        kept_free: int = KEPT_FREE,
    ) -> None:
        """Make an empty table.

        Args:
            max_rows: an even number; a full table is merged to half of it.
            max_series: further names are counted, not kept.
            kept_free: places that figures by version lag leave to others.
        """
        self._max_rows = max_rows
        self._max_series = max_series
        self._kept_free = kept_free
        self._keys = np.full(max_rows, _MISSING)
        self._cells: dict[str, Numbers] = {}  # max_rows each
        self._count = 0
        self.num_left_out = 0  # values of names that there was no room for

    def __len__(self) -> int:
        """Return how many rows there are."""
        return self._count

    @property
    def keys(self) -> Numbers:
        """Keys of the rows."""
        return self._keys[: self._count]

    @property
    def series(self) -> dict[str, Numbers]:
        """Columns by name."""
        return {name: column[: self._count] for name, column in self._cells.items()}

    @property
    def num_bytes(self) -> int:
        """Memory of the numbers."""
        return self._keys.nbytes * (1 + len(self._cells))

    def add(self, key: float, values: Mapping[str, float | None]) -> bool:
        """Append a row; True if rows were merged for it."""
        known = _floats(values)
        is_full = self._count >= self._max_rows
        if is_full:
            self._merge()
        self._count += 1
        self._keys[self._count - 1] = key
        for name, value in known.items():
            if (own := self._column(name)) is not None:
                own[self._count - 1] = value
        return is_full

    def blend(self, key: float, values: Mapping[str, float | None], *, share: float) -> None:
        """Take a row into the newest one, which gets its key.

        Args:
            key: not smaller than that of the newest row.
            values: by name.
            share: of these in a mean with those that are there.
        """
        known = _floats(values)
        newest = self._count - 1
        self._keys[newest] = key
        for name, value in known.items():
            if (column := self._column(name)) is None or math.isnan(value):
                continue
            if name.startswith(_COUNTED) or math.isnan(column[newest]):
                column[newest] = value
            elif _is_highest(name):
                column[newest] = max(column[newest], value)
            else:
                column[newest] += (value - column[newest]) * share

    def _column(self, name: str) -> Numbers | None:
        """Return a column, a new one too; None, and a count of it, if there is no room for it."""
        column = self._cells.get(name)
        if column is None:
            room = self._max_series - (self._kept_free if _BY_LAG in name else 0)
            if len(self._cells) >= room:
                self.num_left_out += 1
                return None
            column = self._cells[name] = np.full(self._max_rows, _MISSING)
        return column

    def forget_after(self, key: float) -> None:
        """Remove the rows of larger keys: they did not happen."""
        self._cut(bisect_right(self.keys, key))

    def _cut(self, count: int) -> None:
        self._count = count
        for column in self._cells.values():
            column[count:] = _MISSING

    def _merge(self) -> None:
        """Merge pairs of rows; where one of a pair lacks a value, the other's counts."""
        half = self._count // 2
        self._keys[:half] = self._keys[1 : 2 * half : 2]
        for name, column in self._cells.items():
            first, second = column[0 : 2 * half : 2], column[1 : 2 * half : 2]
            if _is_highest(name):
                merged = np.fmax(first, second)
            else:
                merged = second if name.startswith(_COUNTED) else (first + second) / 2
                merged = np.where(np.isnan(second), first, merged)
                merged = np.where(np.isnan(first), second, merged)
            column[:half] = merged
        self._cut(half)

    def fill(self, keys: Sequence[float], series: Mapping[str, Column]) -> None:
        """Take in columns as they were written, as far as there is room."""
        self._count = min([len(keys), self._max_rows, *map(len, series.values())])
        self._keys[: self._count] = keys[: self._count]
        for name, column in islice(series.items(), self._max_series):
            cells = self._cells[name] = np.full(self._max_rows, _MISSING)
            cells[: self._count] = np.array(column[: self._count], float)  # None becomes NaN

    def columns(self) -> dict[str, list[float | None]]:
        """Return the columns; None where a row has no such value."""
        return {name: _shown(column) for name, column in sorted(self.series.items())}

    def copies(self) -> dict[str, Numbers]:
        """Return the columns as numbers, NaN where a row has no such value."""
        return {name: column.copy() for name, column in sorted(self.series.items())}

    def rows(self, first: int) -> Rows:
        """Return the rows from one on, with their keys as ``step``, whatever is added later."""
        columns = {name: column[first:].copy() for name, column in sorted(self.series.items())}
        steps = self.keys[first:].copy()
        return Rows({"step": steps, **columns}, len(steps))

    def row(self, place: int) -> Row:
        """Return a row."""
        return {name: _number(float(col[place])) for name, col in sorted(self.series.items())}


class TimeColumns(msgspec.Struct, frozen=True, kw_only=True):
    """One row per interval."""

    every_s: float
    at_s: Sequence[float]  # since the run started
    series: Mapping[str, Column]


class StepColumns(msgspec.Struct, frozen=True, kw_only=True):
    """One row per learner step, or per some of them."""

    step: Sequence[float]  # the newest of each row
    every_steps: int = 1  # learner steps that a row covers
    at_s: Sequence[float]
    series: Mapping[str, Column]


class HistoryColumns(msgspec.Struct, frozen=True, kw_only=True):
    """All that is kept, as the page gets it and as it is written.

    Columns may be lists, or arrays with NaN where a row has no value: ``encode_json`` and
    ``write_state`` take both.
    """

    began_s: float  # unix time
    time: TimeColumns
    steps: StepColumns


class StoredState(msgspec.Struct, frozen=True, kw_only=True):
    """What a run folder holds for viewers of a run that has ended."""

    revision: Annotated[int, msgspec.Meta(ge=2, le=2)] = 2
    at_s: float  # unix time
    status: RunStatus
    history: HistoryColumns
    letters: list[Letter] = []


class History:
    """Takes samples of the state of a run."""

    def __init__(self, *, began_s: float, every_s: float = EVERY_S) -> None:
        """Start a history.

        Args:
            began_s: unix time at which the run started.
            every_s: seconds between two samples.
        """
        self.began_s = began_s
        self.every_s = every_s
        self.every_steps = 1  # learner steps in a row
        self._time = Table()
        self._steps = Table()
        self._rates = Rates()
        self._back_s = 0.0  # by which the clock was set back, as far as it was noticed
        self._sampled_s = -math.inf  # since the run started
        self._step = 0.0  # the newest that is known

    def take(self, status: RunStatus, now_s: float) -> bool:
        """Take in all that is new in a state; True if a row of time was added.

        Args:
            status: the state of the run.
            now_s: unix time.
        """
        self._since_began(now_s)
        if status.steps < self._step:
            self.went_back(status.steps)
        for point in status.steps_history:
            if point.step > self._step:
                self.step(point, now_s - max(0.0, status.elapsed_s - point.at_s))
        return self.sample(status, now_s)

    def sample(self, status: RunStatus, now_s: float) -> bool:
        """Add a row if one is due; True if it was.

        Args:
            status: the state of the run.
            now_s: unix time; where it went back, the time of the run still grows.
        """
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
        """Add learner steps that were not observed; their times are unknown, so evenly spread.

        Args:
            missed: figures by step.
            now_s: unix time.
        """
        steps = sorted(step for step in missed if step > self._step)
        at_s = self._steps.series.get("at_s", self._steps.keys)
        newest_s = max([*self._time.keys[-1:], *at_s[-1:]], default=0.0)
        lasted_s = max(0.0, self._since_began(now_s) - newest_s)
        began_s = now_s - lasted_s
        for place, step in enumerate(steps, start=1):
            point = StepPoint(step=step, at_s=0.0, metrics=dict(missed[step]))
            self.step(point, began_s + lasted_s * place / (len(steps) + 1))

    def went_back(self, step: int) -> None:
        """Forget learner steps after this one: they did not happen."""
        self._steps.forget_after(step)
        self._step = min(self._step, step)

    @property
    def num_bytes(self) -> int:
        """Return how much memory the numbers take."""
        return self._time.num_bytes + self._steps.num_bytes

    def newest_point(self) -> Row:
        """Return the newest sample, with its ``at_s``; empty if there is none."""
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
        self,
        at_s: Sequence[float],
        series: Mapping[str, Any],
        steps: Mapping[str, Any],
    ) -> HistoryColumns:
        figures = dict(steps)
        return HistoryColumns(
            began_s=self.began_s,
            time=TimeColumns(every_s=self.every_s, at_s=at_s, series=series),
            steps=StepColumns(
                step=self._steps.keys.tolist(),
                every_steps=self.every_steps,
                at_s=[float(one or 0.0) for one in figures.pop("at_s", ())],
                series=figures,
            ),
        )

    @classmethod
    def of(cls, columns: HistoryColumns) -> "History":
        """Continue the history that another broker wrote."""
        history = cls(began_s=columns.began_s, every_s=columns.time.every_s)
        history.every_steps = columns.steps.every_steps
        history._time.fill(columns.time.at_s, columns.time.series)
        history._sampled_s = float(history._time.keys[-1]) if len(history._time) else -math.inf
        series = {"at_s": columns.steps.at_s, **columns.steps.series}
        history._steps.fill(columns.steps.step, series)
        history._step = max(history._steps.keys, default=0.0)
        return history


def trends_of(columns: HistoryColumns, *, high_water_bytes: int, fsync: str) -> Trends:
    """Return the history as rules about a run read it; nothing is copied.

    Args:
        columns: that do not change while they are read.
        high_water_bytes: broker.high_water_bytes.
        fsync: how the store is synced; empty is not known.
    """
    return Trends(
        at_s=columns.time.at_s,
        series=KnownColumns(columns.time.series),
        steps_at_s=columns.steps.at_s,
        steps=KnownColumns(columns.steps.series),
        every_steps=columns.steps.every_steps,
        high_water_bytes=high_water_bytes,
        fsync=fsync,
    )


# ---- files -------------------------------------------------------------------


def encode_json(value: object) -> bytes:
    """Return JSON of anything that holds columns; column by column, so that others get a turn."""
    return msgspec.json.encode(value, enc_hook=lambda one: _column_of(one).tolist())


def write_state(path: Path, state: StoredState) -> None:
    """Write a state, at once or not at all."""
    data = msgspec.msgpack.encode(state, enc_hook=lambda one: _shown(_column_of(one)))
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(f".{path.name}.{secrets.token_hex(4)}.unfinished")
    try:
        unfinished.write_bytes(data)
        unfinished.replace(path)
    finally:
        unfinished.unlink(missing_ok=True)


def read_state(path: Path) -> StoredState | None:
    """Return the state in a file; None if there is none that can be read."""
    try:
        return _decode(path)
    except (OSError, msgspec.DecodeError):
        return None


def claim_state(path: Path) -> StoredState | None:
    """Return the state that an earlier broker wrote, if there is one that can be read.

    Another one is put aside: it is about to be written over.
    """
    with suppress(OSError):  # of brokers that were killed while they wrote
        for left in path.parent.glob(f".{path.name}.*.unfinished"):
            left.unlink()
    try:
        return _decode(path)
    except FileNotFoundError:
        return None
    except (OSError, msgspec.DecodeError) as error:
        aside = path.with_name(f"{path.name}.unreadable")
        _log.warning(
            "the page starts without the history of the run: %s cannot be read (%s) and is kept "
            "as %s",
            *(path, error, aside.name),
        )
        with suppress(OSError):
            path.replace(aside)
        return None


def _decode(path: Path) -> StoredState:
    return msgspec.msgpack.decode(path.read_bytes(), type=StoredState)


def _column_of(value: object) -> Numbers:
    if not isinstance(value, np.ndarray):
        raise NotImplementedError(f"cannot encode {type(value).__name__}")
    return value


# ---- numbers -----------------------------------------------------------------


def _is_highest(name: str) -> bool:
    return name.partition(_BY_LAG)[0].endswith(_HIGHEST)


def _floats(values: Mapping[str, float | None]) -> dict[str, float]:
    """Return the values as numbers, all of them checked before any of them is kept."""
    return {
        name[:_MAX_NAME]: _MISSING if one is None else float(one) for name, one in values.items()
    }


def _shown(values: Numbers) -> list[float | None]:
    """Return numbers, None for what is none; nearly always all of them are."""
    numbers = values.tolist()
    return [*numbers] if np.isfinite(values).all() else [_number(one) for one in numbers]


def _number(value: float) -> float | None:
    return value if math.isfinite(value) else None
