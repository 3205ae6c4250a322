"""The statistics behind the choice of a default, against values from tables."""

import math
import statistics
from dataclasses import replace

import msgspec
import pytest

from benchmarks.bench_corrections import Case
from benchmarks.which_default import (
    CANDIDATES,
    RECORDED,
    ROOT,
    RUNS,
    SEEDS,
    Result,
    detectable,
    errors,
    exact_tables,
    holm,
    read,
    report,
    sign_flip_p,
    standings,
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


def test_what_can_be_detected_grows_with_the_deviation_and_shrinks_with_the_seeds():
    four = [0.0, 0.2, 0.0, 0.2]
    deviation = math.sqrt(4 * 0.1**2 / 3)
    expected = (student_t(0.975, 3) + student_t(0.8, 3)) * deviation / 2
    assert detectable(four) == pytest.approx(expected)
    assert detectable(four * 2) < detectable(four)


def test_standings_compare_each_cell_with_its_best():
    even = dict.fromkeys(CANDIDATES, 1.0)
    found = {
        (4, Case(lag=1)): even | {"none": 2.0, "m2po": 1.01},
        (4, Case(lag=2)): even | {"none": 0.5},
    }
    by_name = {one.name: one for one in standings(found)}
    assert by_name["none"].mean == pytest.approx(math.sqrt(2.0))
    assert by_name["none"].worst == 2.0
    assert by_name["none"].near_best == 0.5
    assert by_name["m2po"].near_best == 0.5
    assert by_name["cispo at mu"].worst == 2.0


def test_the_exact_study_has_every_candidate_in_every_cell():
    found = errors({4: 2}, lags=(1, 3), mismatches=(0.02, 0.5), num_problems=2)
    assert len(found) == 4
    assert all(set(cell) == set(CANDIDATES) for cell in found.values())
    assert all(0 < error < 10 for cell in found.values() for error in cell.values())
    table = exact_tables(found).splitlines()
    assert len(table) == 2 * (2 + len(CANDIDATES)) + 1
    assert table[3 + len(CANDIDATES)] == (
        "| mean | tokens 4 | lag 1 | lag 3 | mismatch 0.02 | mismatch 0.5 |"
    )


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
