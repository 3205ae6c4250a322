"""Pure: where two implementations of a model part.

Shapes: T tokens; H channels; k experts of a token.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import numpy as np

from slipstream.wire.models.alignment import LOGPROBS, PARTS, rows_of

_ARRAY = np.ndarray[Any, Any]
_POINT = re.compile(r"layer (\d+) (\w+)")


class Difference(msgspec.Struct, frozen=True, kw_only=True):
    """How far two implementations are apart at one point."""

    point: str
    value: float  # see ``difference``
    is_within: bool


class Comparison(msgspec.Struct, frozen=True, kw_only=True):
    """One implementation beside another."""

    one: str
    other: str
    points: tuple[Difference, ...]  # in the order in which a token passes them
    alone: tuple[str, ...] = ()  # points that one of them has and the other lacks

    @property
    def first_apart(self) -> Difference | None:
        """The first point that differs by more than is tolerated."""
        return next((one for one in self.points if not one.is_within), None)


def compare(
    one: tuple[str, Mapping[str, _ARRAY]],
    other: tuple[str, Mapping[str, _ARRAY]],
    *,
    tolerance: float,
) -> Comparison:
    """Compare two implementations at the points that both have.

    Args:
        one: its name and its arrays by point.
        other: the same of another.
        tolerance: the largest difference, see ``difference``.
    """
    shared = sorted(one[1].keys() & other[1].keys(), key=_place)
    found = [(name, difference(name, one[1][name], other[1][name])) for name in shared]
    points = tuple(
        Difference(point=name, value=value, is_within=bool(value <= tolerance))
        for name, value in found
    )
    alone = tuple(sorted(one[1].keys() ^ other[1].keys(), key=_place))
    return Comparison(one=one[0], other=other[0], points=points, alone=alone)


def difference(name: str, one: _ARRAY, other: _ARRAY) -> float:
    """Return how far apart two arrays of a point are.

    Of log-probabilities the largest difference, in nats; of experts the share of tokens for which
    others were chosen; of outputs [T, H] the root mean square of the difference, as a share of
    that of the second. Infinite where the shapes differ, or a number is none.
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
    """Put together what the ranks of a learner recorded of their tokens.

    A point of which a token is missing is left out.
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
