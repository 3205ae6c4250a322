"""Weights & Biases. Needs the wandb package, and an account unless mode = "offline"."""

from collections.abc import Mapping
from typing import Any

from typing_extensions import override

from slipstream.broker.report.trackers.base import KeepingTracker, Logged, TrackedRun, Tracker

PACKAGE = "wandb"
_STEP = "learner_step"


def start(run: TrackedRun) -> tuple[Tracker, str]:
    """Start or resume a run; return its adapter and id."""
    import wandb

    begun = wandb.init(
        **{
            "project": run.project,
            "name": run.name,
            "dir": str(run.folder),
            "config": dict(run.settings),
            "id": run.run_id,
            "resume": "allow" if run.run_id else None,
            **run.options,
        }
    )
    # An evaluation ends when later steps are logged already, and W&B's own step only goes up.
    begun.define_metric(_STEP, hidden=True)
    begun.define_metric("*", step_metric=_STEP)
    return WandbTracker(begun, run.logged), str(begun.id)


class WandbTracker(KeepingTracker):
    """One W&B run."""

    def __init__(self, run: Any, logged: Logged) -> None:  # noqa: ANN401 wandb's own
        super().__init__(logged)
        self._run = run

    @override
    def _send(self, step: int, figures: Mapping[str, float]) -> None:
        """Add one point to each named curve."""
        self._run.log({**figures, _STEP: step})

    @override
    def close(self) -> None:
        """Upload the rest."""
        self._run.finish()
