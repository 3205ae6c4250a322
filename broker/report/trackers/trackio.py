"""Trackio: curves in a local database without an account; ``trackio show`` draws them."""

from slipstream.broker.report.trackers.base import KeepingTracker, TrackedRun, Tracker

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
            "auto_log_gpu": False,  # the broker may run on another host than the GPUs
            "auto_log_cpu": False,
            **run.options,
        }
    )
    tracker = KeepingTracker(
        run.logged,
        send=lambda step, figures: begun.log(dict(figures), step=step),
        close=begun.finish,
    )
    return tracker, str(begun.id)
