"""How many connections carry buckets, and as many threads of a relay."""

import os

import pytest

from slipstream.weightbus.net.curve import num_connections


@pytest.mark.parametrize(("cores", "number"), [(2, 4), (32, 4), (64, 8), (128, 16), (384, 16)])
def test_between_hosts_they_are_a_share_of_the_cores(
    cores: int, number: int, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _pid: set(range(cores)))
    assert num_connections(0, is_far=True) == number
    assert num_connections(0, is_far=False) == 1
    assert num_connections(3, is_far=True) == num_connections(3, is_far=False) == 3
