"""Group commit: order, durability before the callback, bounded transactions, failure."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from functools import partial

import pytest
from typing_extensions import override

from slipstream.broker.store.base import Changes, StoredTrajectory
from slipstream.broker.store.group_commit import GroupCommitter
from slipstream.wire.errors import StoreLostError, SupersededError
from tests.support.memory_store import MemoryStore


class SlowStore(MemoryStore):
    """Keeps each transaction waiting until it is let go, and may fail."""

    def __init__(self) -> None:
        super().__init__()
        self.transactions: list[list[bytes]] = []
        self.gate = asyncio.Semaphore(0)
        self.error: Exception | None = None

    @override
    async def commit(self, changes: Changes) -> None:
        self.transactions.append(list(changes.events))
        await self.gate.acquire()
        if self.error is not None:
            raise self.error
        await super().commit(changes)


@pytest.fixture
def store() -> SlowStore:
    return SlowStore()


@pytest.fixture
@asynccontextmanager
async def committer(store: SlowStore) -> AsyncIterator[GroupCommitter]:
    committer = GroupCommitter(store, max_transaction_bytes=1_000)
    writing = asyncio.create_task(committer.run())
    try:
        yield committer
    finally:
        writing.cancel()
        await asyncio.gather(writing, return_exceptions=True)


async def settle() -> None:
    """Let every task run as far as it can."""
    for _ in range(20):
        await asyncio.sleep(0)


async def test_what_arrives_during_a_transaction_goes_into_the_next_together(
    committer: GroupCommitter, store: SlowStore
):
    done: list[int] = []
    for number in range(4):
        committer.add(Changes([b"%d" % number]), partial(done.append, number))
        await settle()
    assert store.transactions == [[b"0"]]
    assert done == []
    assert committer.backlog == 4
    store.gate.release()
    await settle()
    assert done == [0]
    assert store.transactions == [[b"0"], [b"1", b"2", b"3"]]
    store.gate.release()
    await settle()
    assert done == [0, 1, 2, 3]
    assert committer.backlog == 0


async def test_nothing_is_called_back_from_within_the_call_that_hands_in(
    committer: GroupCommitter, store: SlowStore
):
    done: list[str] = []
    committer.add(Changes(), partial(done.append, "empty"))
    assert done == []
    await settle()
    assert done == ["empty"]
    assert store.transactions == []


async def test_an_empty_change_waits_for_what_is_on_its_way(
    committer: GroupCommitter, store: SlowStore
):
    done: list[str] = []
    committer.add(Changes([b"event"]), partial(done.append, "event"))
    await settle()
    repeated = asyncio.create_task(committer.commit(Changes()))
    await settle()
    assert not repeated.done()
    store.gate.release()
    await repeated
    assert done == ["event"]
    assert store.transactions == [[b"event"]]


async def test_a_large_backlog_is_written_in_order_in_transactions_of_bounded_size(
    committer: GroupCommitter, store: SlowStore
):
    events = [b"%d" % number * 400 for number in range(5)]
    events.insert(3, b"x" * 5_000)
    for event in events:
        committer.add(Changes([event]))
    assert committer.backlog_bytes == 5 * 400 + 5_000
    for _ in range(6):
        store.gate.release()
    await committer.commit(Changes())
    assert store.transactions == [events[0:2], events[2:3], events[3:4], events[4:6]]
    assert committer.backlog_bytes == 0


def test_payloads_transcripts_and_snapshots_count_as_backlog():
    changes = Changes(
        [b"12345"], {(0, 0): StoredTrajectory(bytes(100), memoryview(bytes(20)))}, snapshot=b"abc"
    )
    assert changes.num_bytes == 128
    assert Changes(remove=[(0, 0)]).num_bytes == 0
    assert not Changes(remove=[(0, 0)]).is_empty
    assert not Changes(snapshot=b"").is_empty


@pytest.mark.parametrize("error", [SupersededError("generation"), StoreLostError("gone")])
async def test_store_failure_ends_the_loop_and_all_waiting_commits(error: Exception):
    store = SlowStore()
    store.error = error
    committer = GroupCommitter(store)
    called: list[int] = []
    committer.add(Changes([b"0"]), partial(called.append, 0))
    writing = asyncio.create_task(committer.run())
    await settle()
    waiting = [asyncio.create_task(committer.commit(Changes())) for _ in range(3)]
    committer.add(Changes([b"1"]), partial(called.append, 1))
    await settle()
    store.gate.release()
    results = await asyncio.gather(writing, *waiting, return_exceptions=True)
    assert results == [error] * 4
    with pytest.raises(type(error)):
        await committer.commit(Changes([b"2"]))
    committer.add(Changes([b"3"]), partial(called.append, 3))
    await settle()
    assert called == []


async def test_waiting_commits_are_cancelled_with_the_loop(
    committer: GroupCommitter, store: SlowStore
):
    waiting = asyncio.create_task(committer.commit(Changes([b"0"])))
    await settle()
    assert store.transactions == [[b"0"]]
    all_tasks = asyncio.all_tasks() - {asyncio.current_task(), waiting}
    for task in all_tasks:
        task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting


async def test_cancelled_waiter_does_not_disturb_the_others(
    committer: GroupCommitter, store: SlowStore
):
    first = asyncio.create_task(committer.commit(Changes([b"0"])))
    second = asyncio.create_task(committer.commit(Changes([b"1"])))
    await settle()
    first.cancel()
    with suppress(asyncio.CancelledError):
        await first
    store.gate.release()
    store.gate.release()
    await second
    assert store.transactions == [[b"0", b"1"]]
