"""Which engine of a host fetches, which ones map its file, and which ones wait for it."""

import asyncio

import pytest

from slipstream.weightbus.relay.host_fetches import HostEngine, HostFetches
from slipstream.weightbus.relay.host_sharing import HostSharing
from slipstream.wire.messages.versions import PolicyVersion
from tests.support.waiting import NEVER_S

V1, V2, V3 = (PolicyVersion(1, step) for step in (1, 2, 3))
FILE = "/proc/7/fd/3"


class Host:
    """Engines that can map each other's files, and an hour at which all of them ask."""

    def __init__(self, count: int = 3, host: str = "h") -> None:
        self.fetches = HostFetches(patience_s=5.0)
        self.engines = [HostEngine(host) for _ in range(count)]
        for engine in self.engines:
            self.fetches.join(engine)

    def begin(self, version: PolicyVersion, *numbers: int, is_alone: bool = False) -> None:
        for number in numbers or range(len(self.engines)):
            self.fetches.begin(self.engines[number], version, 0.0, is_alone=is_alone)

    def ask(self, number: int, now_s: float = 0.0) -> str | None:
        return self.fetches.source(self.engines[number], now_s)

    def fetched(self, number: int, path: str = FILE) -> None:
        self.fetches.fetched(self.engines[number], path)

    def end(self, *numbers: int) -> None:
        for number in numbers or range(len(self.engines)):
            self.fetches.end(self.engines[number])

    def brings(self, version: PolicyVersion, by: int) -> None:
        self.begin(version)
        assert self.ask(by) == ""
        self.fetched(by)
        for number in range(len(self.engines)):
            if number != by:
                assert self.ask(number) == FILE
        self.end()


def test_the_first_fetches_and_the_others_wait_and_then_map_its_file():
    host = Host()
    host.begin(V1)
    assert [host.ask(number) for number in (1, 0, 2)] == ["", None, None]
    assert host.ask(1) == "", "it is asked again"
    host.fetched(1)
    assert [host.ask(number) for number in (0, 2, 0)] == [FILE] * 3
    assert host.engines[1].num_readers == 2
    host.end()
    assert host.engines[1].num_readers == 0


def test_who_has_the_version_before_fetches_the_next_one():
    host = Host()
    host.brings(V1, by=2)
    host.begin(V2)
    assert [host.ask(number) for number in range(3)] == [None, None, ""]
    host.fetched(2)
    assert host.ask(0) == FILE


def test_a_busy_owner_of_the_version_before_is_awaited_for_a_while_only():
    host = Host()
    host.brings(V1, by=2)
    host.begin(V2, 2)
    assert host.ask(2) == ""
    host.begin(V3, 0, 1)
    assert (host.ask(0, 4.9), host.ask(0, 5.0), host.ask(1, 5.0)) == (None, "", None)


def test_nobody_waits_for_one_that_gets_a_later_version():
    host = Host()
    host.brings(V1, by=2)
    host.begin(V2, 0)
    host.begin(V3, 2)
    assert host.ask(0) == ""


def test_another_one_fetches_when_the_first_fails():
    host = Host()
    host.begin(V1)
    assert (host.ask(0), host.ask(1), host.ask(2)) == ("", None, None)
    host.end(0)
    assert (host.ask(1), host.ask(2)) == ("", None)


def test_one_that_failed_fetches_alone_and_is_not_awaited_but_may_be_mapped():
    host = Host()
    host.begin(V1, 0, is_alone=True)
    host.begin(V1, 1, 2)
    assert (host.ask(0), host.ask(1), host.ask(2)) == ("", "", None)
    host.fetched(0)
    assert host.ask(2) == FILE
    host.brings(V2, by=1)
    host.begin(V2, 0, is_alone=True)
    assert host.ask(0) == "", "what it failed with may lie in that file"


def test_a_file_is_not_offered_while_it_is_written_nor_after_its_owner_left():
    host = Host()
    host.brings(V1, by=0)
    host.begin(V2, 0)
    assert host.ask(0) == ""
    host.begin(V1, 1)
    assert host.ask(1, 9.0) == ""
    host.end()
    host = Host()
    host.brings(V1, by=0)
    host.fetches.leave(host.engines[0])
    host.begin(V1, 1)
    assert host.ask(1) == ""


def test_readers_of_a_file_are_counted_while_its_owner_has_the_next_version():
    """The owner is told to leave its memory to them."""
    host = Host()
    host.begin(V1)
    host.ask(0)
    host.fetched(0)
    host.ask(1)
    host.end(0)
    host.begin(V2, 0)
    assert host.ask(0) == ""
    assert host.engines[0].num_readers == 1
    host.end(1)
    assert host.engines[0].num_readers == 0


