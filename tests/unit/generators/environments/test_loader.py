"""What a loader lends to trajectories."""

import socket
from collections.abc import Iterator

import pytest

from slipstream.generators.environments.loader import Borrower


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
