"""The arithmetic of a learner step comes to what was measured, and docs/performance.md has it."""

import pytest

from benchmarks.learner_bytes import (
    H100,
    KERNELS,
    MEASURED,
    OPERATORS,
    PROFILE,
    markdown,
    measured_mfu,
    mfu,
    seconds_by_group,
    shape_of,
)
from tests.support.tiny_run import ROOT


@pytest.mark.parametrize("line", MEASURED)
def test_the_model_comes_to_what_was_measured(line: tuple[str, int]):
    name, tokens = line
    ours = measured_mfu(name, MEASURED[line])
    assert mfu(shape_of(name), OPERATORS, H100, tokens=tokens) == pytest.approx(ours, rel=0.1)


def test_groups_come_to_those_of_a_profile():
    parts = seconds_by_group(shape_of("1.5B"), OPERATORS, H100, tokens=8192)
    assert {group: parts[group] for group in PROFILE} == pytest.approx(PROFILE, rel=0.1)


def test_microbatches_share_an_update():
    hf = shape_of("0.5B")
    one, four = (seconds_by_group(hf, KERNELS, H100, tokens=512, microbatches=n) for n in (1, 4))
    assert four == pytest.approx({k: v * (1 if k == "update" else 4) for k, v in one.items()})


def test_performance_has_the_tables():
    assert markdown() in (ROOT / "docs" / "performance.md").read_text("utf-8")
