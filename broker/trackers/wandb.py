"""Weights & Biases. Needs the wandb package, and an account unless mode = "offline"."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from broker.trackers.base import Tracker

PACKAGE = "wandb"
_STEP = "learner_step"


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
    """Begin a run, or go on with one; return its adapter and id."""
    import wandb

    run = wandb.init(
        **{
            "project": project,
            "name": name,
            "dir": str(folder),
            "config": dict(settings),
            "id": run_id,
            "resume": "allow" if run_id else None,
            **options,
        }
    )
    # An evaluation ends when later steps are logged already, and W&B's own step only goes up.
    run.define_metric(_STEP, hidden=True)
    run.define_metric("*", step_metric=_STEP)
    return WandbTracker(run), str(run.id)


class WandbTracker:
    """One W&B run."""

    def __init__(self, run: Any) -> None:  # noqa: ANN401 wandb's own
        self._run = run

    def log(self, step: int, figures: Mapping[str, float]) -> None:
        """Add one point to each named curve."""
        self._run.log({**figures, _STEP: step})

    def close(self) -> None:
        """Upload what is left."""
        self._run.finish()
