"""SwanLab. Needs the swanlab package, and an account unless mode = "offline" or "local"."""

from slipstream.broker.report.trackers.base import KeepingTracker, TrackedRun, Tracker

PACKAGE = "swanlab"


def start(run: TrackedRun) -> tuple[Tracker, str]:
    """Start or resume an experiment; return its adapter and id. A process has one at a time."""
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
    tracker = KeepingTracker(
        run.logged,
        send=lambda step, figures: swanlab.log(dict(figures), step=step),
        close=swanlab.finish,
    )
    return tracker, str(begun.id)
