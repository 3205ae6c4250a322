"""The store and the private server through death, silence, full disks and rivals."""

import asyncio
import contextlib
import logging
import os
import random
import shutil
import signal
import socket as sockets
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import redis.asyncio as aioredis

from slipstream.broker.service import store_trouble
from slipstream.broker.store.base import Changes, StoredTrajectory
from slipstream.broker.store.private_server import RedisServer
from slipstream.broker.store.redis import RedisStore
from slipstream.broker.store.server_binary import find_server, packaged_server
from slipstream.wire.errors import (
    ChildDiedError,
    ConfigError,
    PeerLostError,
    StoreLostError,
    SupersededError,
)
from tests.support.waiting import HANG_S, NEVER_S, until_async, until_ended

pytestmark = [pytest.mark.integration, pytest.mark.redis]


@pytest.fixture(params=["packaged", "debian"])
def binary(request: pytest.FixtureRequest) -> Path:
    if request.param == "packaged":
        return packaged_server()
    found = shutil.which("redis-server")
    if found is None:
        pytest.skip("redis-server is not on PATH")
    return Path(found)


def launch(
    folder: Path, *, fsync: str = "always", binary: Path | None = None, lock_timeout_s: float = 5.0
) -> RedisServer:
    return RedisServer.launch(
        socket=folder / "r.sock",
        folder=folder / "data",
        log_file=folder / "redis.log",
        fsync=fsync,
        binary=binary if binary is not None else packaged_server(),
        lock_timeout_s=lock_timeout_s,
    )


def kill(server: RedisServer) -> None:
    server.process.kill()
    server.process.wait()


@contextlib.contextmanager
def running(server: RedisServer) -> Iterator[RedisServer]:
    try:
        yield server
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(server.process.pid, signal.SIGCONT)
        server.stop()


@asynccontextmanager
async def connected(
    server: RedisServer, *, outage_s: float = NEVER_S, timeout_s: float = NEVER_S, url: str = ""
) -> AsyncIterator[RedisStore]:
    await server.until_listening(server.socket)
    store = await RedisStore.connect(
        url or server.url,
        "run",
        password=server.password,
        outage_s=outage_s,
        socket_timeout_s=timeout_s,
    )
    try:
        yield store
    finally:
        await store.close()


@asynccontextmanager
async def kept_alive(server: RedisServer, *, outage_s: float = NEVER_S) -> AsyncIterator[None]:
    task = asyncio.create_task(server.keep_alive(outage_s=outage_s))
    try:
        yield
        assert not task.done(), task.result()
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


@asynccontextmanager
async def admin(server: RedisServer) -> AsyncIterator["aioredis.Redis"]:
    client = aioredis.Redis.from_url(server.url, password=server.password)
    try:
        yield client
    finally:
        await client.aclose()


def change(number: int, size: int = 100) -> Changes:
    """One event and one trajectory, both named by the number."""
    payload = number.to_bytes(4, "big") * (size // 4)
    return Changes([b"%d" % number], {(number, 0): StoredTrajectory(payload, b"%d" % number)})


async def events_of(store: RedisStore) -> list[int]:
    return [int(event) async for event in store.replay()]


async def check_whole(store: RedisStore, sizes: list[int]) -> None:
    """All of changes 0, 1, ... are there exactly once and in order, and nothing else."""
    assert await events_of(store) == list(range(len(sizes)))
    found = await store.fetch([(number, 0) for number in range(len(sizes))])
    expected = [change(number, size).put[number, 0] for number, size in enumerate(sizes)]
    assert found == expected


async def test_a_socket_that_is_bound_is_no_server_yet(folder: Path):
    late = folder / "late-redis"
    late.write_text(
        f"#!/bin/sh\nuntil [ -e {folder}/go ]; do sleep 0.02; done\n"
        f'exec "{packaged_server()}" "$@"\n'
    )
    late.chmod(0o700)

    with running(launch(folder, binary=late)) as server:
        with sockets.socket(sockets.AF_UNIX) as bound:  # a server listens a moment later
            bound.bind(str(server.socket))
            listening = asyncio.create_task(server.until_listening(server.socket))
            await asyncio.sleep(0.1)
            assert not listening.done()
        (folder / "go").touch()
        await listening
        async with connected(server) as store:
            await store.commit(change(0))
            await check_whole(store, [100])


# ---- death -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("binary", "seed"), [("packaged", 1), ("packaged", 2), ("debian", 1)], indirect=["binary"]
)
async def test_every_acknowledged_commit_survives_kill_9_exactly_once(
    folder: Path, binary: Path, seed: int
):
    rng = random.Random(seed)
    sizes = [rng.choice([10, 1_000, 50_000, 2_000_000]) for _ in range(150)]
    kills = sorted(rng.sample(range(10, 140), 4))

    async def kill_while_committing(server: RedisServer, number: int, store: RedisStore) -> None:
        commit = asyncio.create_task(store.commit(change(number, sizes[number])))
        await asyncio.sleep(rng.uniform(0, 0.008))
        server.process.kill()
        await commit

    with running(launch(folder, binary=binary)) as server:
        async with connected(server) as store, kept_alive(server):
            await store.claim()
            for number, size in enumerate(sizes):
                if number in kills:
                    await kill_while_committing(server, number, store)
                else:
                    await store.commit(change(number, size))
            await check_whole(store, sizes)


