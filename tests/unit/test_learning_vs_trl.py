"""What the comparison of learning with TRL computes from a file of results."""

from pathlib import Path

import msgspec
import pytest

from benchmarks.bars import Bars, NotRun
from benchmarks.learning_vs_trl import (
    OURS,
    Point,
    Run,
    points_of,
    ratio,
    read,
    report,
    score_at,
    seconds_to,
    svg,
)
from benchmarks.run_measurement import Reading


def _points(*scores: float, step_s: float = 10.0) -> list[Point]:
    return [Point(n, n * step_s, 2 * n * step_s, score) for n, score in enumerate(scores)]


def test_the_newest_ended_run_of_a_seed_counts(tmp_path: Path):
    file = tmp_path / "results.jsonl"
    assert read(file) == []
    runs = [
        Run(OURS, 0, None),
        Run(OURS, 0, _points(0.1, 0.2)),
        Run(OURS, 0, None),
        Run("trl", 0, None),
    ]
    file.write_bytes(b"".join(msgspec.json.encode(run) + b"\n" for run in runs))
    assert read(file) == [runs[1], runs[3]]


def test_the_second_of_a_gain_is_interpolated():
    points = _points(0.2, 0.3, 0.5, 0.1)
    assert seconds_to(points, "wall_s") == pytest.approx(15.0)
    assert seconds_to(points, "cpu_s") == pytest.approx(30.0)
    assert seconds_to(points, "wall_s", gain=0.4) is None
    assert score_at(points, "wall_s", 15.0) == pytest.approx(0.4)
    assert score_at(points, "wall_s", 99.0) == 0.1


def test_only_seeds_that_both_ended_are_paired():
    ours = {0: _points(0.0, 0.4), 1: _points(0.0, 0.2), 2: _points(0.0, 0.1)}
    theirs = {0: _points(0.0, 0.2), 1: _points(0.0, 0.2)}
    assert ratio(ours, theirs, "wall_s") == pytest.approx(0.75)  # of 0.5 and 1
    assert ratio({2: ours[2]}, theirs, "wall_s") == NotRun("no seed was ended by both")
    assert isinstance(ratio(ours, {2: ours[2]}, "wall_s"), NotRun)
    never = {0: _points(0.0, 0.1, 0.1)}  # takes more than the 20 s of its run
    assert ratio({0: ours[0]}, never, "wall_s") == pytest.approx(0.25)


def test_what_evaluations_took_is_left_out():
    readings = [Reading(1, 110.0, 12.0), Reading(2, 125.0, 30.0), Reading(3, 140.0, 45.0)]
    spent = {0: (1.0, 2.0), 2: (4.0, 7.0)}
    points = points_of(readings, 100.0, {0: 0.1, 2: 0.2, 3: 0.3}, spent)
    assert points == [Point(0, 0, 0, 0.1), Point(2, 24.0, 28.0, 0.2), Point(3, 36.0, 38.0, 0.3)]


def test_the_best_way_of_the_other_is_the_baseline(capsys: pytest.CaptureFixture[str]):
    runs = [
        Run(OURS, 0, _points(0.1, 0.5)),
        Run("trl-padded-1", 0, _points(0.1, 0.5, step_s=20.0)),
        Run("trl-padded-2", 0, _points(0.1, 0.5)),
        Run("trl-padded-2", 1, None),
    ]
    assert report(runs, Bars()).splitlines()[-1] == "not ended: trl-padded-2, seed 1"
    lines = capsys.readouterr().out.splitlines()
    assert lines == [
        f"bar {figure}_seconds_to_gain: 1.000 of trl-padded-2's (needs <= 0.8): short"
        for figure in ("wall", "cpu")
    ]
    assert "trl-padded-2, 1 seeds" in svg(runs)
