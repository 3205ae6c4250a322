"""Pure: the points where two implementations of a model differ.

Shapes: T tokens; H channels; k experts per token.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import numpy as np

from slipstream.wire.models.alignment import LOGPROBS, PARTS, rows_of

_ARRAY = np.ndarray[Any, Any]
_POINT = re.compile(r"layer (\d+) (\w+)")


class PointDifference(msgspec.Struct, frozen=True, kw_only=True):
    """Difference of two implementations at one point."""

    point: str
    value: float  # see ``difference``
    is_within: bool


class PairComparison(msgspec.Struct, frozen=True, kw_only=True):
    """Comparison of two implementations."""

    one: str
    other: str
    points: tuple[PointDifference, ...]  # in the order of a token's passage
    alone: tuple[str, ...] = ()  # points of only one implementation

    @property
    def first_apart(self) -> PointDifference | None:
        """First point with a difference above the tolerance."""
        return next((point for point in self.points if not point.is_within), None)


def compare(
    one: tuple[str, Mapping[str, _ARRAY]],
    other: tuple[str, Mapping[str, _ARRAY]],
    *,
    tolerance: float,
) -> PairComparison:
    """Compare two implementations at their common points.

    Args:
        one: Name, and arrays by point.
        other: The same of the other implementation.
        tolerance: Largest accepted difference, see ``difference``.
    """
    shared = sorted(one[1].keys() & other[1].keys(), key=_place)
    found = [(name, difference(name, one[1][name], other[1][name])) for name in shared]
    points = tuple(
        PointDifference(point=name, value=value, is_within=bool(value <= tolerance))
        for name, value in found
    )
    alone = tuple(sorted(one[1].keys() ^ other[1].keys(), key=_place))
    return PairComparison(one=one[0], other=other[0], points=points, alone=alone)


def difference(name: str, one: _ARRAY, other: _ARRAY) -> float:
    """Return the difference of two arrays of a point.

    Log-probabilities: the largest difference, in nats. Experts: the share of tokens with other
    experts. Outputs [T, H]: the root mean square of the difference, as a share of that of the
    second array. Infinite if the shapes differ, or a number is not finite.
    """
    if one.shape != other.shape or not (np.isfinite(one).all() and np.isfinite(other).all()):
        return float("inf")
    if name == LOGPROBS:
        return float(np.abs(one - other).max(initial=0.0))
    if name.endswith(" experts"):
        return float((np.sort(one, -1) != np.sort(other, -1)).any(-1).mean())
    size = float(np.sqrt(np.square(other, dtype=np.float64).mean()))
    apart = float(np.sqrt(np.square(one - other, dtype=np.float64).mean()))
    return apart / size if size else apart


def whole(ranks: Sequence[Mapping[str, _ARRAY]], num_tokens: int) -> dict[str, _ARRAY]:
    """Put together the ranks' records of their tokens.

    A point with a missing token is left out.
    """
    found: dict[str, _ARRAY] = {}
    seen: dict[str, set[int]] = {}
    for arrays in ranks:
        for name, array in arrays.items():
            rows = arrays.get(rows_of(name), np.arange(num_tokens))
            if name.startswith(rows_of("")) or len(array) != len(rows):
                continue
            if name not in found:
                found[name] = np.zeros((num_tokens, array.shape[1]), np.float32)
            found[name][rows] = array
            seen.setdefault(name, set()).update(rows.tolist())
    return {name: array for name, array in found.items() if len(seen[name]) == num_tokens}


def _place(name: str) -> tuple[int, int]:
    found = _POINT.fullmatch(name)
    if found is None:
        return (10**9, 0)
    return (int(found[1]), PARTS.index(found[2]))