def test_interrupted_commit_is_whole_or_absent(folder: Path):
    rng = random.Random(5)

    async def write(server: RedisServer, known: int) -> None:
        async with connected(server) as store:
            commit = asyncio.create_task(store.commit(change(known, 1_500_000)))
            await asyncio.sleep(rng.uniform(0, 0.006))
            kill(server)
            commit.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await commit

    async def count(server: RedisServer) -> int:
        async with connected(server) as store:
            num_events = len(await events_of(store))
            await check_whole(store, [1_500_000] * num_events)
            return num_events

    known = 0
    for _ in range(8):
        with running(launch(folder)) as server:
            asyncio.run(write(server, known))
        with running(launch(folder)) as server:
            found = asyncio.run(count(server))
        assert found in {known, known + 1}
        known = found


async def test_a_handle_whose_commit_was_cancelled_has_to_claim_again(folder: Path):
    with running(launch(folder)) as server:
        async with connected(server) as store:
            await store.commit(change(0))
            os.kill(server.process.pid, signal.SIGSTOP)
            commit = asyncio.create_task(store.commit(change(1)))
            await asyncio.sleep(0.05)
            commit.cancel()
            with pytest.raises(asyncio.CancelledError):
                await commit
            os.kill(server.process.pid, signal.SIGCONT)
            with pytest.raises(PeerLostError, match="claim the store again"):
                await store.commit(change(2))
            await store.claim()
            found = await events_of(store)
            assert found in ([0], [0, 1])
            await store.commit(change(2))
            assert await events_of(store) == [*found, 2]


async def test_outage_is_logged_once_and_ends_with_the_setting_to_change(
    folder: Path, caplog: pytest.LogCaptureFixture
):
    caplog.set_level(logging.INFO)

    with running(launch(folder)) as server:
        async with connected(server, outage_s=0.6) as store:
            await store.commit(change(0))
            kill(server)
            began_s = time.monotonic()
            with pytest.raises(PeerLostError, match=r"broker\.redis\.url"):
                await store.commit(change(1))
            assert time.monotonic() - began_s >= 0.6
            with pytest.raises(PeerLostError):
                await store.fetch([(0, 0)])
    messages = [record.getMessage() for record in caplog.records]
    assert len([text for text in messages if "nothing is acknowledged" in text]) == 1


async def test_reads_wait_for_a_server_that_comes_back(
    folder: Path, caplog: pytest.LogCaptureFixture
):
    caplog.set_level(logging.INFO)

    with running(launch(folder)) as server:
        async with connected(server) as store:
            await store.commit(Changes([b"0"], change(0).put, snapshot=b"snap"))
            assert store.is_answering
            kill(server)
            reads = asyncio.gather(store.fetch([(0, 0)]), store.snapshot(), events_of(store))
            await until_async(lambda: not store.is_answering)
            async with kept_alive(server):
                found = await reads
                assert store.is_answering
                await until_async(lambda: "the Redis server is back after" in caplog.text)
        assert found == [[change(0).put[0, 0]], b"snap", [0]]
    assert "starting it again in 0.1 s" in caplog.text


