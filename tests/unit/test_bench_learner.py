"""What the benchmark of a learner step compares, and how its bar comes about."""

import pytest

from benchmarks.bars import Bars
from benchmarks.bench_learner import Step, difference, parts_of, report


def test_every_way_trains_each_sequence_once():
    lengths = [5, 3, 9, 4, 4, 8, 7, 1, 2, 6]
    for way in ("padded", "sorted", "packed", "single"):
        parts = parts_of(way, lengths)
        assert sorted(i for part in parts for i in part) == list(range(10)), way
    assert [len(part) for part in parts_of("sorted", lengths)] == [8, 2]
    assert [lengths[i] for part in parts_of("sorted", lengths) for i in part] == sorted(lengths)
    assert [len(part) for part in parts_of("single", lengths)] == [1] * 10


def steps(**seconds: float) -> dict[str, list[Step]]:
    return {way: [Step(s, 0.5, 2.0)] * 3 for way, s in seconds.items()}


def test_the_bar_is_against_the_cheapest_way():
    lines = list[str]()
    bars = Bars(lines.append)
    text = report(bars, "a", steps(learner=1.2, padded=2.0, sorted=1.0, packed=9.0, single=4.0))
    assert "| learner | 2 | 1.200 | 1.200 to 1.200 | 1.20 |" in text
    assert lines == [
        "bar learner_agrees_a: 0.000 relative difference (needs <= 0.001): ok",
        "bar learner_cpu_seconds_a: 1.200 x (needs <= 1.05): short",
    ]
    assert bars.exit_code == 1


def test_steps_differ_by_the_larger_of_loss_and_norm():
    assert difference(Step(1.0, 0.5, 2.0), Step(9.0, 0.5, 1.9)) == pytest.approx(0.05)
    assert difference(Step(1.0, 0.0, 2.0), Step(9.0, 0.0, 2.0)) == 0.0
