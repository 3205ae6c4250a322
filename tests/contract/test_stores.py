"""What every store promises, asked of the one in memory and of real servers.

What a server promises through death, silence and full disks is in
tests/integration/test_redis_server.py.
"""

import shutil
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from pathlib import Path

import pytest

from slipstream.broker.store.base import Changes, StoredTrajectory, TrajectoryStore
from slipstream.broker.store.private_server import RedisServer
from slipstream.broker.store.redis import RedisStore
from slipstream.broker.store.server_binary import packaged_server
from slipstream.wire.errors import SupersededError
from tests.support.memory_store import MemoryStore, SharedMemory

Open = Callable[..., Awaitable[TrajectoryStore]]  # another handle on the same store


def debian_server() -> Path:
    found = shutil.which("redis-server")
    if found is None:
        pytest.skip("redis-server is not on PATH")
    return Path(found)


@pytest.fixture
def folder() -> Iterator[Path]:
    """A private folder with a path short enough for Unix sockets."""
    with tempfile.TemporaryDirectory(prefix="s-") as path:
        yield Path(path)


@asynccontextmanager
async def on_server(server: RedisServer) -> AsyncIterator[Open]:
    await server.until_listening(server.socket)
    async with AsyncExitStack() as stores:

        async def open_store(name: str = "run*[1]") -> TrajectoryStore:
            store = await RedisStore.connect(server.url, name, password=server.password)
            stores.push_async_callback(store.close)
            return store

        yield open_store


@asynccontextmanager
async def in_memory() -> AsyncIterator[Open]:
    shared = SharedMemory()

    async def open_store() -> TrajectoryStore:
        return MemoryStore(shared)

    yield open_store


@pytest.fixture(
    params=[
        "memory",
        pytest.param("packaged", marks=pytest.mark.redis),
        pytest.param("debian", marks=pytest.mark.redis),
    ]
)
def open_store(request: pytest.FixtureRequest) -> Iterator[AbstractAsyncContextManager[Open]]:
    """What opens a handle on an empty store."""
    if request.param == "memory":
        yield in_memory()
        return
    binary = packaged_server() if request.param == "packaged" else debian_server()
    folder: Path = request.getfixturevalue("folder")
    server = RedisServer.launch(
        socket=folder / "r.sock",
        folder=folder / "data",
        log_file=folder / "redis.log",
        fsync="always",
        binary=binary,
    )
    try:
        yield on_server(server)
    finally:
        server.stop()


def stored(number: int) -> StoredTrajectory:
    return StoredTrajectory(payload=bytes([0, number, 255]), transcript=b"said %d" % number)


async def events_of(store: TrajectoryStore) -> list[bytes]:
    return [event async for event in store.replay()]


async def contents(store: TrajectoryStore, *keys: tuple[int, int]) -> list[tuple[bytes, bytes]]:
    return [(bytes(s.payload), bytes(s.transcript)) for s in await store.fetch(keys)]


async def test_empty_store_holds_nothing_and_reports_version_and_durability(open_store: Open):
    store = await open_store()
    assert await events_of(store) == []
    assert await store.snapshot() is None
    assert (await store.server_version()).split()[0] in {"memory", "redis", "valkey"}
    assert (await store.durability()).split(":")[0] in {"memory", "appendfsync always"}
    with pytest.raises(KeyError):
        await store.fetch([(0, 0)])
    assert await store.fetch([]) == []


async def test_events_are_replayed_in_the_order_of_their_commits(open_store: Open):
    store = await open_store()
    expected = []
    for start in range(0, 2_500, 500):
        events = [b"\x00\xff event %d" % i for i in range(start, start + 500)]
        await store.commit(Changes(events))
        expected += events
    assert await events_of(store) == expected
    assert await events_of(await open_store()) == expected


async def test_trajectories_are_fetched_in_the_order_asked(open_store: Open):
    store = await open_store()
    view = memoryview(b"xxpayloadxx")[2:-2]
    trajectories = {(1, 0): stored(1), (1, 1): StoredTrajectory(view, memoryview(b"t"))}
    await store.commit(Changes([b"e"], dict(trajectories)))
    assert await contents(store, (1, 1), (1, 0), (1, 1)) == [
        (b"payload", b"t"),
        (b"\x00\x01\xff", b"said 1"),
        (b"payload", b"t"),
    ]


async def test_many_trajectories_of_many_sizes_come_back_whole(open_store: Open):
    store = await open_store()
    payloads = {(i, i % 8): bytes([i % 251]) * (i * 7919 % 60_000) for i in range(700)}
    await store.commit(Changes(put={key: StoredTrajectory(p, b"") for key, p in payloads.items()}))
    assert await contents(store, *payloads) == [(p, b"") for p in payloads.values()]