async def test_a_server_that_forgot_acknowledged_commits_is_not_written_to(folder: Path):
    with running(launch(folder)) as server:
        async with connected(server) as store:
            await store.claim()
            await store.commit(change(0))
            shutil.copytree(folder / "data", folder / "older")
            await store.commit(change(1))
            await store.commit(change(2))
            kill(server)
            shutil.rmtree(folder / "data")
            shutil.copytree(folder / "older", folder / "data")
            async with kept_alive(server):
                with pytest.raises(StoreLostError, match="without 2 acknowledged commits"):
                    await store.commit(change(3))
                assert await events_of(store) == [0]


async def test_a_server_whose_folder_was_emptied_is_not_written_to(folder: Path):
    with running(launch(folder)) as server:
        async with connected(server) as store:
            for number in range(3):
                await store.commit(change(number))
            kill(server)
            for path in (folder / "data").iterdir():
                shutil.rmtree(path) if path.is_dir() else path.unlink()
            async with kept_alive(server):
                with pytest.raises(StoreLostError, match="without 3 acknowledged commits"):
                    await store.commit(change(3))
                assert await events_of(store) == []


# ---- silence ---------------------------------------------------------------------


@pytest.mark.parametrize("size", [10, 100_000, 3_000_000])
async def test_a_stopped_server_is_waited_for_and_applies_a_commit_once(
    folder: Path, size: int, caplog: pytest.LogCaptureFixture
):
    with running(launch(folder)) as server:
        async with connected(server, timeout_s=1.0) as store:
            for number in range(0, 4, 2):
                await store.commit(change(number, size))
                num_logged = caplog.text.count("nothing is acknowledged")
                os.kill(server.process.pid, signal.SIGSTOP)
                commit = asyncio.create_task(store.commit(change(number + 1, size)))
                await until_async(
                    lambda: caplog.text.count("nothing is acknowledged") > num_logged  # noqa: B023
                )
                assert not commit.done()
                os.kill(server.process.pid, signal.SIGCONT)
                await commit
            await check_whole(store, [size] * 4)


@dataclass
class Proxy:
    """A proxy between a client and a server that can withhold what one connection sends."""

    target: Path
    num_connections: int = 0
    num_open: int = 0
    withheld: set[int] = field(default_factory=set)
    held_bytes: dict[int, bytes] = field(default_factory=dict)
    to_server: dict[int, asyncio.StreamWriter] = field(default_factory=dict)

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        number, self.num_connections = self.num_connections, self.num_connections + 1
        self.num_open += 1
        from_server, self.to_server[number] = await asyncio.open_unix_connection(self.target)
        back = asyncio.create_task(self._pump_back(from_server, writer))
        while data := await reader.read(65536):
            if number in self.withheld:
                self.held_bytes[number] = self.held_bytes.get(number, b"") + data
            else:
                self.to_server[number].write(data)
        if number not in self.withheld:
            self.to_server[number].close()
        await back
        writer.close()
        self.num_open -= 1

    async def _pump_back(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError):
            while data := await reader.read(65536):
                writer.write(data)


async def test_a_copy_of_a_commit_that_arrives_late_is_not_applied_again(folder: Path):
    with running(launch(folder)) as server:
        await server.until_listening(server.socket)
        proxy = Proxy(server.socket)
        listening = await asyncio.start_unix_server(proxy.serve, folder / "p.sock")
        async with (
            connected(server, url=f"unix://{folder}/p.sock", timeout_s=1.0) as store,
            connected(server) as reader,
        ):
            await store.commit(change(0))
            writing = proxy.num_connections - 1
            proxy.withheld.add(writing)
            await store.commit(change(1))  # times out, is sent again on another connection
            assert await events_of(reader) == [0, 1]
            assert b"EXEC" in proxy.held_bytes[writing]
            proxy.to_server[writing].write(proxy.held_bytes[writing])
            await asyncio.sleep(0.2)
            assert await events_of(reader) == [0, 1]
            await store.commit(change(2))
            assert await events_of(reader) == [0, 1, 2]
            proxy.to_server[writing].close()
        listening.close()
        await until_async(lambda: proxy.num_open == 0, "a connection of the proxy stays open")


