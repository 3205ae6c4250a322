"""How sure the difference of two final evaluations is: a bootstrap over their problems."""

from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from typing import TypeVar

import numpy as np

from slipstream.broker.history.table import Numbers

RESAMPLES = 10_000
LEVEL = 0.95
SEED = 0
K = TypeVar("K", bound=Hashable)
_CELLS_AT_ONCE = 2_000_000  # indices: 16 MB


@dataclass(frozen=True, slots=True, kw_only=True)
class Interval:
    """Mean of B minus mean of A, with the interval that holds 95% of the resampled differences."""

    difference: float
    low: float
    high: float
    paired: bool  # both have the same problems, which were resampled together
    num_problems: int  # problems of A


def difference_of_means(
    a: Mapping[K, float], b: Mapping[K, float], *, resamples: int = RESAMPLES, seed: int = SEED
) -> Interval:
    """Return the difference of two means over problems, with its bootstrap interval.

    Problems that are the same in both are resampled as pairs, which takes the difficulty of a
    problem out of the difference; otherwise each side is resampled by itself.

    Args:
        a: mean reward by problem; not empty.
        b: the same of the other run.
        resamples: how often problems are drawn, with replacement.
        seed: Seed of the draws; the same scores give the same interval.
    """
    rng = np.random.default_rng(seed)
    left = np.array(list(a.values()), dtype=np.float64)
    paired = a.keys() == b.keys()
    if paired:
        right = np.array([b[problem] for problem in a], dtype=np.float64)
        draws = _means(right - left, rng, resamples)
    else:
        right = np.array(list(b.values()), dtype=np.float64)
        draws = _means(right, rng, resamples) - _means(left, rng, resamples)
    low, high = np.quantile(draws, [(1.0 - LEVEL) / 2.0, (1.0 + LEVEL) / 2.0])
    return Interval(
        difference=float(right.mean() - left.mean()),
        low=float(low),
        high=float(high),
        paired=paired,
        num_problems=len(left),
    )


def _means(values: Numbers, rng: np.random.Generator, resamples: int) -> Numbers:
    """Return the mean of each resample: [resamples]."""
    at_once = max(1, _CELLS_AT_ONCE // len(values))
    parts = [
        values[rng.integers(len(values), size=(min(at_once, resamples - first), len(values)))].mean(
            axis=1
        )
        for first in range(0, resamples, at_once)
    ]
    return np.concatenate(parts)
