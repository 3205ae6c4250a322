"""Trackio: curves in a local database without an account; ``trackio show`` draws them."""

from collections.abc import Mapping
from typing import Any

from typing_extensions import override

from slipstream.broker.report.trackers.base import KeepingTracker, Logged, TrackedRun, Tracker

PACKAGE = "trackio"


def start(run: TrackedRun) -> tuple[Tracker, str]:
    """Start or resume a run; return its adapter and id."""
    import trackio

    begun = trackio.init(
        **{
            "project": run.project,
            "name": run.name,
            "config": dict(run.settings),
            "resume": "allow" if run.run_id else "never",
            "embed": False,  # it is no notebook
            "auto_log_gpu": False,  # nor is the broker where the GPUs are
            "auto_log_cpu": False,
            **run.options,
        }
    )
    return TrackioTracker(begun, run.logged), str(begun.id)


class TrackioTracker(KeepingTracker):
    """One Trackio run."""

    def __init__(self, run: Any, logged: Logged) -> None:  # noqa: ANN401 trackio's own
        super().__init__(logged)
        self._run = run

    @override
    def _send(self, step: int, figures: Mapping[str, float]) -> None:
        """Add one point to each named curve."""
        self._run.log(dict(figures), step=step)

    @override
    def close(self) -> None:
        """Write the rest."""
        self._run.finish()