def test_a_server_that_was_made_a_replica_is_left_for_the_one_behind_its_address(folder: Path):
    """As a failover of hosted Redis does: connections stay, and every write is refused."""

    async def body(old: RedisServer, new: RedisServer) -> None:
        for server in (old, new):
            await server.until_listening(server.socket)
        proxy = Proxy(old.socket)
        listening = await asyncio.start_unix_server(proxy.serve, folder / "p.sock")
        async with (
            connected(old, url=f"unix://{folder}/p.sock", timeout_s=HANG_S) as store,
            connected(new) as reader,
            admin(old) as old_admin,
            admin(new) as new_admin,
        ):
            await store.commit(change(0))
            await store.snapshot()  # a connection of those that read is open, too
            for key in await old_admin.keys("*"):  # the replica that leads from now on has it
                await new_admin.restore(key, 0, await old_admin.dump(key))
            await new_admin.config_set("requirepass", old.password)
            await old_admin.execute_command("REPLICAOF", "127.0.0.1", "1")
            proxy.target = new.socket
            async with asyncio.timeout(HANG_S):
                await store.commit(change(1))
            assert await events_of(reader) == [0, 1]
            assert await store.claim() == 2
        listening.close()
        await until_async(lambda: proxy.num_open == 0, "a connection of the proxy stays open")

    second = folder / "new"
    second.mkdir()
    with running(launch(folder)) as old, running(launch(second)) as new:
        asyncio.run(body(old, new))


def test_a_folder_may_have_spaces_quotes_and_letters_of_any_language(folder: Path):
    odd = folder / 'a b"c\\d' / "ü"
    odd.mkdir(parents=True)

    async def body(server: RedisServer) -> list[int]:
        async with connected(server) as store:
            await store.commit(change(len(await events_of(store))))
            return await events_of(store)

    for count in (1, 2):
        with running(launch(odd)) as server:
            assert asyncio.run(body(server)) == list(range(count))
    assert list(odd.rglob("*.incr.aof"))


