"""Curves of several runs over one axis: smoothed, and downsampled to what a screen shows.

Shapes: N points of one run, M rows that all runs share.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

import numpy as np

from slipstream.broker.history.table import Numbers, is_maximum

Axis: TypeAlias = Literal["step", "wall_s", "trained_tokens"]
AXES: tuple[Axis, ...] = ("step", "wall_s", "trained_tokens")
Indices: TypeAlias = np.ndarray[tuple[int], np.dtype[np.int64]]
MAX_POINTS = 400  # points of a drawn curve


@dataclass(frozen=True, slots=True, kw_only=True)
class Curve:
    """One figure of one run, in order of learner steps; only rows that have it."""

    step: Numbers  # [N] learner steps completed
    wall_s: Numbers  # [N] seconds, NaN where it is not known
    trained_tokens: Numbers  # [N] tokens, NaN where it is not known
    value: Numbers  # [N]

    def over(self, axis: Axis) -> tuple[Numbers, Numbers]:
        """Return places on an axis and the values there, where both are known."""
        places: Numbers = getattr(self, axis)
        known = np.isfinite(places)
        return places[known], self.value[known]


@dataclass(frozen=True, slots=True)
class Overlay:
    """Rows over one axis, and the columns of each run; NaN where a run has nothing."""

    x: Numbers  # [M] ascending
    columns: Mapping[str, Sequence[Numbers]]  # columns by run


def smoothed(values: Numbers, weight: float) -> Numbers:
    """Return the exponential moving average, without the pull of its start towards 0.

    The weight of earlier values is 0 (no smoothing) up to less than 1; all values are known.
    """
    if weight <= 0.0:
        return values
    averages = np.empty(len(values))
    average, share = 0.0, 0.0
    for place, value in enumerate(values.tolist()):
        average = weight * average + (1.0 - weight) * value
        share = weight * share + (1.0 - weight)
        averages[place] = average / share
    return averages


def overlaid(
    name: str,
    curves: Mapping[str, Curve],
    axis: Axis,
    *,
    weight: float = 0.0,
    max_points: int = MAX_POINTS,
) -> Overlay:
    """Put the curves of one figure over each other.

    Up to ``max_points`` different places are kept as they are; of more, neighbors become one, at
    the last place of them: their mean, or the largest of a figure that is a maximum.

    With a ``weight`` of smoothing each run has a second, smoothed column.
    """
    parts = {run: curve.over(axis) for run, curve in curves.items()}
    every = np.concatenate([places for places, _ in parts.values()] or [np.empty(0)])
    places = np.unique(every)
    row_of = _rows(places, max_points)
    used, last = np.unique(row_of, return_index=True)
    ends = np.append(last[1:], len(places)) - 1
    x = places[ends] if len(places) else places
    columns: dict[str, list[Numbers]] = {}
    for run, (at, values) in parts.items():
        rows = np.searchsorted(used, row_of[np.searchsorted(places, at)])
        kinds = [values, smoothed(values, weight)] if weight > 0.0 else [values]
        columns[run] = [_merged(rows, kind, len(x), highest=is_maximum(name)) for kind in kinds]
    return Overlay(x, columns)


def _rows(places: Numbers, max_points: int) -> Indices:
    """Return the row of each place: one each, or of equal width."""
    if len(places) <= max_points:
        return np.arange(len(places))
    width = (places[-1] - places[0]) / max_points
    rows: Indices = np.floor((places - places[0]) / width).astype(np.int64)
    return np.clip(rows, 0, max_points - 1)


def _merged(rows: Indices, values: Numbers, count: int, *, highest: bool) -> Numbers:
    if highest:
        merged = np.full(count, -np.inf)
        np.maximum.at(merged, rows, values)
        merged[np.isneginf(merged)] = np.nan
        return merged
    total, number = np.zeros(count), np.zeros(count)
    np.add.at(total, rows, values)
    np.add.at(number, rows, 1.0)
    with np.errstate(invalid="ignore"):
        return total / number
