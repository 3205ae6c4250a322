"""The figures of a run as columns: from metrics.jsonl, of an older run from its page's file."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import islice
from operator import itemgetter
from pathlib import Path
from typing import BinaryIO

import msgspec
import numpy as np

from slipstream.broker.history.columns import read_state
from slipstream.broker.history.compare.curves import AXES, Curve
from slipstream.broker.history.table import Numbers
from slipstream.broker.report.trackers.base import eval_figures
from slipstream.wire.files.run_folder import EVAL, METRICS, PAGE_STATE
from slipstream.wire.messages.status import EvalPoint
from slipstream.wire.unreadable import UNREADABLE

_AT_ONCE = 2_000  # lines that are objects at a time
_EVAL = b'"eval/'  # begins the names of the figures of an evaluation
_decoder = msgspec.json.Decoder(dict[str, float | None])
_points = msgspec.json.Decoder(EvalPoint)
Row = Mapping[str, float | None]


class Columns:
    """Columns of equal length, by name; NaN where a row has no value."""

    def __init__(self) -> None:
        self.count = 0
        self._parts: dict[str, list[tuple[int, Numbers]]] = {}  # (first row, values) by name

    def extend(self, rows: Sequence[Row]) -> None:
        """Append rows."""
        names: set[str] = set()
        for row in rows:
            names.update(row)
        for name in names:
            values = np.array(_values(rows, name), dtype=np.float64)
            self._parts.setdefault(name, []).append((self.count, values))
        self.count += len(rows)

    def put(self, name: str, values: Sequence[float | None]) -> None:
        """Set a whole column of a table that gets no further rows."""
        self.count = len(values)
        self._parts[name] = [(0, np.array(values, dtype=np.float64))]

    @property
    def names(self) -> set[str]:
        """Names of the figures, without those of the axes."""
        return self._parts.keys() - set(AXES)

    def __getitem__(self, name: str) -> Numbers:
        column = np.full(self.count, np.nan)
        for first, values in self._parts.get(name, ()):
            column[first : first + len(values)] = values
        return column


class RunTable:
    """Figures of one run, read again where its files have grown."""

    def __init__(self, folder: Path) -> None:
        """Read nothing yet."""
        self._folder = folder
        self._read: tuple[int, int] = (0, 0)  # inode of metrics.jsonl, and bytes
        self._mark = 0  # newest change of the files that replace it
        self.steps, self.rounds = Columns(), Columns()

    def refresh(self) -> None:
        """Take in what is new."""
        path = self._folder / METRICS
        try:
            found = path.stat()
        except OSError:
            self._refresh_from_page()
            return
        inode, size = self._read
        if found.st_ino != inode or found.st_size < size:  # cut, or the first time
            self.steps, self.rounds, size = Columns(), Columns(), 0
        if found.st_size > size:
            with path.open("rb") as file:
                file.seek(size)
                for lines in _whole_lines(file):
                    self.rounds.extend(_decoded(line for line in lines if _EVAL in line))
                    self.steps.extend(_decoded(line for line in lines if _EVAL not in line))
                    size += sum(map(len, lines))
        self._read = (found.st_ino, size)

    @property
    def names(self) -> set[str]:
        """Names of all figures."""
        return self.steps.names | self.rounds.names

    def curve(self, name: str) -> Curve | None:
        """Return a figure; None if the run does not have it."""
        columns = self.rounds if name in self.rounds.names else self.steps
        if name not in columns.names:
            return None
        values = columns[name]
        order = np.argsort(columns["step"], kind="stable")
        order = order[np.isfinite(values[order])]
        step, wall_s, tokens = (columns[axis][order] for axis in AXES)
        return Curve(step=step, wall_s=wall_s, trained_tokens=tokens, value=values[order])

    def _refresh_from_page(self) -> None:
        """Read the page's history and eval/results.jsonl, of a run without metrics.jsonl."""
        page, results = self._folder / PAGE_STATE, self._folder / EVAL / "results.jsonl"
        mark = max(
            (path.stat().st_mtime_ns for path in (page, results) if path.exists()), default=0
        )
        if mark == self._mark:
            return
        self._mark = mark
        self.steps, self.rounds = Columns(), Columns()
        state = read_state(page)
        if state is not None:
            rows = state.history.steps
            self.steps.put("step", rows.step)
            self.steps.put("wall_s", rows.at_s)
            for name, values in rows.series.items():
                self.steps.put(name, list(values))
        points = read_rounds(self._folder)
        at_s: Numbers = np.full(len(points), np.nan)
        if state is not None and len(state.history.steps.step):
            known = state.history.steps
            at_s = np.interp([point.step for point in points], known.step, known.at_s, left=0.0)
        self.rounds.extend(
            [
                {"step": point.step, "wall_s": float(at), **eval_figures(point)}
                for point, at in zip(points, at_s, strict=True)
            ]
        )


def read_rounds(folder: Path) -> list[EvalPoint]:
    """Return the evaluations of a run, in order; what cannot be read is left out."""
    try:
        return _points.decode_lines((folder / EVAL / "results.jsonl").read_bytes())
    except (OSError, *UNREADABLE):
        return []


def _values(rows: Sequence[Row], name: str) -> list[float | None]:
    try:
        return list(map(itemgetter(name), rows))  # nearly always they all have it
    except KeyError:
        return [row.get(name) for row in rows]


def _whole_lines(file: BinaryIO) -> Iterator[list[bytes]]:
    """Return lines, some at a time, up to one that is not whole."""
    while block := list(islice(file, _AT_ONCE)):
        if block[-1].endswith(b"\n"):
            yield block
        else:
            yield block[:-1]
            return


def _decoded(lines: Iterable[bytes]) -> list[Row]:
    """Return the rows of lines, without lines that are no row."""
    rows: list[Row] = []
    for line in lines:
        with suppress(*UNREADABLE):
            rows.append(_decoder.decode(line))
    return rows
