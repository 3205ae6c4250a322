"""What a loader lends to trajectories, and which ended process was whose."""

import socket
from collections.abc import Iterator

import pytest

from slipstream.generators.environments.loader import Borrower, UnknownEnds


@pytest.fixture
def borrower() -> Iterator[Borrower]:
    with socket.socket() as asking:
        yield Borrower(1, asking)


def test_a_trajectory_has_sixteen_keepers_at_a_time_and_4096_in_all(borrower: Borrower):
    borrower.num_running = borrower.num_lent = 15
    assert borrower.refusal == ""
    borrower.num_running = borrower.num_lent = 16
    assert borrower.refusal == "16 sandboxes of a trajectory may run at a time"
    borrower.num_running, borrower.num_lent = 0, 4095
    assert borrower.refusal == ""
    borrower.num_lent = 4096
    assert borrower.refusal == "a trajectory may start 4096 sandboxes in all"


def test_a_process_that_ended_before_its_fork_told_of_it_is_found_when_it_does():
    ends = UnknownEnds()
    ends.add(70, 9, {50, 51})
    ends.forget({51, 52})
    assert ends.take({60}) == {}
    assert ends.take({60, 70}) == {70: 9}
    assert ends.take({70}) == {}


def test_an_ended_process_that_no_fork_under_way_has_begun_is_forgotten():
    ends = UnknownEnds()
    ends.add(70, 9, {50})
    ends.add(71, 9, set())
    ends.forget({51})
    assert ends.take({70, 71}) == {}  # another has these ids now
