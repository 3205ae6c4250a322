"""Pure: which differences between engine and learner are noise."""

import math
from collections.abc import Sequence
from typing import NamedTuple

from typing_extensions import override

CALIBRATION = 16  # probes from which an engine's noise is learned
# Nats, by the type of the engine's matrices.
LIMITS = {"float32": 0.02, "bfloat16": 0.3, "fp8": 0.5}  # a larger mean is never noise
FLOORS = {"float32": 2e-5, "bfloat16": 5e-3, "fp8": 2e-2}  # a smaller one always is
EXPERTS_FLOORS = {"float32": 5e-3, "bfloat16": 2e-2, "fp8": 5e-2}  # other experts are chosen
WORST_OF_MEAN = 16.0  # limits and floors of the worst token, times those of the mean


class LogprobDifference(NamedTuple):
    """Distance between two sets of logprobs, in nats."""

    mean: float  # mean of the absolute differences
    worst: float

    @override
    def __str__(self) -> str:
        return f"{self.mean:.3g} nats on average, {self.worst:.3g} at worst"


def difference(
    theirs: Sequence[Sequence[float]], ours: Sequence[Sequence[float]]
) -> LogprobDifference:
    """Compare logprobs, [S, N] each. A value that is no number is infinitely far."""
    every = [
        abs(their - our)
        for their_row, our_row in zip(theirs, ours, strict=True)
        for their, our in zip(their_row, our_row, strict=True)
    ]
    if not all(map(math.isfinite, every)):
        return LogprobDifference(math.inf, math.inf)
    return LogprobDifference(math.fsum(every) / len(every), max(every))


TIMES = LogprobDifference(2.5, 8.0)  # a low quartile of the noise seen
EXPERTS_TIMES = LogprobDifference(5.0, 32.0)


class Noise:
    """The noise of one engine, learned from its first probes.

    Two figures of a probe's N differences are judged: their mean, which a small shift of all moves,
    and the worst. Both are nearly lognormal over honest publishes. The logarithm of the mean
    deviates by 0.07 in bfloat16, 0.16 with experts, that of the worst by 0.19 and 0.56 (N = 96; 301
    and 401 publishes). A low quartile of the first 16 is not moved by differences that a fault made
    larger; the lowest of any 16 was 0.87 of the median of all (0.80), and of the worst 0.81 (0.52).
    So the bounds are 11 deviations (9) above the median of the mean, and 10 (5) of the worst: 3e-7
    of honest publishes are beyond 5.

    After one probe the bound is 16 times as wide, and it narrows with each further probe. After 16
    probes nothing more is learned, so that a growing fault does not become the noise that it is
    compared with. The type has a limit, which also holds before the first probe, and a floor.
    """

    def __init__(self, dtype: str, *, has_experts: bool = False, limit: float = 0.0) -> None:
        """Begin with the limit of a type; ``limit`` replaces its mean."""
        self._limit = limit or LIMITS[dtype]
        floors = EXPERTS_FLOORS if has_experts else FLOORS
        self._floor = min(floors[dtype], self._limit)
        # Rounded activations deviate as tokens do that get other experts.
        self._times = EXPERTS_TIMES if has_experts or dtype == "fp8" else TIMES
        self._seen: list[LogprobDifference] = []

    @property
    def bound(self) -> LogprobDifference:
        """The largest difference that is taken for noise."""
        limit = LogprobDifference(self._limit, WORST_OF_MEAN * self._limit)
        if not self._seen:
            return limit
        few = CALIBRATION / len(self._seen)
        means, worst = zip(*self._seen, strict=True)
        floor = LogprobDifference(self._floor, WORST_OF_MEAN * self._floor)
        return LogprobDifference(
            min(limit.mean, max(floor.mean, few * self._times.mean * _quartile(means))),
            min(limit.worst, max(floor.worst, few * self._times.worst * _quartile(worst))),
        )

    def is_noise(self, found: LogprobDifference) -> bool:
        """Return True if a difference is taken for noise; learn from it then."""
        bound = self.bound
        if found.mean > bound.mean or found.worst > bound.worst:
            return False
        if len(self._seen) < CALIBRATION:
            self._seen.append(found)
        return True


def _quartile(values: Sequence[float]) -> float:
    return sorted(values)[len(values) // 4]
