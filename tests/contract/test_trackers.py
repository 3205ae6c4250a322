"""What every tracker shows of a run with several lives: one run, and each step once.

The packages are no needs of this project: where one is not installed, a stand-in takes its place.
"""

import asyncio
import importlib
import importlib.util
import itertools
import json
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from slipstream.broker.report.trackers.loading import IDS_FILE, LOGGED_FILE
from slipstream.broker.startup import start_trackers
from slipstream.wire.files.run_folder import METRICS
from tests.support.broker_starts import settings_in
from tests.support.tracker_packages import stand_in

pytestmark = pytest.mark.filterwarnings("ignore")
OPTIONS = {
    "tensorboard": (),
    "wandb": ("logging.wandb={mode='offline'}",),
    "mlflow": ("logging.mlflow={tracking_uri='file:FOLDER/mlflow'}",),
    "swanlab": ("logging.swanlab={mode='offline'}",),
    "trackio": (),
}
NAMES = ("reward/mean", "eval/mean@1")
Curves = dict[str, list[tuple[int, float]]]
Read = Callable[[], Curves]


@pytest.fixture(params=sorted(OPTIONS))
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def read(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Read | None:
    """What shows the curves of the one run that there is; None where it lies with the tool."""
    folder = tmp_path / "run"
    if name == "tensorboard":

        def shown() -> Curves:
            reader = EventAccumulator(str(folder / "tensorboard"))
            reader.Reload()
            return {
                one: [(e.step, round(e.value, 4)) for e in reader.Scalars(one)] for one in NAMES
            }

        return shown
    if importlib.util.find_spec(name) is None:
        runs = stand_in(name, monkeypatch)

        def kept() -> Curves:
            (rows,) = runs.rows.values()
            return {one: [(s, row[one]) for s, row in rows if one in row] for one in NAMES}

        return kept
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    if name == "mlflow":

        def served() -> Curves:
            run_id = json.loads((folder / IDS_FILE).read_text())[name]
            client = importlib.import_module(name).MlflowClient(f"file:{folder}/mlflow")
            names = {one: one.replace("@", "_at_") for one in NAMES}
            history = {one: client.get_metric_history(run_id, key) for one, key in names.items()}
            return {one: [(m.step, m.value) for m in rows] for one, rows in history.items()}

        return served
    if name == "trackio":

        def stored() -> Curves:
            storage = importlib.import_module("trackio.sqlite_storage").SQLiteStorage
            rows = storage.get_logs("slipstream", "run")
            return {one: [(r["step"], r[one]) for r in rows if one in r] for one in NAMES}

        return stored
    return None


@pytest.fixture
def live(name: str, tmp_path: Path) -> Callable[..., str]:
    """What logs steps, and evaluations of negative ones, in a life of a broker."""
    folder = tmp_path / "run"
    folder.mkdir()
    trackers = f"logging.trackers=['{name}']"
    more = [one.replace("FOLDER", str(folder)) for one in OPTIONS[name]]
    numbers = itertools.count(1)

    def lives(value: float, *steps: int) -> str:
        settings = settings_in(tmp_path, "run.name=run", trackers, *more)
        running = asyncio.run(start_trackers(settings))
        for step in steps:
            running.log(abs(step), {NAMES[step < 0]: value})
        running.close()
        number = next(numbers)
        for events in folder.glob("tensorboard/events.out.tfevents.*.*"):  # named by the second
            events.rename(events.with_name(f"events.out.tfevents.{number:010d}"))
        ids = settings.run.folder / IDS_FILE
        return ids.read_text() if ids.exists() else ""

    return lives


def test_lives_of_a_run_are_one_run_that_has_each_step_once(
    name: str, live: Callable[..., str], read: Read | None
):
    """Earlier steps were hidden, runs begun anew, and steps there twice."""
    ids = live(1.0, 1, 2, 3, -2, 4)
    assert live(2.0, 5, 6) == ids, "the broker was restarted"
    assert live(3.0, 7, 8, -4, 6, 7, 8, -8) == ids, "the learner went back to step 5"
    assert live(4.0, 7) == ids, "the run was resumed from step 6, and its broker killed"
    assert live(5.0, 8, 9, -8, -4) == ids, "both evaluations are repeated"
    if read is None:
        return
    steps = [step for step, _ in read()[NAMES[0]]]
    evaluated = [step for step, _ in read()[NAMES[1]]]
    assert (steps, sorted(evaluated)) == (list(range(1, 10)), [2, 4, 8])
    values = [value for _, value in read()[NAMES[0]]]
    newest = [1.0, 1.0, 1.0, 1.0, 2.0, 3.0, 4.0, 5.0, 5.0]
    first = [1.0, 1.0, 1.0, 1.0, 2.0, 2.0, 3.0, 3.0, 5.0]
    assert values == (newest if name == "tensorboard" else first)


def test_an_evaluation_is_shown_again_though_its_broker_was_killed_before_it(
    name: str, live: Callable[..., str], read: Read | None
):
    """What a return took back counted as logged in the next life."""
    live(1.0, 1, 2, -2, 3, 4, -4)
    live(2.0, 2, -1, 3, 4)  # the learner went back to step 1; the broker was killed
    live(3.0, 5, -2, -4, -1)
    if read is not None:
        newest = [(1, 2.0), (2, 3.0), (4, 3.0)]
        first = [(1, 2.0), (2, 1.0), (4, 1.0)]
        assert sorted(read()[NAMES[1]]) == (newest if name == "tensorboard" else first)


def test_a_run_without_tracked_json_continues_after_what_metrics_jsonl_has(
    name: str, live: Callable[..., str], read: Read | None, tmp_path: Path
):
    logged = (1, 2, -2, 3, 4, 5, -4)
    live(1.0, *logged)
    (tmp_path / "run" / LOGGED_FILE).unlink()
    rows = [{"step": abs(step), NAMES[step < 0]: 1.0} for step in logged]
    lines = "".join(f"{msgspec.json.encode(row).decode()}\n" for row in rows)
    metrics = tmp_path / "run" / METRICS
    metrics.write_text(lines + '{"step": 6')  # of a broker that was killed
    live(2.0)
    metrics.unlink()  # as far as the checkpoint does not have it
    live(2.0, 4, 5)
    live(3.0, 6, -4)
    if read is None:
        return
    again, evaluated = (2.0, 3.0) if name == "tensorboard" else (1.0, 1.0)
    steps = [*((step, 1.0) for step in (1, 2, 3)), (4, again), (5, again), (6, 3.0)]
    assert read() == {NAMES[0]: steps, NAMES[1]: [(2, 1.0), (4, evaluated)]}
