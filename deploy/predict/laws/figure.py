"""A number with its unit and its law."""

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Figure:
    """One predicted number."""

    what: str
    value: float
    unit: str
    formula: str


def total(figures: Iterable[Figure]) -> float:
    """Return the sum of figures of one unit."""
    return sum(figure.value for figure in figures)
