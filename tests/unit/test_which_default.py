"""The statistics behind the choice of a default, against values from tables."""

import statistics
from dataclasses import replace

import msgspec
import pytest

from benchmarks.which_default import (
    RECORDED,
    ROOT,
    RUNS,
    SEEDS,
    Result,
    holm,
    read,
    report,
    sign_flip_p,
    student_t,
)
from slipstream.algos.config import choice_of
from slipstream.algos.section import AlgoSection

DEFAULT = "async-default"


def test_eight_differences_of_one_sign_are_the_least_likely_of_all():
    assert sign_flip_p([0.1, 0.3, 0.2, 0.4, 0.1, 0.2, 0.3, 0.5]) == 2 / 256
    assert sign_flip_p([-1.0] * 8) == 2 / 256
    assert sign_flip_p([1.0, -1.0]) == 1.0
    # of the 8 signs of 1, 2, 3 the sums 6 and -6, 4 and -4 are at least as far from 0 as 4
    assert sign_flip_p([-1.0, 2.0, 3.0]) == 4 / 8


def test_holm_multiplies_the_least_p_by_the_number_of_tests():
    corrected = holm({"a": 0.01, "b": 0.04, "c": 0.03})
    assert corrected == {"a": pytest.approx(0.03), "c": pytest.approx(0.06), "b": 0.06}
    assert holm({"a": 0.9, "b": 0.8}) == {"a": 1.0, "b": 1.0}


@pytest.mark.parametrize(
    ("share", "degrees", "value"),
    [(0.975, 7, 2.364624), (0.8, 7, 0.896030), (0.975, 1, 12.706205), (0.95, 30, 1.697261)],
)
def test_quantiles_of_students_t_are_those_of_the_tables(share: float, degrees: int, value: float):
    assert student_t(share, degrees) == pytest.approx(value, rel=1e-5)


def test_the_report_pairs_runs_by_seed():
    names = list(RUNS)
    results = [
        Result(
            name, seed, final=0.8 + 0.01 * seed + 0.02 * (name == names[1]), mean=0.6, staleness=2.0
        )
        for seed in SEEDS
        for name in names
    ]
    lines = report(results).splitlines()
    assert lines[2].startswith(f"| {names[0]} | 2.00 | 0.835 | 0.600 |")
    # better by the same in each of 8 pairs: p = 2 / 256, four candidates
    assert f"| {names[1]} | 2.00 | 0.855, +0.020, 0.031, 0.000 |" in lines[3]
    assert "0.835, +0.000, 1.000, 0.000" in lines[4]


def test_the_page_has_the_table_of_the_recorded_runs():
    results = read(RECORDED)
    assert len(results) == len({(one.candidate, one.seed) for one in results})
    assert {one.seed for one in results} == set(SEEDS)
    assert report(results) in (ROOT / "docs" / "staleness.md").read_text()


def test_the_default_is_what_learned_the_most():
    def learned(name: str) -> float:
        return statistics.fmean(one.final for one in read(RECORDED) if one.candidate == name)

    best = choice_of(msgspec.convert(RUNS[max(RUNS, key=learned)], AlgoSection))
    assert replace(best, preset=DEFAULT) == choice_of(AlgoSection(preset=DEFAULT))
    assert AlgoSection().preset == DEFAULT
