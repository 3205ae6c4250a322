"""SwanLab. Needs the swanlab package, and an account unless mode = "offline" or "local"."""

from collections.abc import Mapping
from typing import Any

from typing_extensions import override

from slipstream.broker.report.trackers.base import KeepingTracker, Logged, TrackedRun, Tracker

PACKAGE = "swanlab"


def start(run: TrackedRun) -> tuple[Tracker, str]:
    """Start or resume an experiment; return its adapter and id."""
    import swanlab

    begun = swanlab.init(
        **{
            "project": run.project,
            "name": run.name,
            "log_dir": str(run.folder / "swanlab"),
            "config": dict(run.settings),
            "id": run.run_id,
            "resume": "allow" if run.run_id else None,
            **run.options,
        }
    )
    return SwanlabTracker(swanlab, run.logged), str(begun.id)


class SwanlabTracker(KeepingTracker):
    """One SwanLab experiment; the package knows one at a time per process."""

    def __init__(self, package: Any, logged: Logged) -> None:  # noqa: ANN401 swanlab's own
        super().__init__(logged)
        self._swanlab = package

    @override
    def _send(self, step: int, figures: Mapping[str, float]) -> None:
        """Add one point to each named curve."""
        self._swanlab.log(dict(figures), step=step)

    @override
    def close(self) -> None:
        """Upload the rest."""
        self._swanlab.finish()
