import csv
import io
import json
from argparse import Namespace
from pathlib import Path

import pytest

from slipstream.deploy.commands.metrics import main
from slipstream.wire.errors import ConfigError
from slipstream.wire.files.run_folder import METRICS, SETTINGS

ROWS = [
    {"step": 0, "wall_s": 1.5, "trained_tokens": 0, "eval/mean@1": 0.25},
    {"step": 1, "wall_s": 2.0, "trained_tokens": 90, "reward/mean": 0.5, "loss": 0.125},
    {"step": 2, "wall_s": 3.0, "trained_tokens": 200, "reward/mean": 0.75, "loss": None},
    {"step": 2, "wall_s": 4.0, "trained_tokens": 200, "eval/mean@1": 0.5},
]


@pytest.fixture
def runs(tmp_path: Path) -> list[Path]:
    for name, rows in {"a": ROWS, "b": ROWS[:2]}.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / SETTINGS).touch()
        lines = "".join(json.dumps(row) + "\n" for row in rows)
        (tmp_path / name / METRICS).write_text(lines)
    return [tmp_path / "a", tmp_path / "b"]


def called(runs: list[Path], *names: str, as_csv: bool = False, as_json: bool = False) -> int:
    return main(Namespace(runs=runs, name=list(names), csv=as_csv, json=as_json))


def test_the_newest_figures_of_runs_stand_beside_each_other(
    runs: list[Path], capsys: pytest.CaptureFixture[str]
):
    assert called(runs, as_json=True) == 0
    assert json.loads(capsys.readouterr().out) == {
        "a": {"step": 2, "eval/mean@1": 0.5, "reward/mean": 0.75, "loss": 0.125},
        "b": {"step": 1, "eval/mean@1": 0.25, "reward/mean": 0.5, "loss": 0.125},
    }
    assert called(runs, "reward/*") == 0
    printed = capsys.readouterr().out
    assert "reward/mean" in printed
    assert "loss" not in printed


def test_csv_has_a_row_for_each_step_and_each_evaluation(
    runs: list[Path], capsys: pytest.CaptureFixture[str]
):
    assert called(runs, "loss", "eval/*", as_csv=True) == 0
    rows = list(csv.DictReader(io.StringIO(capsys.readouterr().out)))
    assert [(row["run"], row["step"], row["eval/mean@1"], row["loss"]) for row in rows] == [
        ("a", "0", "0.25", ""),
        ("a", "1", "", "0.125"),
        ("a", "2", "0.5", ""),
        ("a", "2", "", ""),
        ("b", "0", "0.25", ""),
        ("b", "1", "", "0.125"),
    ]
    assert rows[1]["trained_tokens"] == "90"


def test_a_name_that_no_run_has_is_refused(runs: list[Path]):
    with pytest.raises(ConfigError, match=r"no figure of a, b is named 'rewards/\*'"):
        called(runs, "rewards/*")
