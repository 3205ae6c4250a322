"""Star and chain take the seconds of the arithmetic over links of 1 Gbit/s."""

import pytest

from benchmarks.bench_chain import WITHIN
from benchmarks.weightbus.shaped import Shape, measure_shaped

pytestmark = [pytest.mark.integration, pytest.mark.slow]


@pytest.mark.parametrize(("fanout", "publishes"), [(0, 4), (1, 16)], ids=["star", "chain"])
def test_the_fastest_publish_takes_what_the_arithmetic_says(fanout: int, publishes: int):
    shape = Shape(fanout=fanout)
    best_s = min(measure_shaped(shape, publishes=publishes))  # other load only adds
    assert best_s == pytest.approx(shape.expected_s, rel=WITHIN)
