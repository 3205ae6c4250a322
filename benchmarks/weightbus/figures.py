"""Pure: what the bars of the weight bus are computed from."""

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

PAUSE_PHASES = ("pause", "transfer", "load", "verify", "commit")  # an engine generates nothing


def share(baseline_s: float, ours_s: float) -> float:
    """Return how much of the baseline's speed is ours; 1 is as fast."""
    return baseline_s / ours_s


def growth(with_s: float, without_s: float) -> float:
    """Return by which part something grew; 0 is not at all."""
    return with_s / without_s - 1


def pause_s(phase_seconds: Mapping[str, float]) -> float:
    """Return how long the engines of one publish generated nothing."""
    return sum(phase_seconds.get(phase, 0.0) for phase in PAUSE_PHASES)


def loss_beyond_pause(*, rate: float, rate_alone: float, pause_share: float) -> float:
    """Return the share of tokens that publishes cost over that of the time in which they pause."""
    return 1 - rate / rate_alone - pause_share


def best(rounds: Mapping[int, Sequence[float]]) -> tuple[int, float]:
    """Return the setting with the smallest median, and that."""
    medians = {setting: statistics.median(values) for setting, values in rounds.items()}
    setting = min(medians, key=lambda key: medians[key])
    return setting, medians[setting]


@dataclass(frozen=True, slots=True)
class Mean:
    """Mean of paired differences, and how far it can be trusted (normal approximation)."""

    mean: float
    error: float  # standard error of the mean

    @property
    def low(self) -> float:
        """Lower end of the 95% interval."""
        return self.mean - 1.96 * self.error

    @property
    def high(self) -> float:
        """Upper end of the 95% interval."""
        return self.mean + 1.96 * self.error

    @property
    def detectable(self) -> float:
        """The smallest mean that would be told from 0 with a power of 80%, at 5% two-sided."""
        return (1.96 + 0.84) * self.error

    def verdict(self, needs: float) -> str:
        """Return if the mean is at most ``needs``, as far as the interval says."""
        if self.high <= needs:
            return f"at most {needs:g}"
        return f"more than {needs:g}" if self.low > needs else f"no verdict on {needs:g}"


def mean_of(values: Sequence[float]) -> Mean:
    """Return the mean of at least two values."""
    return Mean(statistics.fmean(values), statistics.stdev(values) / math.sqrt(len(values)))


def spread(values: Sequence[float], *, unit: float = 1.0, digits: int = 3) -> str:
    """Return median, smallest and largest as text."""
    middle, low, high = (f(values) * unit for f in (statistics.median, min, max))
    return f"{middle:.{digits}f} ({low:.{digits}f} to {high:.{digits}f})"


def table(title: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a Markdown table."""
    lines = [title, ["---"] * len(title), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)
