from itertools import permutations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slipstream.learner.batches.schedule import pipeline_span

WORK = st.lists(st.integers(0, 9).map(float), min_size=1, max_size=9)


@pytest.mark.parametrize(("number", "stages"), [(1, 1), (8, 1), (1, 4), (3, 4), (8, 4), (16, 2)])
def test_equal_microbatches_take_one_more_for_each_further_stage(number: int, stages: int):
    assert pipeline_span([3.0] * number, stages) == pytest.approx(3.0 * (number + stages - 1))


def test_two_stages_by_hand():
    # The last stage: F0 1-2, B0 2-4, F1 4-6, B1 6-10. The first: F0 0-1, F1 1-3, B0 4-6, B1 10-14.
    assert pipeline_span([3.0, 6.0], 2) == pytest.approx(14.0)


@given(WORK, st.integers(1, 5))
def test_a_step_is_as_long_as_its_work_and_as_one_microbatch_through_all_stages(
    work: list[float], stages: int
):
    span = pipeline_span(work, stages)
    assert span >= max(sum(work), stages * max(work)) - 1e-9
    assert span <= stages * sum(work) + 1e-9


def test_small_microbatches_at_both_ends_are_nearly_the_quickest_of_all_orders():
    work = [1.0, 2.0, 3.0, 4.0, 5.0, 6.0]
    spans = {order: pipeline_span(order, 4) for order in permutations(work)}
    small_ends = spans[2.0, 4.0, 6.0, 5.0, 3.0, 1.0]
    assert small_ends <= 1.05 * min(spans.values())
    assert small_ends < spans[tuple(work)]
    assert small_ends < spans[tuple(reversed(work))]
    assert small_ends < 0.9 * sum(spans.values()) / len(spans)
