"""How many connections carry buckets, and as many threads of a relay."""

import os
import resource

import pytest

from slipstream.weightbus.net.curve import limit_at, num_connections


@pytest.mark.parametrize(("cores", "number"), [(2, 4), (32, 4), (64, 8), (128, 16), (384, 16)])
def test_between_hosts_they_are_a_share_of_the_cores(
    cores: int, number: int, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _pid: set(range(cores)))
    assert num_connections(0, is_far=True) == number
    assert num_connections(0, is_far=False) == 1
    assert num_connections(3, is_far=True) == num_connections(3, is_far=False) == 3


def test_a_thousand_agents_with_the_most_connections_find_room(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _pid: set(range(384)))
    monkeypatch.setattr(resource, "getrlimit", lambda _kind: (1 << 20, 1 << 20))
    most = limit_at(1 / 2, has_buckets=True).most
    assert most >= 1000 * num_connections(0, is_far=True)
    assert most * 4096 <= 64 << 20, "what strangers can make a relay hold"
    assert limit_at(1 / 8, has_buckets=False).most == 4096
    monkeypatch.setattr(resource, "getrlimit", lambda _kind: (1024, 1024))
    assert limit_at(1 / 2, has_buckets=True).most == 512
