"""What the broker asks of an experiment tracker."""

from collections.abc import Mapping
from typing import Protocol

from wire.status import EvalPoint, RunStatus, StepPoint


class Tracker(Protocol):
    """Takes figures by step. Steps of one call never go back, except after a resume."""

    def log(self, step: int, figures: Mapping[str, float]) -> None:
        """Add one point to each named curve."""
        ...

    def close(self) -> None:
        """Write out what is buffered; nothing is logged after it."""
        ...


def step_figures(point: StepPoint, status: RunStatus) -> dict[str, float]:
    """Return the curves' values for a committed learner step."""
    figures = dict(point.metrics)
    for role, rate in status.tokens_per_second.items():
        figures[f"tokens_per_second/{role}"] = rate
    for role, share in status.busy.items():
        figures[f"busy/{role}"] = share
    for reason, count in status.dropped.items():
        figures[f"dropped/{reason}"] = float(count)
    total = sum(status.staleness_histogram.values())
    if total:
        lags = status.staleness_histogram.items()
        figures["staleness/mean_per_token"] = sum(int(lag) * n for lag, n in lags) / total
    return figures


def eval_figures(point: EvalPoint) -> dict[str, float]:
    """Return the curves' values for an evaluation: of all problems, and per data source."""
    figures = {f"eval/{name}": value for name, value in point.overall.metrics.items()}
    if len(point.by_source) > 1:
        for source, one in point.by_source.items():
            figures |= {f"eval/{source}/{name}": value for name, value in one.metrics.items()}
    return figures
