"""Weights & Biases. Needs the wandb package, and an account unless mode = "offline"."""

from slipstream.broker.report.trackers.base import KeepingTracker, TrackedRun, Tracker

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
    tracker = KeepingTracker(
        run.logged,
        send=lambda step, figures: begun.log({**figures, _STEP: step}),
        close=begun.finish,
    )
    return tracker, str(begun.id)
