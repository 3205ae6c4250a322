"""The broker's interface to experiment trackers."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Protocol

import msgspec
from msgspec import Meta

from slipstream.wire.messages.bounds import MOST, Count
from slipstream.wire.messages.status import EvalPoint, RunStatus, StepPoint


@dataclass(frozen=True, slots=True, kw_only=True)
class TrackedRun:
    """Arguments for an adapter's ``start``, which starts or resumes a run with its tool."""

    project: str
    name: str
    folder: Path  # folder of the run
    options: Mapping[str, Any]  # [logging.TRACKER]
    settings: Mapping[str, object]  # settings of the whole run, to be shown
    run_id: str | None  # the id it had in an earlier life
    logged: "Logged"  # in earlier lives


class Logged(msgspec.Struct):
    """Points that trackers got: each learner step has one, and each evaluation."""

    step: Annotated[int, Meta(ge=-1, le=MOST)] = -1  # the newest learner step
    evaluated: set[Count] = msgspec.field(default_factory=set)
    taken_back: set[Count] = msgspec.field(default_factory=set)
    """Evaluations that TensorBoard hides since the run went back."""

    def repeats(self, step: int, figures: Mapping[str, float]) -> bool:
        """True if there is such a point already."""
        return step in self.evaluated if _is_evaluation(figures) else step <= self.step

    def add(self, step: int, figures: Mapping[str, float]) -> None:
        """Add a point."""
        if _is_evaluation(figures):
            self.evaluated.add(step)
            self.taken_back.discard(step)
        elif step > self.step:
            self.step = step
        else:
            self.taken_back.update(evaluated for evaluated in self.evaluated if evaluated >= step)

    def goes_back(self, step: int, figures: Mapping[str, float]) -> bool:
        """True if the run is at an earlier learner step again; forget the later points then."""
        if _is_evaluation(figures) or step > self.step:
            return False
        self.step = step - 1
        self.evaluated = {evaluated for evaluated in self.evaluated if evaluated < step}
        return True


def _is_evaluation(figures: Mapping[str, float]) -> bool:
    return any(name.startswith("eval/") for name in figures)


class Tracker(Protocol):
    """Takes figures by step, which go back where the run does."""

    def log(self, step: int, figures: Mapping[str, float]) -> None:
        """Add one point to each named curve."""
        ...

    def close(self) -> None:
        """Flush; nothing is logged after it."""
        ...


class KeepingTracker:
    """A tracker whose tool takes no point back: a repeated point is not sent again."""

    def __init__(
        self,
        logged: Logged,
        *,
        send: Callable[[int, Mapping[str, float]], object],
        close: Callable[[], object],
    ) -> None:
        """Continue after the points of earlier lives.

        Args:
            logged: Points of earlier lives.
            send: Adds one point to each named curve.
            close: Flushes; nothing is sent after it.
        """
        self._logged = logged
        self._send = send
        self._close = close

    def log(self, step: int, figures: Mapping[str, float]) -> None:
        """Add one point to each named curve, unless there is one of that step."""
        if not self._logged.repeats(step, figures):
            self._logged.add(step, figures)
            self._send(step, figures)

    def close(self) -> None:
        """Flush; nothing is logged after it."""
        self._close()


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
        for source, of_source in point.by_source.items():
            figures |= {f"eval/{source}/{name}": value for name, value in of_source.metrics.items()}
    return figures
