"""A state of the run and its newest history, as the rules read them. Pure.

A rule speaks once its measure, taken over a window, passed the rule's limit lately, and until the
measure is a fifth below that; before its window is full it is silent.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from statistics import fmean
from typing import Literal, NamedTuple, TypeAlias

import msgspec

from slipstream.wire.messages.status import RoleStatus, RunStatus

Column: TypeAlias = Sequence[float | None]
Level: TypeAlias = Literal["info", "warning", "error"]
Measure: TypeAlias = Callable[[int], float | None]

WINDOW_S = 120.0  # long enough for a checkpoint or an evaluation to pass in it
WINDOW_STEPS = 5  # it doubles until this many learner steps fit: a pool waits within each step
WINDOW_ROWS = 5  # and this many rows of a history that has become coarse
FIGURE_STEPS = 10  # over which a figure of learner steps is averaged: single batches are noisy
LEARNING_STEPS = 30  # before a trend of a figure is judged
NUM_WINDOWS = 5  # windows, the newest and earlier ones, one must have passed the limit
KEEPS = 0.8  # share of its limit, below which a measure counts as recovered


class Advisory(msgspec.Struct, frozen=True, kw_only=True):
    """One sentence about the run."""

    rule: str
    level: Level
    text: str
    setting: str  # the setting to change first
    why: str  # the heading of docs/operations.md that explains it


class Trends(msgspec.Struct, frozen=True, kw_only=True):
    """The newest history of a run, as columns of equal length; names as the page has them."""

    at_s: Sequence[float]  # times of the rows below, since the run started
    series: Mapping[str, Column]  # rows by time
    steps_at_s: Sequence[float]  # times of the learner steps, since the run started
    steps: Mapping[str, Column]  # figures by learner step
    every_steps: int = 1  # how many learner steps a row of them is the mean of
    high_water_bytes: int = 0  # broker.high_water_bytes; 0 is not known
    shared_cores: int = 0  # CPU cores that all processes share; 0: they have others, or unknown
    fsync: str = ""  # how the store is synced: always, everysec, no; empty is not known


class Finding(NamedTuple):
    """Statement of a rule."""

    text: str
    setting: str  # the setting to change first
    level: Level = "warning"


_BESIDE_WORKERS = 1  # the broker, the relay and reward workers take about one core


@dataclass(frozen=True, slots=True)
class RunView:
    """A run, and the window of rules over time."""

    status: RunStatus
    history: Trends
    first: int  # rows before it are from before the first learner step
    end: int  # rows from it on are from after the last learner step of all
    window_s: float
    full: bool  # enough rows and steps to fill a window

    @property
    def crowded(self) -> str:
        """Return why waiting is expected where few cores do everything; empty elsewhere."""
        workers = sum(role.role in {"learner", "generator"} for role in self.status.roles)
        cores = self.history.shared_cores
        if not cores or workers + _BESIDE_WORKERS <= cores:
            return ""
        return (
            f" Expected here: the learner, {workers - 1} generators and everything else share "
            f"{cores} CPU cores, so each waits for the others whatever the settings are."
        )

    @classmethod
    def of(cls, status: RunStatus, history: Trends) -> "RunView":
        """Return a run as the rules read it."""
        at_s, steps_at_s = history.at_s, history.steps_at_s
        if len(at_s) < WINDOW_ROWS or len(steps_at_s) <= WINDOW_STEPS:
            return cls(status, history, 0, 0, WINDOW_S, full=False)
        over = status.finished or status.steps >= status.total_steps
        first = bisect_left(at_s, steps_at_s[0])
        end = bisect_right(at_s, steps_at_s[-1]) if over else len(at_s)
        needed_s = max(
            steps_at_s[-1] - steps_at_s[-1 - WINDOW_STEPS], WINDOW_ROWS * (at_s[-1] - at_s[-2])
        )
        window_s = WINDOW_S
        while window_s < needed_s:
            window_s *= 2
        full = end > first and at_s[end - 1] - at_s[first] >= window_s
        return cls(status, history, first, end, window_s, full=full)

    @property
    def window_ends(self) -> list[int]:
        """Ends of windows, as numbers of rows: the newest, and earlier ones.

        The earlier ones end at times that do not move with the newest, so that a window that passed
        a limit counts until it is a window old, and a measure near the limit does not flap.
        """
        if not self.full:
            return []
        at_s, apart_s = self.history.at_s, self.window_s / NUM_WINDOWS
        newest = int(at_s[self.end - 1] / apart_s)
        ends = (bisect_right(at_s, (newest - i) * apart_s, hi=self.end) for i in range(NUM_WINDOWS))
        earlier = (end for end in ends if end > self.first and self._start(end) >= self.first)
        return [self.end, *earlier]

    def _start(self, end: int) -> int:
        """Return the first row of the window that ends before row ``end``; -1 if it is cut off."""
        at_s = self.history.at_s
        start_s = at_s[end - 1] - self.window_s
        if start_s < at_s[self.first]:
            return -1
        return bisect_right(at_s, start_s, lo=self.first, hi=end) - 1

    def values(self, name: str, end: int) -> list[float]:
        """Return the known values of a series in the window that ends before row ``end``."""
        column = self.history.series.get(name, ())
        return [value for value in column[self._start(end) : end] if value is not None]

    def growth(self, name: str, end: int) -> float:
        """Return the growth of a count in the window that ends before row ``end``."""
        values = self.values(name, end)
        return max(0.0, values[-1] - values[0]) if values else 0.0

    def waited(self, role: str) -> Measure:
        """Return a measure of the share of time that the processes of a role waited."""
        names = [f"busy:{process.name}" for process in self.status.roles if process.role == role]

        def measure(end: int) -> float | None:
            busy = [value for name in names for value in self.values(name, end)]
            return 1.0 - fmean(busy) if busy else None

        return measure

    def reading(self, measure: Measure, limit: float) -> float | None:
        """Return the newest value of a measure over time if a rule about it applies."""
        return reading(measure, self.window_ends, limit)

    def stalled(self, name: str) -> list[float]:
        """Return the known values of a series since ``WINDOW_S`` ago if no step was done since.

        Empty if one was, or if the run is younger. Needs no step at all, unlike ``values``.
        """
        at_s, steps_at_s = self.history.at_s, self.history.steps_at_s
        if not at_s or self.status.finished or self.status.steps >= self.status.total_steps:
            return []
        since_s = at_s[-1] - WINDOW_S
        if at_s[0] > since_s or (steps_at_s and steps_at_s[-1] > since_s):
            return []
        column = self.history.series.get(name, ())
        return known(column[bisect_left(at_s, since_s) :])

    @property
    def generators(self) -> list[RoleStatus]:
        """Generators that have weights."""
        roles = (process for process in self.status.roles if process.role == "generator")
        return [process for process in roles if process.adopted is not None]

    @property
    def lately(self) -> str:
        """Length of the window in words."""
        return f"the last {duration(self.window_s)}"


Rule: TypeAlias = Callable[[RunView], Finding | None]


class Rules(dict[str, Rule]):
    """Rules by name; the section in docs/operations.md has the same name."""

    def add(self, rule: Rule) -> Rule:
        """Add a rule under its function's name, with dashes."""
        self[rule.__name__.removeprefix("_").replace("_", "-")] = rule
        return rule


