"""The plan's bytes beside an engine's, which tells the size of its cache.

Those of a learner's ranks: tests/integration/test_memory_estimate.py, and all of
benchmarks/scale/planner.py.
"""

import pytest

from benchmarks.scale.planner import MOST_OFF, cache_bar, learner_bars, published_bars

pytestmark = pytest.mark.integration


def test_an_engines_cache_is_as_planned_within_10_percent():
    bar = cache_bar()
    assert bar.value <= bar.need == MOST_OFF


@pytest.mark.slow  # test_memory_estimate.py has the same of two layouts
def test_ranks_of_dense_and_expert_models_hold_what_is_planned():
    for bar in learner_bars():
        assert bar.value <= bar.need, bar


def test_published_recipes_are_reproduced():
    for bar in published_bars():
        assert bar.value <= bar.need, bar
