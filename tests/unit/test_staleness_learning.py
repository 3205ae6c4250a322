"""What the comparison of learning at staleness bounds makes of runs, and which ones it asks for."""

from pathlib import Path

import msgspec
import pytest

from benchmarks.bars import Bars
from benchmarks.parts import Run
from benchmarks.sequential import EQUIVALENT, WORSE
from benchmarks.staleness_learning import (
    BOUNDS,
    PLAN,
    SYNCHRONOUS,
    Outcome,
    jobs,
    name_of,
    outcome_of,
    report,
)


def _runs(seeds: int, differences: dict[int, float]) -> list[Run[Outcome]]:
    """Return runs of bounds with accuracies that differ by as much from synchronous ones."""
    return [
        Run(name_of(bound), seed, Outcome(0.7 + difference + 0.002 * (seed % 2) * bound, bound, 9))
        for seed in range(seeds)
        for bound, difference in {0: 0.0, **differences}.items()
    ]


def test_an_outcome_is_of_the_last_evaluation_and_all_trained_tokens():
    summary = {
        "staleness_histogram": {"0": 10, "2": 30},
        "eval": [
            {"step": 24, "overall": {"metrics": {"mean@1": 0.7}}},
            {"step": 0, "overall": {"metrics": {"mean@1": 0.4}}},
        ],
    }
    assert outcome_of(summary, 12.0) == Outcome(accuracy=0.7, staleness=1.5, wall_s=12.0)


def test_runs_of_a_bound_end_when_it_is_decided(tmp_path: Path):
    file, first = tmp_path / "results.jsonl", PLAN.looks[0]
    asked = [system for system, seed in jobs(file) if seed == 0]
    assert asked == [SYNCHRONOUS, *map(name_of, BOUNDS)]
    runs = _runs(first, {1: 0.0, 2: -0.2, 4: 0.05})
    file.write_bytes(b"".join(msgspec.json.encode(run) + b"\n" for run in runs))
    left = [system for system, seed in jobs(file) if seed >= first]
    assert set(left) == {SYNCHRONOUS, "bound-4"}
    assert len(left) == 2 * (PLAN.looks[-1] - first)


def test_the_report_has_decisions_power_and_seeds_that_are_no_pairs(
    capsys: pytest.CaptureFixture[str],
):
    first = PLAN.looks[0]
    runs = [*_runs(first, {1: 0.0, 2: -0.2}), Run(name_of(4), 0, None)]
    bars = Bars()
    lines = report(runs, bars).splitlines()
    assert lines[2].startswith(f"| 1 | {first} | {first} | {EQUIVALENT} | 1.000 | 0.700 | 0.701 |")
    power, false = (float(cell) for cell in lines[2].split("|")[-3:-1])
    assert power == 1.0
    assert 0 < false < PLAN.level
    assert lines[3].startswith(f"| 2 | {first} | {first} | {WORSE} | 2.000 | 0.700 | 0.502 |")
    assert lines[4] == "not a pair: bound-4, seed 0"
    printed = capsys.readouterr().out
    assert "bar difference_bound-1: 0.00" in printed
    assert "bar difference_bound-2: 0.2" in printed
    assert "bar difference_bound-4: - " in printed
