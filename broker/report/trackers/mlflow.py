"""MLflow. Needs mlflow or mlflow-skinny; logging.mlflow.tracking_uri names the server.

Without one MLflow decides: MLFLOW_TRACKING_URI, or a local database.
"""

import time
from collections.abc import Iterator, Mapping

from slipstream.broker.report.trackers.base import KeepingTracker, TrackedRun, Tracker

PACKAGE = "mlflow-skinny"
_MAX_PARAMS = 100  # per request
_MAX_VALUE = 500  # characters


def start(run: TrackedRun) -> tuple[Tracker, str]:
    """Start or resume a run in the experiment ``project``; return adapter and id."""
    unknown = set(run.options) - {"tracking_uri", "tags"}
    if unknown:
        raise ValueError(f"unknown option {min(unknown)}; known are tracking_uri and tags")
    from mlflow import MlflowClient
    from mlflow.entities import Metric, Param

    client = MlflowClient(tracking_uri=run.options.get("tracking_uri"))

    def tracker(run_id: str) -> Tracker:
        def send(step: int, figures: Mapping[str, float]) -> None:
            now = int(time.time() * 1000)
            # MLflow takes no "@" in a name.
            named = {name.replace("@", "_at_"): value for name, value in figures.items()}
            metrics = [Metric(name, value, now, step) for name, value in named.items()]
            client.log_batch(run_id, metrics=metrics)

        return KeepingTracker(run.logged, send=send, close=lambda: client.set_terminated(run_id))

    if run.run_id is not None:
        client.update_run(run.run_id, status="RUNNING")
        return tracker(run.run_id), run.run_id
    experiment = client.get_experiment_by_name(run.project)
    experiment_id = (
        experiment.experiment_id if experiment else client.create_experiment(run.project)
    )
    created = client.create_run(experiment_id, run_name=run.name, tags=run.options.get("tags"))
    params = [Param(key, text[:_MAX_VALUE]) for key, text in _flat(run.settings)]
    for first in range(0, len(params), _MAX_PARAMS):
        client.log_batch(created.info.run_id, params=params[first : first + _MAX_PARAMS])
    return tracker(created.info.run_id), created.info.run_id


def _flat(settings: Mapping[str, object], prefix: str = "") -> Iterator[tuple[str, str]]:
    for key, value in settings.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", str(value)
