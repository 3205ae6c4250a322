"""MLflow. Needs mlflow or mlflow-skinny; logging.mlflow.tracking_uri names the server.

Without one MLflow decides: MLFLOW_TRACKING_URI, or a local database.
"""

import time
from collections.abc import Iterator, Mapping
from typing import Any

from typing_extensions import override

from slipstream.broker.report.trackers.base import KeepingTracker, Logged, TrackedRun, Tracker

PACKAGE = "mlflow-skinny"
_MAX_PARAMS = 100  # per request
_MAX_VALUE = 500  # characters


def start(run: TrackedRun) -> tuple[Tracker, str]:
    """Start or resume a run in the experiment ``project``; return adapter and id."""
    unknown = set(run.options) - {"tracking_uri", "tags"}
    if unknown:
        raise ValueError(f"unknown option {min(unknown)}; known are tracking_uri and tags")
    from mlflow import MlflowClient
    from mlflow.entities import Param

    client = MlflowClient(tracking_uri=run.options.get("tracking_uri"))
    if run.run_id is not None:
        client.update_run(run.run_id, status="RUNNING")
        return MlflowTracker(client, run.run_id, run.logged), run.run_id
    experiment = client.get_experiment_by_name(run.project)
    experiment_id = (
        experiment.experiment_id if experiment else client.create_experiment(run.project)
    )
    created = client.create_run(experiment_id, run_name=run.name, tags=run.options.get("tags"))
    params = [Param(key, text[:_MAX_VALUE]) for key, text in _flat(run.settings)]
    for first in range(0, len(params), _MAX_PARAMS):
        client.log_batch(created.info.run_id, params=params[first : first + _MAX_PARAMS])
    return MlflowTracker(client, created.info.run_id, run.logged), created.info.run_id


def _flat(settings: Mapping[str, object], prefix: str = "") -> Iterator[tuple[str, str]]:
    for key, value in settings.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", str(value)


class MlflowTracker(KeepingTracker):
    """One MLflow run."""

    def __init__(self, client: Any, run_id: str, logged: Logged) -> None:  # noqa: ANN401 mlflow's own
        super().__init__(logged)
        self._client = client
        self._run_id = run_id

    @override
    def _send(self, step: int, figures: Mapping[str, float]) -> None:
        """Add one point to each named curve; '@' in a name becomes '_at_', which MLflow takes."""
        from mlflow.entities import Metric

        now = int(time.time() * 1000)
        metrics = [
            Metric(name.replace("@", "_at_"), value, now, step) for name, value in figures.items()
        ]
        self._client.log_batch(self._run_id, metrics=metrics)

    @override
    def close(self) -> None:
        """Mark the run as ended."""
        self._client.set_terminated(self._run_id)
