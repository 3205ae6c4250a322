"""metrics.jsonl has one line per learner step and evaluation, through restarts too."""

import json
from collections.abc import Collection
from pathlib import Path

import pytest

from slipstream.broker.report.metrics_file import MetricsFile, cut_metrics


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "metrics.jsonl"


def rows(path: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def opened(
    path: Path, step: int = 0, evaluated: Collection[int] = (), at_s: float = 0.0
) -> MetricsFile:
    return MetricsFile(path, step=step, evaluated=evaluated, now=lambda: at_s)


def write(path: Path, steps: int) -> None:
    """A first life of a run, which evaluates before its first step and after its second."""
    metrics = opened(path)
    metrics.evaluation(0, {"eval/mean@1": 0.0})
    for step in range(1, steps + 1):
        metrics.step(step, 10 * step, {"reward/mean": step / 10})
        if step == 2:
            metrics.evaluation(2, {"eval/mean@1": 0.5})
    metrics.close()


def test_steps_and_evaluations_have_a_line_each_with_time_and_tokens(path: Path):
    write(path, 2)
    assert rows(path) == [
        {"step": 0, "wall_s": 0.0, "trained_tokens": 0, "eval/mean@1": 0.0},
        {"step": 1, "wall_s": 0.0, "trained_tokens": 10, "reward/mean": 0.1},
        {"step": 2, "wall_s": 0.0, "trained_tokens": 20, "reward/mean": 0.2},
        {"step": 2, "wall_s": 0.0, "trained_tokens": 20, "eval/mean@1": 0.5},
    ]


def test_a_figure_that_is_no_number_becomes_null_and_none_takes_the_place_of_the_step(path: Path):
    metrics = opened(path)
    metrics.step(1, 5, {"step": 9.0, "policy/loss": float("nan")})
    metrics.close()
    assert rows(path) == [{"step": 1, "wall_s": 0.0, "trained_tokens": 5, "policy/loss": None}]


def test_a_resumed_run_has_no_step_and_no_evaluation_twice(path: Path):
    write(path, 4)
    resumed = opened(path, step=1, evaluated=[0])
    assert resumed.newest_step == 1
    for step in (2, 3):
        resumed.step(step, 10 * step, {})
    resumed.evaluation(2, {"eval/mean@1": 0.75})
    resumed.close()
    assert [row["step"] for row in rows(path)] == [0, 1, 2, 3, 2]
    assert rows(path)[-1]["eval/mean@1"] == 0.75


def test_an_evaluation_that_the_resumed_ledger_still_has_open_is_written_anew(path: Path):
    write(path, 3)
    cut_metrics(path, 3, [0])
    assert [row["step"] for row in rows(path) if "eval/mean@1" in row] == [0]


def test_a_learner_that_goes_back_writes_its_steps_anew(path: Path):
    metrics = opened(path)
    for step in (1, 2, 3):
        metrics.step(step, step, {"life": 1.0})
    metrics.went_back(1, evaluated=[])
    metrics.step(2, 2, {"life": 2.0})
    metrics.close()
    assert [(row["step"], row["life"]) for row in rows(path)] == [(1, 1.0), (2, 2.0)]


def test_time_goes_on_where_the_life_before_ended(path: Path):
    clock = iter([100.0, 107.0])
    first = MetricsFile(path, step=0, evaluated=[], now=lambda: next(clock))
    first.step(1, 1, {})
    first.close()
    clock = iter([5.0, 8.0])
    second = MetricsFile(path, step=1, evaluated=[], now=lambda: next(clock))
    second.step(2, 2, {})
    second.close()
    assert [row["wall_s"] for row in rows(path)] == [7.0, 10.0]


def test_half_a_line_of_a_killed_writer_goes(path: Path):
    write(path, 1)
    with path.open("a") as file:
        file.write('{"step": 1, "wall')
    cut_metrics(path, 9, [0])
    assert [row["step"] for row in rows(path)] == [0, 1]


def test_a_file_that_cannot_be_written_costs_lines_and_not_the_run(tmp_path: Path):
    metrics = opened(tmp_path / "missing" / "metrics.jsonl")
    metrics.step(1, 1, {})
    metrics.close()
    assert metrics.num_lost == 1