def test_a_damaged_file_is_named_with_what_to_do_and_that_mends_it(folder: Path):
    """The steps of "A damaged store" in docs/operations.md."""

    async def fill(server: RedisServer) -> None:
        async with connected(server) as store:
            for number in range(40):
                await store.commit(change(number, 1_000))

    async def begin(server: RedisServer) -> None:
        await server.until_listening(server.socket)
        await until_async(lambda: server.process.poll() is not None, "the server did not end")
        server.check_alive()

    async def what_is_left(server: RedisServer) -> list[int]:
        async with connected(server) as store:
            return await events_of(store)

    with running(launch(folder)) as server:
        asyncio.run(fill(server))
    (file,) = folder.rglob("*.incr.aof")
    data = bytearray(file.read_bytes())
    data[len(data) // 2 : len(data) // 2 + 40] = b"#" * 40
    file.write_bytes(data)
    with (
        running(launch(folder)) as server,
        pytest.raises(ConfigError, match=r"(?s)is damaged.*A damaged store.*" + file.name),
    ):
        asyncio.run(begin(server))
    checker = folder / "valkey-check-aof"
    checker.symlink_to(packaged_server())
    command = [str(checker), "--fix", str(file)]
    subprocess.run(command, input=b"y\n", check=True, capture_output=True)
    with running(launch(folder)) as server:
        left = asyncio.run(what_is_left(server))
    assert left == list(range(len(left)))
    assert 10 <= len(left) < 40


async def test_a_broker_that_slept_while_another_claimed_cannot_write(folder: Path):
    with running(launch(folder)) as server:
        async with connected(server) as stale, connected(server) as fresh:
            await stale.claim()
            await stale.commit(change(0))
            await fresh.claim()
            async with kept_alive(server):
                server.process.kill()  # the stale one has to connect again as well
                await fresh.commit(change(1))
                with pytest.raises(SupersededError):
                    await stale.commit(change(2))
                assert await events_of(fresh) == [0, 1]


async def test_of_many_rivals_exactly_one_can_write(folder: Path):
    with running(launch(folder)) as server:
        async with contextlib.AsyncExitStack() as stack:
            stores = [await stack.enter_async_context(connected(server)) for _ in range(6)]
            generations = await asyncio.gather(*(store.claim() for store in stores))
            assert len(set(generations)) == 6
            results = await asyncio.gather(
                *(store.commit(change(i)) for i, store in enumerate(stores)), return_exceptions=True
            )
            winner = generations.index(max(generations))
            assert [i for i, result in enumerate(results) if result is None] == [winner]
            assert await events_of(stores[0]) == [winner]


# ---- refusals --------------------------------------------------------------------


async def test_a_server_out_of_memory_is_waited_for(folder: Path, caplog: pytest.LogCaptureFixture):
    with running(launch(folder)) as server:
        async with connected(server) as store, admin(server) as client:
            await store.commit(change(0))
            await client.config_set("maxmemory", "1")
            commit = asyncio.create_task(store.commit(change(1)))
            await until_async(lambda: "OOM" in caplog.text or "maxmemory" in caplog.text)
            assert not commit.done()
            await client.config_set("maxmemory", "0")
            await commit
            await check_whole(store, [100, 100])


def test_durability_of_the_server_is_described_in_words(folder: Path):
    async def durabilities(server: RedisServer) -> list[str]:
        async with connected(server) as store, admin(server) as client:
            texts = [await store.durability()]
            await client.config_set("appendfsync", "no")
            texts.append(await store.durability())
            await client.config_set("appendonly", "no")
            texts.append(await store.durability())
            await client.config_set("maxmemory", "1gb")
            await client.config_set("maxmemory-policy", "allkeys-lru")
            texts.append(await store.durability())
            return texts

    with running(launch(folder, fsync="everysec")) as server:
        assert asyncio.run(durabilities(server)) == [
            "appendfsync everysec: a crash can lose the last second",
            "appendfsync no: a crash of the machine can lose acknowledged work",
            "no append-only file: acknowledged work is lost when the server ends",
            "maxmemory-policy allkeys-lru: a full server loses acknowledged work",
        ]


async def test_user_of_few_rights_is_served_or_shown_what_is_missing(folder: Path):
    rights = "~slipstream:* +@read +@write +@transaction +@connection"

    with running(launch(folder)) as server:
        async with admin(server) as client:
            await server.until_listening(server.socket)
            for user, more in ("writer", ""), ("reader", "-@write"):
                rules = ["on", f">{server.password}", *rights.split(), *more.split()]
                await client.execute_command("ACL", "SETUSER", user, *rules)
        for user in "writer", "reader":
            url = f"unix://{user}@{server.socket}"
            async with connected(server, url=url) as store:
                assert await store.durability() == "unknown (CONFIG is not permitted)"
                assert "INFO" in await store.server_version()
                if user == "writer":
                    await store.commit(change(0))
                    await check_whole(store, [100])
                else:
                    with pytest.raises(ConfigError, match="forbids commands"):
                        await store.claim()


async def test_address_without_a_server_is_an_error_of_the_settings(folder: Path):
    with pytest.raises(ConfigError, match=r"broker\.redis\.url"):
        await RedisStore.connect(f"unix://{folder}/none.sock", "run")


# ---- the child -------------------------------------------------------------------


def test_a_second_server_in_one_folder_is_refused(folder: Path):
    with running(launch(folder)) as server:
        with pytest.raises(ConfigError, match=rf"pid {server.process.pid}\) runs in {folder}"):
            launch(folder, lock_timeout_s=0.3)

        async def still_there() -> None:
            async with connected(server) as store:
                await store.commit(change(0))

        asyncio.run(still_there())


def test_a_second_server_waits_for_the_first_to_die(folder: Path):
    first = launch(folder)
    asyncio.run(first.until_listening(first.socket))
    reaper = subprocess.Popen(["sh", "-c", f"sleep 0.2; kill -9 {first.process.pid}"])
    with running(launch(folder)) as second:
        assert first.process.poll() == -signal.SIGKILL, "there were two"
        assert second.process.poll() is None
    reaper.wait()
    first.process.wait()


def test_the_server_dies_with_the_process_that_launched_it(folder: Path):
    program = f"""
import sys, time
sys.path.insert(0, {str(Path(__file__).parents[2])!r})
from pathlib import Path
from slipstream.broker.store.private_server import RedisServer
folder = Path({str(folder)!r})
server = RedisServer.launch(
    socket=folder / "r.sock", folder=folder / "data", log_file=folder / "log", fsync="no"
)
print(server.process.pid, flush=True)
time.sleep(1000)
"""
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE) as parent:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        parent.kill()
    until_ended(pid)
    with running(launch(folder)) as server:
        assert server.process.poll() is None


