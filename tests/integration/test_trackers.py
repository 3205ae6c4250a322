"""The adapters against the real packages, offline. They are not among this project's needs."""

import importlib
import importlib.util
import json
from pathlib import Path

import pytest

from slipstream.broker.report.trackers.loading import load_trackers
from slipstream.wire.errors import ConfigError
from slipstream.wire.settings.sections import LoggingSection, RunSection

pytestmark = [pytest.mark.integration, pytest.mark.filterwarnings("ignore")]
OPTIONS = {
    "wandb": {"mode": "offline"},
    "mlflow": {"tracking_uri": "file:{folder}"},
    "swanlab": {"mode": "offline"},
    "trackio": {},
}


def log_life(run: RunSection, name: str, steps: range) -> None:
    options = {k: v.format(folder=run.folder / "mlflow") for k, v in OPTIONS[name].items()}
    section = LoggingSection(trackers=(name,), **{name: options})
    settings = {"run": {"name": run.name}}
    tracker = load_trackers(section, run, settings)
    for step in steps:
        tracker.log(step, {"reward/mean": step / 10})
        tracker.log(step, {"eval/mean@1": 0.5})
    tracker.close()


@pytest.mark.parametrize("name", sorted(OPTIONS))
def test_run_is_logged_and_resumes_under_its_id(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))  # read when it is imported
    pytest.importorskip(name)
    run = RunSection(name="first", dir=str(tmp_path))
    run.folder.mkdir()
    log_life(run, name, range(3))
    ids = (run.folder / "trackers.json").read_text()
    log_life(run, name, range(3, 5))
    assert (run.folder / "trackers.json").read_text() == ids
    if name == "mlflow":
        run_id = json.loads(ids)["mlflow"]
        client = importlib.import_module("mlflow").MlflowClient(
            tracking_uri=(run.folder / "mlflow").as_uri()
        )
        history = client.get_metric_history(run_id, "reward/mean")
        assert [(m.step, m.value) for m in history] == [(i, i / 10) for i in range(5)]
        assert client.get_run(run_id).info.status == "FINISHED"
    if name == "trackio":
        storage = importlib.import_module("trackio.sqlite_storage").SQLiteStorage
        rows = storage.get_logs("slipstream", "first")
        assert [(row["step"], row["reward/mean"]) for row in rows] == [
            (i, i / 10) for i in range(5)
        ]


@pytest.mark.parametrize("name", sorted(OPTIONS))
def test_a_tracker_that_is_not_installed_is_named_with_what_to_install(name: str, tmp_path: Path):
    if importlib.util.find_spec(name) is not None:
        pytest.skip("it is installed")
    run = RunSection(name="first", dir=str(tmp_path))
    with pytest.raises(ConfigError, match=rf"logging\.trackers names {name}.*pip install"):
        load_trackers(LoggingSection(trackers=(name,)), run, {})
