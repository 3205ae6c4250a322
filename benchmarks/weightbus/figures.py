"""Pure: what the bars of the weight bus are computed from."""

import statistics
from collections.abc import Mapping, Sequence

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


def spread(values: Sequence[float], *, unit: float = 1.0, digits: int = 3) -> str:
    """Return median, smallest and largest as text."""
    middle, low, high = (f(values) * unit for f in (statistics.median, min, max))
    return f"{middle:.{digits}f} ({low:.{digits}f} to {high:.{digits}f})"


def table(title: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a Markdown table."""
    lines = [title, ["---"] * len(title), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)
