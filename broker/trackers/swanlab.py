"""SwanLab. Needs the swanlab package, and an account unless mode = "offline" or "local"."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from broker.trackers.base import Tracker

PACKAGE = "swanlab"


def start(
    *,
    project: str,
    name: str,
    folder: Path,
    options: Mapping[str, Any],
    settings: Mapping[str, object],
    run_id: str | None,
    resumed_at: int | None,  # noqa: ARG001 the run id says it
) -> tuple[Tracker, str]:
    """Begin an experiment, or go on with one; return its adapter and id."""
    import swanlab

    run = swanlab.init(
        **{
            "project": project,
            "name": name,
            "log_dir": str(folder / "swanlab"),
            "config": dict(settings),
            "id": run_id,
            "resume": "allow" if run_id else None,
            **options,
        }
    )
    return SwanlabTracker(swanlab), str(run.id)


class SwanlabTracker:
    """One SwanLab experiment; the package knows one at a time per process."""

    def __init__(self, package: Any) -> None:  # noqa: ANN401 swanlab's own
        self._swanlab = package

    def log(self, step: int, figures: Mapping[str, float]) -> None:
        """Add one point to each named curve."""
        self._swanlab.log(dict(figures), step=step)

    def close(self) -> None:
        """Upload what is left."""
        self._swanlab.finish()