def reading(measure: Measure, window_ends: Sequence[int], limit: float) -> float | None:
    """Return the newest value if an earlier one passed the limit and it is still near it."""
    if not window_ends or (newest := measure(window_ends[0])) is None or newest < KEEPS * limit:
        return None
    values = (measure(end) for end in window_ends[1:])
    return newest if any(value is not None and value >= limit for value in values) else None


def duration(seconds: float) -> str:
    """Return a time in words, in its largest unit that leaves no less than two of it."""
    if seconds < 120:
        return f"{seconds:.0f} seconds"
    return f"{seconds / 60:.0f} minutes" if seconds < 7_200 else f"{seconds / 3_600:.0f} hours"


def known(column: Column) -> list[float]:
    """Return the values of a column that are there."""
    return [value for value in column if value is not None]


def step_window_ends(rows: int, needed: int) -> list[int]:
    """Return the ends of windows of learner steps: the newest, and one step earlier each."""
    return [end for end in range(rows, rows - NUM_WINDOWS, -1) if end >= needed]


def running_means(values: Sequence[float]) -> list[float]:
    """Return the mean of every ``FIGURE_STEPS`` values that follow each other."""
    sums = list(accumulate(values, initial=0.0))
    return [
        (sums[i + FIGURE_STEPS] - sums[i]) / FIGURE_STEPS
        for i in range(len(values) - FIGURE_STEPS + 1)
    ]


def newest_values(column: Column, end: int, steps: int = FIGURE_STEPS) -> list[float]:
    """Return the known values of the ``steps`` rows before row ``end``."""
    return known(column[max(0, end - steps) : end])
