"""Waits in a group of an engine and the relay; whole publishes: integration/test_weight_bus.py."""

import threading
import time

import pytest
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from slipstream.weightbus.net import groups
from slipstream.wire.errors import PublishError
from tests.support.waiting import HANG_S

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


def broadcasts(monkeypatch: pytest.MonkeyPatch, work: Work) -> None:
    monkeypatch.setattr(dist, "broadcast", lambda *_args, **_named: work)


def broadcast(timeout_s: float, group: object = None, **more: bool) -> None:
    flat = torch.zeros(1, dtype=torch.uint8)
    groups.broadcast(flat, group or Group(), timeout_s=timeout_s, **more)  # type: ignore[arg-type]


def test_work_that_never_ends_is_given_up(monkeypatch: pytest.MonkeyPatch):
    broadcasts(monkeypatch, Work())
    with pytest.raises(PublishError, match=r"did not end in 0\.05 s \(weightbus\.timeout_s\)"):
        broadcast(0.05, watches_store=False)


def test_a_call_that_blocks_is_given_up(monkeypatch: pytest.MonkeyPatch):
    ends = threading.Event()
    monkeypatch.setattr(dist, "broadcast", lambda *_args, **_named: ends.wait())
    with pytest.raises(PublishError, match="did not end"):
        groups.pass_first_byte(Group(), torch.device("cpu"), timeout_s=0.05)  # type: ignore[arg-type]
    ends.set()


def test_work_is_waited_for(monkeypatch: pytest.MonkeyPatch):
    work = Work(ends_after=3)
    broadcasts(monkeypatch, work)
    broadcast(HANG_S, watches_store=False)
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
    with pytest.raises(TimeoutError):
        groups._wait_for(Work(ends_after=0), None, end_s=0.0, arrived=event)  # type: ignore[arg-type]
    assert event.is_recorded


@pytest.mark.parametrize("work", [Work(), Work(ends_after=0)], ids=["under way", "failed"])
def test_a_wait_ends_when_the_relay_has_left(monkeypatch: pytest.MonkeyPatch, work: Work):
    group = Group()
    monkeypatch.setitem(c10d._world.pg_map, group, ("nccl", Store()))
    end_s = time.monotonic() + HANG_S
    with pytest.raises(dist.DistNetworkError, match="connection reset"):
        groups._wait_for(work, group, end_s=end_s, arrived=Event())  # type: ignore[arg-type]


def test_a_store_whose_host_is_silent_is_given_up(monkeypatch: pytest.MonkeyPatch):
    ends = threading.Event()
    silent = type("Silent", (), {"check": lambda *_: ends.wait()})()
    group = Group()
    monkeypatch.setitem(c10d._world.pg_map, group, ("nccl", silent))
    broadcasts(monkeypatch, Work())
    with pytest.raises(PublishError, match="did not end"):
        broadcast(0.5, group)
    ends.set()


@pytest.mark.parametrize(("backend", "aborts"), [("gloo", False), ("nccl", True)])
def test_only_gloo_is_destroyed(monkeypatch: pytest.MonkeyPatch, backend: str, aborts: bool):
    called: list[str] = []
    monkeypatch.setattr(dist, "get_backend", lambda _group: backend)
    monkeypatch.setattr(dist, "destroy_process_group", lambda _group: called.append("destroy"))
    monkeypatch.setattr(c10d, "_abort_process_group", lambda _group: called.append("abort"))
    groups.release(Group())  # type: ignore[arg-type]
    assert called == ["abort" if aborts else "destroy"]
