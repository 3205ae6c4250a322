"""Waits in a group of an engine and the relay; whole publishes: integration/test_weight_bus.py."""

import pytest
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from slipstream.weightbus.net import groups
from slipstream.wire.errors import PublishError

Group = type("Group", (), {})


class Work:
    """Work of NCCL whose peer is gone: it never ends and never fails."""

    def __init__(self, *, ends_after: int | None = None) -> None:
        self.polls, self._ends_after = 0, ends_after

    def is_completed(self) -> bool:
        self.polls += 1
        return self._ends_after is not None and self.polls > self._ends_after

    def wait(self) -> bool:
        return True


class Store:
    """A store whose server has ended."""

    def check(self, keys: list[str]) -> bool:
        raise dist.DistNetworkError(f"connection reset: {keys}")


def test_work_that_never_ends_is_given_up():
    with pytest.raises(PublishError, match=r"did not end in 0\.05 s \(weightbus\.timeout_s\)"):
        groups.wait_for(Work(), timeout_s=0.05)  # type: ignore[arg-type]


def test_work_is_waited_for():
    work = Work(ends_after=3)
    groups.wait_for(work, timeout_s=60)  # type: ignore[arg-type]
    assert work.polls == 4


class Event:
    """An event behind a kernel of NCCL, which does not end when its communicator has failed."""

    def __init__(self) -> None:
        self.is_recorded = False

    def record(self) -> None:
        self.is_recorded = True

    def query(self) -> bool:
        return False


def test_work_that_counts_as_complete_because_it_failed_is_no_success():
    event = Event()
    with pytest.raises(PublishError, match="did not end"):
        groups.wait_for(Work(ends_after=0), timeout_s=0.05, arrived=event)  # type: ignore[arg-type]
    assert event.is_recorded


def test_waiting_agent_learns_that_the_relay_has_left(monkeypatch: pytest.MonkeyPatch):
    group = Group()
    monkeypatch.setitem(c10d._world.pg_map, group, ("nccl", Store()))
    with pytest.raises(PublishError, match="connection reset"):
        groups.wait_for(Work(), timeout_s=600, group=group)  # type: ignore[arg-type]


@pytest.mark.parametrize(("backend", "aborts"), [("gloo", False), ("nccl", True)])
def test_only_gloo_is_destroyed(monkeypatch: pytest.MonkeyPatch, backend: str, aborts: bool):
    called: list[str] = []
    monkeypatch.setattr(dist, "get_backend", lambda _group: backend)
    monkeypatch.setattr(dist, "destroy_process_group", lambda _group: called.append("destroy"))
    monkeypatch.setattr(c10d, "_abort_process_group", lambda _group: called.append("abort"))
    groups.release(Group())  # type: ignore[arg-type]
    assert called == ["abort" if aborts else "destroy"]


def test_a_byte_that_does_not_pass_is_an_error(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(dist, "broadcast", lambda *_args, **_named: Work())
    with pytest.raises(PublishError, match="did not end"):
        groups.pass_first_byte(Group(), torch.device("cpu"), timeout_s=0.05)  # type: ignore[arg-type]
