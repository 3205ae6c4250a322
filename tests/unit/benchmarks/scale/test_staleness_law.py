"""The simulator's mean staleness is that of the closed form where engines are the slower side."""

import pytest

from benchmarks.scale.closed_form import PUBLISHED, SetUp, compared
from benchmarks.scale.staleness_law import oldest_staleness, token_staleness


@pytest.mark.parametrize("set_up", PUBLISHED)
def test_a_simulated_run_is_within_10_per_cent_of_the_closed_form(set_up: SetUp):
    assert abs(compared(set_up).error) < 0.10


@pytest.mark.parametrize("set_up", PUBLISHED)
def test_the_closed_form_is_within_10_per_cent_of_what_was_measured(set_up: SetUp):
    concurrency, batch, rho, tail, measured = set_up
    assert oldest_staleness(concurrency, batch, rho, tail) == pytest.approx(measured, rel=0.10)


def test_tokens_of_one_length_are_half_a_length_younger_than_their_first():
    first = oldest_staleness(100, 50, 0.5, 1.0)
    assert first == 2.5
    assert token_staleness(100, 50, 0.5, 1.0, 0.0) == first - 1.0


def test_a_faster_engine_is_another_case():
    with pytest.raises(ValueError, match="slower side"):
        oldest_staleness(100, 50, 1.2, 1.4)
