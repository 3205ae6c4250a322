"""Many items at once: what one costs among them, how a broker comes back to them, what is kept."""

import asyncio
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import redis
import zmq

from benchmarks.broker.peer import Peer
from benchmarks.broker.process import (
    BrokerProcess,
    Driver,
    bare_redis,
    cpu_s,
    drivers,
    redis_client,
    rss_bytes,
    shared_number,
    work_folder,
)
from benchmarks.broker.roles import consume, generate, pack
from slipstream.broker.store.private_server import RedisServer
from slipstream.wire.messages.broker import TakeOver, TookOver
from slipstream.wire.messages.versions import PolicyVersion

GROUPS_PER_STEP = 500
SMALL_BYTES = 256
_FILL_S = 300.0


@contextmanager
def filled(num_items: int, payload_bytes: int) -> Iterator[tuple[BrokerProcess, Path]]:
    """A broker that holds so many groups of one scored trajectory, ready to be trained."""
    settings: dict[str, object] = {
        "run__groups_per_step": GROUPS_PER_STEP,
        "run__group_size": 1,
        "run__max_staleness_steps": num_items // GROUPS_PER_STEP - 1,
        "broker__drop_zero_variance": "false",
    }
    with work_folder() as folder, BrokerProcess(folder, **settings) as broker:
        version = _take_over(broker)
        stop = shared_number()
        number = shared_number(pack(version))
        with drivers(
            Driver(
                generate, broker.endpoint, payload_bytes, number, stop, num_items, "generator-0"
            ),
            Driver(consume, broker.endpoint, number, stop, -1, num_items, 0),
        ) as running:
            for driver in running:
                driver.result(_FILL_S)
        yield broker, folder


def _take_over(broker: BrokerProcess) -> PolicyVersion:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    learner = Peer(context, broker.endpoint, "learner", "learner")
    try:
        return learner.ask(TakeOver(step=0), TookOver).version
    finally:
        learner.close()
        context.term()


def cpu_per_item(broker: BrokerProcess, *, steps: int, first_step: int = 0) -> tuple[float, float]:
    """Train so many steps and have each replaced; CPU microseconds per item: broker, Redis."""
    stop, number = shared_number(), shared_number()
    count = steps * GROUPS_PER_STEP
    with drivers(
        Driver(consume, broker.endpoint, number, stop, steps, count, 4, first_step),
        Driver(generate, broker.endpoint, SMALL_BYTES, number, stop, count, "generator-0"),
    ) as running:
        deadline = time.monotonic() + 60
        while not number.value:  # taking over reads every item, once
            if time.monotonic() > deadline:
                raise TimeoutError("the learner did not come up")
            time.sleep(0.0005)
        before = cpu_s(broker.pid), cpu_s(broker.redis_pid)
        for driver in running:
            driver.result(_FILL_S)
    after = cpu_s(broker.pid), cpu_s(broker.redis_pid)
    own, other = (1e6 * (b - a) / count for a, b in zip(before, after, strict=True))
    return own, other


@dataclass(frozen=True, slots=True)
class Restart:
    """Seconds, and the size of what was read back."""

    redis_s: float  # a server alone, from its start until it answers PING
    whole_s: float  # the broker with its server, from its start until it answers a hello
    aof_bytes: int

    @property
    def broker_s(self) -> float:
        return self.whole_s - self.redis_s


def restart(broker: BrokerProcess, folder: Path) -> Restart:
    """Kill -9 the broker and its Redis; time the server alone, then both together."""
    broker.kill()
    aof_bytes = broker.aof_bytes()
    socket = folder / "alone.sock"
    began = time.monotonic()
    server = RedisServer.launch(
        socket=socket, folder=broker.redis_folder, log_file=folder / "alone.log", fsync="always"
    )
    try:
        asyncio.run(server.until_listening(socket))
        client = redis_client(server)
        while not _is_loaded(client):
            time.sleep(0.005)
        redis_s = time.monotonic() - began
        client.close()
    finally:
        server.process.kill()
        server.process.wait()
    began = time.monotonic()
    broker.start(restarted=True)
    return Restart(redis_s, time.monotonic() - began, aof_bytes)


def _is_loaded(client: redis.Redis) -> bool:
    try:
        return bool(client.ping())
    except (redis.BusyLoadingError, redis.ConnectionError):
        return False


@dataclass(frozen=True, slots=True)
class Kept:
    """Most that was seen, in bytes, while ``pushed_bytes`` went through; and in its last third."""

    pushed_bytes: int
    rss: int  # of the broker, above what it had before the first trajectory
    redis: int
    aof: int
    growth: float  # of the sum of all, last third over middle third


def push_through(budget_bytes: int, payload_bytes: int, *, times: int) -> Kept:
    """Train ``times`` the replay budget without one durable checkpoint."""
    steps = times * budget_bytes // (32 * 8 * payload_bytes)
    with work_folder() as folder, bare_redis(folder) as server:
        password = folder / "password"
        password.touch(mode=0o600)
        password.write_text(server.password)
        settings: dict[str, object] = {
            "broker__replay_budget_bytes": budget_bytes,
            "broker__cache_bytes": budget_bytes,
            "broker__redis__url": server.url,
            "broker__redis__password_file": password,
            "run__max_staleness_steps": 1,
        }
        with BrokerProcess(folder, **settings) as broker:
            base = rss_bytes(broker.pid)
            stop, number = shared_number(), shared_number()
            seen: list[tuple[int, int, int]] = []
            client = redis_client(server)
            with drivers(
                Driver(consume, broker.endpoint, number, stop, steps, 0, 0),
                Driver(generate, broker.endpoint, payload_bytes, number, stop, 0, "generator-0"),
            ) as (consumer, producer):
                while consumer.is_running:
                    memory = client.info("memory")
                    used = int(memory["used_memory"])
                    aof = sum(
                        p.stat().st_size for p in (folder / "bare").rglob("*.aof") if p.exists()
                    )
                    seen.append((rss_bytes(broker.pid) - base, used, aof))
                    time.sleep(0.1)
                trained = consumer.result(_FILL_S)
                stop.value = 1
                producer.result(30)
            client.close()
    third = len(seen) // 3
    middle, last = (max(map(sum, part)) for part in (seen[third : 2 * third], seen[2 * third :]))
    rss, used, aof = (max(one[i] for one in seen) for i in range(3))
    return Kept(trained[-1][2], rss, used, aof, last / middle)
