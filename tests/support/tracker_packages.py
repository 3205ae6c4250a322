"""Stand-ins for packages of experiment trackers, as far as the adapters call them."""

import itertools
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

Row = tuple[int, dict[str, float]]


class Runs:
    """Runs of one package, by id, each with what was logged of it."""

    def __init__(self) -> None:
        self.rows: dict[str, list[Row]] = {}
        self._numbers = itertools.count()

    def begun(self, run_id: str | None) -> str:
        """Continue a run, or begin one."""
        if run_id is None:
            run_id = f"run-{next(self._numbers)}"
        self.rows.setdefault(run_id, [])
        return run_id


def _wandb(runs: Runs) -> ModuleType:
    def init(**options: Any) -> SimpleNamespace:  # noqa: ANN401
        run_id = runs.begun(options["id"])

        def log(figures: dict[str, float]) -> None:
            figures = dict(figures)
            runs.rows[run_id].append((int(figures.pop("learner_step")), figures))

        return SimpleNamespace(
            id=run_id, log=log, define_metric=lambda *_, **__: None, finish=lambda: None
        )

    return _module("wandb", init=init)


def _trackio(runs: Runs) -> ModuleType:
    def init(**options: Any) -> SimpleNamespace:  # noqa: ANN401
        run_id = runs.begun(options["name"])  # a run is known by its name

        def log(figures: dict[str, float], *, step: int) -> None:
            runs.rows[run_id].append((step, figures))

        return SimpleNamespace(id=run_id, log=log, finish=lambda: None)

    return _module("trackio", init=init)


def _swanlab(runs: Runs) -> ModuleType:
    now = SimpleNamespace(run_id="")

    def init(**options: Any) -> SimpleNamespace:  # noqa: ANN401
        now.run_id = runs.begun(options["id"])
        return SimpleNamespace(id=now.run_id)

    def log(figures: dict[str, float], *, step: int) -> None:
        runs.rows[now.run_id].append((step, figures))

    return _module("swanlab", init=init, log=log, finish=lambda: None)


def _mlflow(runs: Runs) -> ModuleType:
    class MlflowClient:
        def __init__(self, tracking_uri: str | None = None) -> None:
            pass

        def get_experiment_by_name(self, name: str) -> SimpleNamespace:
            return SimpleNamespace(experiment_id=name)

        def create_run(self, _experiment: str, **_options: object) -> SimpleNamespace:
            return SimpleNamespace(info=SimpleNamespace(run_id=runs.begun(None)))

        def update_run(self, run_id: str, status: str) -> None:
            assert (run_id in runs.rows, status) == (True, "RUNNING")

        def set_terminated(self, run_id: str) -> None:
            assert run_id in runs.rows

        def log_batch(self, run_id: str, metrics: Any = (), params: Any = ()) -> None:  # noqa: ANN401, ARG002
            rows = {step: dict[str, float]() for *_, step in metrics}
            for key, value, _, step in metrics:
                rows[step][key.replace("_at_", "@")] = value
            runs.rows[run_id] += rows.items()

    entities = _module("mlflow.entities", Metric=lambda *row: row, Param=lambda *row: row)
    return _module("mlflow", MlflowClient=MlflowClient, entities=entities)


def _module(name: str, **content: object) -> ModuleType:
    module = ModuleType(name)
    vars(module).update(content)
    return module


def stand_in(name: str, monkeypatch: pytest.MonkeyPatch) -> Runs:
    """Have the import of a package give its stand-in; return what is logged with that."""
    runs = Runs()
    make = {"wandb": _wandb, "trackio": _trackio, "swanlab": _swanlab, "mlflow": _mlflow}
    module = make[name](runs)
    monkeypatch.setitem(sys.modules, name, module)
    if name == "mlflow":
        monkeypatch.setitem(sys.modules, "mlflow.entities", module.entities)
    return runs
