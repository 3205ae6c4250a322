"""The benchmark's own logic: errors, losing runs, random schedules, a picture that is XML."""

import msgspec
import pytest

from benchmarks.bench_scale import holds
from benchmarks.scale.calibration import Predicted, Row
from benchmarks.scale.predictions import errors, losing, median_and_worst

ROW = Row(
    name="one",
    role="fit",
    gpu="H100",
    gpus=8,
    model="Qwen2.5-7B",
    prompts=8,
    samples=8,
    longest_total=1000,
    engine_ranks=1,
    step_s=100.0,
)


def of(told_s: float, **changes: object) -> Predicted:
    return Predicted(msgspec.structs.replace(ROW, **changes), told_s, 10.0, told_s - 10.0, 1e6)


TOLD = [
    of(100.0),
    of(105.0, name="two", role="predict"),
    of(80.0, name="three", role="predict"),
    of(130.0, name="four", role="predict", step_s=120.0, loses_to="one"),
]


def test_errors_are_of_predicted_rows_alone():
    assert errors(TOLD) == pytest.approx([5, 20, 100 / 12])
    assert median_and_worst(TOLD) == pytest.approx((100 / 12, 20))


def test_a_run_loses_if_it_is_slower_than_the_run_that_it_is_compared_with():
    assert [loses for _, loses in losing(TOLD)] == [True]
    faster = [TOLD[0], of(90.0, name="four", role="predict", loses_to="one")]
    assert [loses for _, loses in losing(faster)] == [False]
    slower_by = of(3.0, name="five", role="predict", step_s=4.0, less="one", loses_to="one")
    assert [loses for _, loses in losing([TOLD[0], slower_by])] == [True]


def test_random_schedules_hold():
    assert all(map(holds, range(20)))