async def test_a_removed_trajectory_is_named_when_it_is_asked_for(open_store: Open):
    store = await open_store()
    await store.commit(Changes(put={(1, 0): stored(1), (1, 1): stored(2)}))
    await store.commit(Changes([b"trained"], remove=[(1, 0), (9, 9)]))
    with pytest.raises(KeyError) as caught:
        await store.fetch([(1, 1), (1, 0)])
    assert caught.value.args == ((1, 0),)
    assert await contents(store, (1, 1)) == [(b"\x00\x02\xff", b"said 2")]


async def test_merged_changes_are_what_they_are_one_after_the_other(open_store: Open):
    store = await open_store()
    await store.commit(Changes(put={(4, 0): stored(4), (5, 0): stored(5)}))
    steps = [
        Changes([b"first"], {(1, 0): stored(1)}),
        Changes([b"second"], {(2, 0): stored(2), (1, 0): stored(3), (4, 0): stored(9)}),
        Changes([b"third"], remove=[(2, 0), (4, 0), (5, 0)]),
        Changes([b"fourth"], {(5, 0): stored(6)}),
        Changes(put={(7, 0): stored(7)}, remove=[(7, 0)]),
    ]
    merged = Changes()
    for step in steps:
        merged.merge(step)
    await store.commit(merged)
    assert await events_of(store) == [b"first", b"second", b"third", b"fourth"]
    assert await contents(store, (1, 0), (5, 0)) == [
        (b"\x00\x03\xff", b"said 3"),
        (b"\x00\x06\xff", b"said 6"),
    ]
    for gone in (2, 0), (4, 0), (7, 0):
        with pytest.raises(KeyError):
            await store.fetch([gone])


async def test_a_snapshot_takes_the_place_of_the_events_before_it(open_store: Open):
    store = await open_store()
    await store.commit(Changes([b"one", b"two"], {(1, 0): stored(1)}))
    await store.commit(Changes([b"four"], snapshot=b"one two three"))
    assert await store.snapshot() == b"one two three"
    assert await events_of(store) == [b"four"]
    merged = Changes([b"five"])
    merged.merge(Changes([b"six"], snapshot=b"up to five"))
    merged.merge(Changes([b"seven"]))
    await store.commit(merged)
    assert await store.snapshot() == b"up to five"
    assert await events_of(store) == [b"six", b"seven"]
    assert await contents(store, (1, 0)) == [(b"\x00\x01\xff", b"said 1")]


async def test_only_the_latest_claim_can_write(open_store: Open):
    first, second = await open_store(), await open_store()
    older = await first.claim()
    await first.commit(Changes([b"before"], {(1, 0): stored(1)}))
    newer = await second.claim()
    assert newer > older
    with pytest.raises(SupersededError, match=f"generation {newer}, this one has {older}"):
        await first.commit(Changes([b"too late"], {(2, 0): stored(2)}, [(1, 0)], snapshot=b"stale"))
    await second.commit(Changes([b"after"]))
    with pytest.raises(SupersededError):
        await first.commit(Changes([b"again"]))
    assert await events_of(second) == [b"before", b"after"]
    assert await second.snapshot() is None
    assert await contents(second, (1, 0)) == [(b"\x00\x01\xff", b"said 1")]
    with pytest.raises(KeyError):
        await second.fetch([(2, 0)])


async def test_a_handle_that_has_not_claimed_does_so_with_its_first_write(open_store: Open):
    first, second = await open_store(), await open_store()
    await first.commit(Changes([b"first"]))
    await second.commit(Changes([b"second"]))
    with pytest.raises(SupersededError):
        await first.commit(Changes([b"third"]))
    assert await events_of(second) == [b"first", b"second"]


@pytest.mark.redis
@pytest.mark.parametrize("other", ["other", "run*", "run*[1]:p", "run1"])
async def test_runs_on_one_server_do_not_see_each_other(folder: Path, other: str):
    server = RedisServer.launch(
        socket=folder / "r.sock", folder=folder / "data", log_file=folder / "redis.log", fsync="no"
    )
    try:
        async with on_server(server) as open_store:
            mine = await open_store()
            await mine.commit(Changes([b"mine"], {(0, 0): stored(1)}))
            theirs = await open_store(other)
            assert await events_of(theirs) == []
            with pytest.raises(KeyError):
                await theirs.fetch([(0, 0)])
            await theirs.commit(Changes([b"theirs"], {(0, 0): stored(2)}))
            await mine.commit(Changes(remove=[(0, 0)], snapshot=b""))
            assert await contents(theirs, (0, 0)) == [(b"\x00\x02\xff", b"said 2")]
            await mine.commit(Changes([b"mine again"], {(0, 0): stored(3)}))
            await theirs.commit(Changes(remove=[(0, 0)], snapshot=b""))
            assert await contents(mine, (0, 0)) == [(b"\x00\x03\xff", b"said 3")]
            assert await events_of(mine) == [b"mine again"]
    finally:
        server.stop()