def test_one_that_was_told_a_file_and_not_ordered_to_map_it_is_not_sent_to_the_next_version():
    """It is asked as it is placed, and again before the order."""
    host = Host()
    host.begin(V1)
    host.ask(0)
    host.fetched(0)
    assert host.ask(1) == FILE
    host.end(0)
    host.begin(V2, 0)
    host.ask(0)
    host.fetched(0, "/proc/7/fd/4")
    assert host.ask(1) == ""
    assert host.engines[0].num_readers == 0


def test_one_that_could_not_open_the_file_has_its_own_for_others():
    host = Host()
    host.begin(V1)
    host.ask(0)
    host.fetched(0)
    assert host.ask(1) == FILE
    host.fetched(1, "/proc/8/fd/3")
    assert host.engines[0].num_readers == 0
    host.fetches.leave(host.engines[0])
    assert host.ask(2) == "/proc/8/fd/3"


def test_one_that_never_opens_a_file_is_told_of_no_more():
    host = Host(count=2)
    for step in range(1, 6):
        is_told = step <= 3
        host.begin(PolicyVersion(1, step))
        assert host.ask(0) == ""
        assert host.ask(1) == (None if is_told else "")
        host.fetched(0)
        assert host.ask(1) == (FILE if is_told else "")
        host.fetched(1, "/proc/8/fd/3")
        host.end()


def test_one_that_opened_a_file_in_between_is_told_again():
    host = Host(count=2)
    for step in range(1, 9):
        host.begin(PolicyVersion(1, step))
        assert (host.ask(0), host.ask(1)) == ("", None)
        host.fetched(0)
        assert host.ask(1) == FILE
        if step % 3:
            host.fetched(1, "")
        host.end()


def test_engines_of_other_hosts_and_of_none_share_nothing():
    host = Host(count=2, host="")
    host.begin(V1)
    assert [host.ask(0), host.ask(1)] == ["", ""]
    host.fetched(0)
    assert host.ask(1) == ""
    there = HostEngine("elsewhere")
    here = Host()
    here.fetches.join(there)
    here.begin(V1)
    here.ask(0)
    here.fetched(0)
    here.fetches.begin(there, V1, 0.0, is_alone=False)
    assert here.fetches.source(there, 0.0) == ""


@pytest.mark.parametrize(
    "path", ["", "/etc/passwd", "/proc/7/fd/../../8/root/x", "/proc/self/fd/3"]
)
async def test_no_engine_is_sent_to_another_path_than_a_descriptor(path: str):
    sharing = HostSharing(limit_s=NEVER_S)
    engines = [HostEngine("h"), HostEngine("h")]
    for engine in engines:
        sharing.join(engine)
        sharing.begin(engine, V1, is_alone=False)
    assert await sharing.source(engines[0]) == ""
    sharing.fetched(engines[0], path)
    assert await sharing.source(engines[1]) == ""


async def test_an_engine_fetches_when_others_of_its_host_take_too_long():
    sharing = HostSharing(limit_s=0.01)
    engines = [HostEngine("h"), HostEngine("h")]
    for engine in engines:
        sharing.join(engine)
        sharing.begin(engine, V1, is_alone=False)
    assert await sharing.source(engines[0]) == ""
    assert await sharing.source(engines[1]) == ""
    assert sharing.num_late == 1


async def test_a_change_on_a_host_wakes_its_own_engines_alone(monkeypatch: pytest.MonkeyPatch):
    sharing = HostSharing(limit_s=NEVER_S)
    owners, waiting = ([HostEngine(name) for name in "ab"] for _ in range(2))
    for engine in (*owners, *waiting):
        sharing.join(engine)
        sharing.begin(engine, V1, is_alone=False)
    for owner in owners:
        assert await sharing.source(owner) == ""
    asked: list[HostEngine] = []
    source = sharing._fetches.source

    def counted(engine: HostEngine, now_s: float) -> str | None:
        asked.append(engine)
        return source(engine, now_s)

    monkeypatch.setattr(sharing._fetches, "source", counted)
    tasks = [asyncio.create_task(sharing.source(engine)) for engine in waiting]
    await asyncio.sleep(0)
    asked.clear()
    for owner, task, engine in zip(owners, tasks, waiting, strict=True):
        sharing.fetched(owner, FILE)
        assert await task == FILE
        assert asked == [engine]
        asked.clear()
