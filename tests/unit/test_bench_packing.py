"""The bars of packing hold on the recorded arrays, and docs/performance.md has their figures."""

from pathlib import Path

import numpy as np
import pytest

from benchmarks.bench_packing import (
    CASES,
    DATA_PARALLEL,
    FEW_EACH,
    MANY,
    MAX_TOKENS,
    PIPELINE,
    Case,
    greedy,
    lengths_of,
    markdown,
    padding,
    planned,
    recorded,
    worth,
)

DOCS = Path(__file__).parents[2] / "docs"
NAMES = tuple(MAX_TOKENS)


def test_the_document_has_the_program_s_table():
    assert markdown() in (DOCS / "performance.md").read_text("utf-8")


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_replicas_are_within_a_hundredth_of_the_bound(name: str, case: Case):
    assert worth(planned(name, case), name, case).balance <= 1.01


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_microbatches_are_as_few_as_tokens_and_coupling_allow(name: str, case: Case):
    found = worth(planned(name, case), name, case)
    if case.coupled:
        assert found.of_needed <= 1.02
    elif case is not FEW_EACH:
        assert found.microbatches <= 1.02


@pytest.mark.parametrize("name", NAMES)
def test_pipelines_take_no_longer_than_with_the_greedy_rule(name: str):
    for case in (PIPELINE, MANY):
        before = worth(greedy(name, case), name, case).time
        assert worth(planned(name, case), name, case).time <= before


@pytest.mark.parametrize("name", NAMES)
def test_packed_microbatches_hold_no_padding(name: str):
    assert padding(name, MANY) == 0


def test_the_greedy_rule_leaves_replicas_with_few_long_trajectories_unequal():
    assert worth(greedy("multi_turn", FEW_EACH), "multi_turn", FEW_EACH).balance > 1.2


def test_the_arrays_are_what_the_program_says():
    for name, median, longest, cut in [
        ("short_math", 578, 3_044, 0.0002),
        ("long_cot", 10_451, 32_768, 0.074),
        ("multi_turn", 9_102, 65_536, 0.021),
    ]:
        lengths = recorded()[name]
        assert len(lengths) == DATA_PARALLEL.trajectories == len(lengths_of(name, DATA_PARALLEL))
        assert max(lengths) == longest <= MAX_TOKENS[name]
        assert np.median(lengths) == pytest.approx(median, abs=1)
        assert lengths.count(longest) / len(lengths) == pytest.approx(cut, abs=0.001)
