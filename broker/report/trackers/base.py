"""The broker's interface to experiment trackers."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from slipstream.wire.messages.status import EvalPoint, RunStatus, StepPoint


@dataclass(frozen=True, slots=True, kw_only=True)
class TrackedRun:
    """Arguments for an adapter's ``start``, which starts or resumes a run with its tool."""

    project: str
    name: str
    folder: Path  # of the run
    options: Mapping[str, Any]  # [logging.TRACKER]
    settings: Mapping[str, object]  # of the whole run, to be shown
    run_id: str | None  # the id it had before a resume


class Tracker(Protocol):
    """Takes figures by step. Steps of one call never go back, except after a resume."""

    def log(self, step: int, figures: Mapping[str, float]) -> None:
        """Add one point to each named curve."""
        ...

    def close(self) -> None:
        """Flush; nothing is logged after it."""
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
