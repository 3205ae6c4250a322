"""Tables of numbers by name, bounded: a full one merges its rows pairwise.

It then takes its next rows at the same, coarser, resolution: all rows of a table cover equally
much, but for the newest one, which may still grow.
"""

import math
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from itertools import islice
from typing import TypeAlias, overload

import numpy as np
from typing_extensions import override

from slipstream.broker.advisories.view import Column

MAX_ROWS = 2_000
MAX_SERIES = 512  # names in a table
KEPT_FREE = 128  # places for figures of a whole step: figures by lag do not take the last ones
_MAX_NAME = 100  # characters
# The later of two rows counts.
_COUNTED = ("dropped:", "version:", "issued", "trained", "answers", "retracted", "at_s")
_BY_LAG = "@lag"
_HIGHEST = ("_max", "/max")  # endings of names: the larger of two rows counts
_MISSING = math.nan
Row: TypeAlias = dict[str, float | None]
Numbers: TypeAlias = np.ndarray[tuple[int], np.dtype[np.float64]]  # NaN: there is no value


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
        return {name: number(float(column[place])) for name, column in self._columns.items()}


class Table:
    """Rows of numbers by name, in order of a growing key."""

    def __init__(
        self, *, max_rows: int = MAX_ROWS, max_series: int = MAX_SERIES, kept_free: int = KEPT_FREE
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
        """Return the number of rows."""
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
        """Take a row into the newest one, which gets its key; ``share`` is its weight in a mean."""
        known = _floats(values)
        newest = self._count - 1
        self._keys[newest] = key
        for name, value in known.items():
            if (column := self._column(name)) is None or math.isnan(value):
                continue
            if name.startswith(_COUNTED) or math.isnan(column[newest]):
                column[newest] = value
            elif is_maximum(name):
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
            if is_maximum(name):
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
        return {name: shown(column) for name, column in sorted(self.series.items())}

    def copies(self) -> dict[str, Numbers]:
        """Return the columns as numbers, NaN where a row has no such value."""
        return {name: column.copy() for name, column in sorted(self.series.items())}

    def rows(self, first: int) -> Rows:
        """Return a snapshot of the rows from one on, with their keys as ``step``."""
        columns = {name: column[first:].copy() for name, column in sorted(self.series.items())}
        steps = self.keys[first:].copy()
        return Rows({"step": steps, **columns}, len(steps))

    def row(self, place: int) -> Row:
        """Return a row."""
        return {name: number(float(col[place])) for name, col in sorted(self.series.items())}


def is_maximum(name: str) -> bool:
    """Return whether a figure is a maximum, so that of several rows the largest counts."""
    return name.partition(_BY_LAG)[0].endswith(_HIGHEST)


def _floats(values: Mapping[str, float | None]) -> dict[str, float]:
    """Return the values as numbers, all of them checked before any of them is kept."""
    return {
        name[:_MAX_NAME]: _MISSING if value is None else float(value)
        for name, value in values.items()
    }


def shown(values: Numbers) -> list[float | None]:
    """Return the values, None for non-finite ones; nearly always there are none."""
    numbers = values.tolist()
    return [*numbers] if np.isfinite(values).all() else [number(value) for value in numbers]


def number(value: float) -> float | None:
    """Return a number for JSON: None if it is not finite."""
    return value if math.isfinite(value) else None