def test_a_server_that_cannot_be_kept_up_ends_with_its_last_words(folder: Path):
    async def body(server: RedisServer) -> None:
        await server.until_listening(server.socket)
        server.binary = Path("/bin/false")
        kill(server)
        began_s = time.monotonic()
        with pytest.raises(ChildDiedError, match="ended with code"):
            await server.keep_alive(outage_s=1.0)
        assert time.monotonic() - began_s >= 1.0

    server = launch(folder)
    asyncio.run(body(server))


def test_configured_server_binary_is_used(folder: Path, binary: Path):
    assert find_server(binary) == binary
    with pytest.raises(ConfigError, match="no server that can be started"):
        find_server(folder / "nothing")


@contextlib.contextmanager
def small_disk(folder: Path) -> Iterator[Path]:
    """A file system of 24 MiB."""
    disk = folder / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=24m", "tmpfs", str(disk)]
    if subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("mounting a small file system is not permitted here")
    try:
        yield disk
    finally:
        subprocess.run(["umount", str(disk)], check=True)


@pytest.mark.parametrize("fsync", ["always", "everysec"])
def test_a_full_disk_loses_nothing_and_is_outlived(
    folder: Path, fsync: str, caplog: pytest.LogCaptureFixture
):
    caplog.set_level(logging.INFO)
    sizes = [1_000_000] * 12

    async def body(server: RedisServer, ballast: Path) -> int:
        acknowledged = 0
        async with connected(server) as store, kept_alive(server):

            async def write_all() -> None:
                nonlocal acknowledged
                for number, size in enumerate(sizes):
                    await store.commit(change(number, size))
                    acknowledged += 1

            writing = asyncio.create_task(write_all())
            refusal = "the disk is full" if fsync == "always" else "MISCONF"
            await until_async(lambda: refusal in caplog.text or writing.done())
            await asyncio.sleep(0.2)  # in which it might be acknowledged after all
            assert not writing.done()
            full = f"room on the disk of {server.folder} (run.dir), which is full"
            await until_async(lambda: store_trouble(store, server).startswith(full))
            before = acknowledged
            ballast.unlink()  # noqa: ASYNC240
            await asyncio.wait_for(writing, HANG_S)  # noqa: TID251 cancelled by nobody
            await check_whole(store, sizes)
            assert store_trouble(store, server) == ""
        return before

    with small_disk(folder) as disk:
        ballast = disk / "ballast"
        ballast.write_bytes(bytes(19_000_000))
        with running(launch(disk, fsync=fsync)) as server:
            assert asyncio.run(body(server, ballast)) < 10
        with running(launch(disk)) as server:
            asyncio.run(check_after_restart(server, sizes))
    if fsync == "always":
        assert "nothing is acknowledged until there is room" in caplog.text


async def check_after_restart(server: RedisServer, sizes: list[int]) -> None:
    async with connected(server) as store:
        await check_whole(store, sizes)


def test_a_disk_that_stays_full_is_an_error_of_the_settings(folder: Path):
    async def body(server: RedisServer) -> None:
        async with connected(server) as store:
            keeping = asyncio.create_task(server.keep_alive(outage_s=1.5))
            writing = asyncio.create_task(store.commit(change(0, 8_000_000)))
            with pytest.raises(ConfigError, match=r"the disk is full.*run\.dir"):
                await asyncio.wait_for(keeping, HANG_S)  # noqa: TID251 cancelled by nobody
            assert not writing.done()
            writing.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await writing

    with small_disk(folder) as disk:
        (disk / "ballast").write_bytes(bytes(20_000_000))
        with running(launch(disk)) as server:
            asyncio.run(body(server))


async def test_the_append_only_file_stays_bounded(folder: Path, binary: Path):
    with running(launch(folder, fsync="no", binary=binary)) as server:
        async with connected(server) as store, admin(server) as client:
            await client.config_set("auto-aof-rewrite-min-size", "4mb")

            async def is_rewritten() -> bool:
                return not (await client.info("persistence"))["aof_rewrite_in_progress"]

            peak_bytes = 0
            for number in range(150):
                changes = change(number, 1_000_000)
                changes.remove.append((number - 4, 0))
                await store.commit(changes)
                info = await client.info()
                peak_bytes = max(peak_bytes, info["aof_current_size"])
                await until_async(is_rewritten)  # what is written meanwhile is in the new file
            assert peak_bytes < 110_000_000, "of 150; Redis looks ten times a second"
            assert info["used_memory"] < 40_000_000
