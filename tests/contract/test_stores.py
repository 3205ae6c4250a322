"""What every store promises, asked of the one in memory and of a real server."""

import asyncio
import tempfile
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path

import pytest

from broker.redis_server import RedisServer
from broker.redis_store import RedisStore
from broker.store import Changes, MemoryStore, StoredTrajectory, TrajectoryStore

Body = Callable[[TrajectoryStore], Awaitable[None]]
WithStore = Callable[[Body], None]


@pytest.fixture
def folder() -> Iterator[Path]:
    """A private folder with a path short enough for Unix sockets."""
    with tempfile.TemporaryDirectory(prefix="s-") as path:
        yield Path(path)


def launch(folder: Path) -> RedisServer:
    return RedisServer.launch(
        socket=folder / "r.sock",
        folder=folder / "data",
        log_file=folder / "redis.log",
        fsync="always",
    )


async def with_redis(folder: Path, server: RedisServer, body: Body) -> None:
    await server.until_listening(folder / "r.sock")
    store = await RedisStore.connect(server.url, "run", password=server.password)
    try:
        await body(store)
    finally:
        await store.close()


@pytest.fixture(params=["memory", pytest.param("redis", marks=pytest.mark.redis)])
def with_store(request: pytest.FixtureRequest) -> Iterator[WithStore]:
    """Run a coroutine on an empty store."""
    if request.param == "memory":

        async def in_memory(body: Body) -> None:
            await body(MemoryStore())

        yield lambda body: asyncio.run(in_memory(body))
        return
    folder: Path = request.getfixturevalue("folder")
    server = launch(folder)
    try:
        yield lambda body: asyncio.run(with_redis(folder, server, body))
    finally:
        server.stop()


def stored(number: int) -> StoredTrajectory:
    return StoredTrajectory(payload=bytes([0, number, 255]), transcript=b"said %d" % number)


async def events_of(store: TrajectoryStore) -> list[bytes]:
    return [event async for event in store.replay()]


async def contents(store: TrajectoryStore, *keys: tuple[int, int]) -> list[tuple[bytes, bytes]]:
    return [(bytes(s.payload), bytes(s.transcript)) for s in await store.fetch(keys)]


def test_an_empty_store_replays_nothing_and_has_a_version(with_store: WithStore):
    async def body(store: TrajectoryStore) -> None:
        assert await events_of(store) == []
        assert (await store.server_version()).split()[0] in {"memory", "redis", "valkey"}
        with pytest.raises(KeyError):
            await store.fetch([(0, 0)])
        assert await store.fetch([]) == []

    with_store(body)


def test_events_are_replayed_in_the_order_of_their_commits(with_store: WithStore):
    async def body(store: TrajectoryStore) -> None:
        expected = []
        for start in range(0, 2_500, 500):
            events = [b"\x00\xff event %d" % i for i in range(start, start + 500)]
            await store.commit(Changes(events))
            expected += events
        assert await events_of(store) == expected

    with_store(body)


def test_trajectories_are_fetched_in_the_order_asked(with_store: WithStore):
    async def body(store: TrajectoryStore) -> None:
        view = memoryview(b"xxpayloadxx")[2:-2]
        trajectories = {(1, 0): stored(1), (1, 1): StoredTrajectory(view, memoryview(b"t"))}
        await store.commit(Changes([b"e"], dict(trajectories)))
        assert await contents(store, (1, 1), (1, 0), (1, 1)) == [
            (b"payload", b"t"),
            (b"\x00\x01\xff", b"said 1"),
            (b"payload", b"t"),
        ]

    with_store(body)


def test_a_removed_trajectory_is_named_when_it_is_asked_for(with_store: WithStore):
    async def body(store: TrajectoryStore) -> None:
        await store.commit(Changes(put={(1, 0): stored(1), (1, 1): stored(2)}))
        await store.commit(Changes([b"trained"], remove=[(1, 0), (9, 9)]))
        with pytest.raises(KeyError) as caught:
            await store.fetch([(1, 1), (1, 0)])
        assert caught.value.args == ((1, 0),)
        assert await contents(store, (1, 1)) == [(b"\x00\x02\xff", b"said 2")]

    with_store(body)


def test_merged_changes_are_what_they_are_one_after_the_other(with_store: WithStore):
    async def body(store: TrajectoryStore) -> None:
        merged = Changes([b"first"], {(1, 0): stored(1)})
        merged.merge(Changes([b"second"], {(2, 0): stored(2), (1, 0): stored(3)}))
        merged.merge(Changes([b"third"], remove=[(2, 0)]))
        await store.commit(merged)
        assert await events_of(store) == [b"first", b"second", b"third"]
        assert await contents(store, (1, 0)) == [(b"\x00\x03\xff", b"said 3")]
        with pytest.raises(KeyError):
            await store.fetch([(2, 0)])

    with_store(body)


@pytest.mark.redis
def test_what_was_committed_survives_the_violent_death_of_the_server(folder: Path):
    async def write(store: TrajectoryStore) -> None:
        for number in range(20):
            await store.commit(Changes([b"%d" % number], {(number, 0): stored(number)}))

    async def read(store: TrajectoryStore) -> None:
        assert await events_of(store) == [b"%d" % number for number in range(20)]
        assert await contents(store, (19, 0)) == [(b"\x00\x13\xff", b"said 19")]

    server = launch(folder)
    asyncio.run(with_redis(folder, server, write))
    server.process.kill()
    server.process.wait()
    again = launch(folder)
    try:
        asyncio.run(with_redis(folder, again, read))
    finally:
        again.stop()


@pytest.mark.redis
def test_runs_on_one_server_do_not_see_each_other(folder: Path):
    server = launch(folder)

    async def body(store: TrajectoryStore) -> None:
        await store.commit(Changes([b"mine"], {(0, 0): stored(1)}))
        other = await RedisStore.connect(server.url, "other", password=server.password)
        try:
            assert await events_of(other) == []
            with pytest.raises(KeyError):
                await other.fetch([(0, 0)])
        finally:
            await other.close()

    try:
        asyncio.run(with_redis(folder, server, body))
    finally:
        server.stop()
