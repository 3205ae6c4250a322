"""Engines of other hosts: a version goes to each host once, and the engines there share it."""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import pytest
from safetensors.torch import load_file
from torch import Tensor

from slipstream.generators.sglang.process import SglangProcess
from slipstream.weightbus.agent import updates
from slipstream.weightbus.agent.staging import Staging
from slipstream.weightbus.agent.subscriber import Subscriber
from slipstream.weightbus.agent.tensor_set import model_tensors
from slipstream.weightbus.version.engine_checksums import differing, expected_checksums
from slipstream.wire.files.keys import ClientKey
from slipstream.wire.messages.manifest import WeightManifest
from slipstream.wire.messages.versions import PolicyVersion
from tests.integration.sglang_load import client_of
from tests.support.bus.engine import BusEngine, digest_of
from tests.support.bus.published import subscriber_of
from tests.support.bus.remote import (
    EPOCH,
    TENSORS,
    Relay,
    adopts,
    agent,
    client_key,
    running,
    running_relay,
)
from tests.support.bus.two_hosts import TwoHosts
from tests.support.tiny_run import sglang_server, write_policy
from tests.support.waiting import until_async

pytestmark = pytest.mark.integration
SIZE = sum(tensor.nbytes for tensor in TENSORS.values())
ANY_PORT = "tcp://127.0.0.1:0"


class SlowStaging(Staging):
    """Memory of an agent whose fetch lasts until it may end."""

    def __init__(self, folder: Path, name: str) -> None:
        super().__init__(folder, name)
        self.has_begun, self.may_end = asyncio.Event(), asyncio.Event()

    async def receive(self, *what: Any, **more: Any) -> Path:  # noqa: ANN401 as Staging
        self.has_begun.set()
        await self.may_end.wait()
        return await super().receive(*what, **more)


@dataclass
class Engine:
    """An engine with its agent, and the task that keeps it on the bus."""

    name: str  # name at the relay
    subscriber: Subscriber
    staging: Staging
    task: "asyncio.Task[None]"

    @property
    def fetched(self) -> int:
        return self.subscriber.traffic.relay_bytes + self.subscriber.traffic.forwarded_bytes

    @property
    def tensors(self) -> dict[str, Tensor]:
        return cast("BusEngine", self.subscriber._updates._engine).tensors

    async def ends(self) -> None:
        """End the agent, as a process that is killed: its memory goes with it."""
        self.task.cancel()
        with suppress(asyncio.CancelledError):
            await self.task
        self.staging.close()


class Hosts:
    """A relay, and engines on other hosts."""

    def __init__(self, relay: Relay, folder: Path, stack: AsyncExitStack) -> None:
        self.relay = relay
        self.engines: list[Engine] = []
        self._keys: dict[str, ClientKey] = {}
        self._folder = folder
        self._stack = stack

    async def join(
        self, host: str, *, key: str = "", staging: Staging | None = None, **settings: object
    ) -> Engine:
        """Start an engine; those of a host prove one key unless ``key`` names another."""
        name, owner = f"generator-{len(self.engines)}", key or host
        self._keys.setdefault(owner, client_key(owner))
        names = {it.public: it.name for it in self._keys.values()}
        self.relay.listener.admit(names)
        staging = staging or Staging(self._folder, name)
        self._stack.callback(staging.close)
        options = {"transport": "tcp", "host": host, "connections": 1} | settings
        made = agent(self._folder, self._keys[owner], name, staging=staging, **options)  # type: ignore[arg-type]
        subscriber = self._stack.enter_context(made)
        job = running(subscriber.run(await self.relay.place()))
        task = await self._stack.enter_async_context(job)
        self.engines.append(Engine(f"{owner}/{name}", subscriber, staging, task))
        await until_async(
            lambda: f"{owner}/{name}" in {state.name for state in self.relay.publisher.states()}
        )
        return self.engines[-1]

    async def brings(self, step: int) -> None:
        """Publish a version, and wait until all living engines have it, and records say so."""
        self.relay.publish(step)
        await self.adopt(step)

    async def adopt(self, step: int) -> None:
        version = PolicyVersion(EPOCH, step)
        living = [engine for engine in self.engines if not engine.task.done()]
        for engine in living:
            await until_async(lambda: engine.subscriber.adopted == version)  # noqa: B023
            assert digest_of(engine.tensors) == digest_of(dict(self.relay.at(step)))
        names = {engine.name for engine in living}
        await until_async(lambda: names <= self.adopted_by(step))

    def adopted_by(self, step: int) -> set[str]:
        version = PolicyVersion(EPOCH, step)
        return {
            name
            for record in self.relay.records
            if record.version == version
            for name in record.adopted_by
        }

    def fetched_in(self, step: int) -> Counter[int]:
        """Return how many engines fetched so many bytes of a version, by records."""
        version = PolicyVersion(EPOCH, step)
        records = [record for record in self.relay.records if record.version == version]
        return Counter(number for it in records for number in it.fetched_bytes.values())


@asynccontextmanager
async def hosts(folder: Path, **settings: object) -> AsyncIterator[Hosts]:
    made = running_relay(folder, bucket_bytes=16 * 1024, **settings)
    async with made as relay, AsyncExitStack() as stack:
        yield Hosts(relay, folder, stack)


def held_bytes(engine: Engine) -> int:
    return (engine.staging.folder / "memory").stat().st_size


async def test_a_version_is_fetched_once_per_host_and_held_once(folder: Path):
    async with hosts(folder) as bus:
        for number in range(6):
            await bus.join(f"host-{number % 2}")
        for step in range(3):
            await bus.brings(step)
            assert bus.fetched_in(step) == {SIZE: 2, 0: 4}
        assert bus.relay.publisher.traffic.sent_bytes == 3 * 2 * SIZE
        fetched = Counter(engine.fetched for engine in bus.engines)
        assert fetched == {3 * SIZE: 2, 0: 4}, "the same ones each time"
        copied = Counter(engine.subscriber.traffic.copied_bytes for engine in bus.engines)
        assert copied == fetched
        assert Counter(held_bytes(engine) > SIZE for engine in bus.engines) == {True: 2, False: 4}


async def test_a_late_engine_maps_what_its_host_has(folder: Path):
    async with hosts(folder) as bus:
        first = await bus.join("host")
        await bus.brings(0)
        late = await bus.join("host")
        await bus.adopt(0)
        assert (first.fetched, late.fetched) == (SIZE, 0)


async def test_deltas_come_to_the_one_that_has_the_version_before(folder: Path):
    async with hosts(folder) as bus:
        for number in range(3):
            await bus.join("host", staging=Staging(folder, f"s{number}", uses_deltas=True))
        fixed = {"model.layers.0.norm.weight"}
        whole = bus.relay.at
        bus.relay.at = lambda step: {  # type: ignore[method-assign]
            name: tensor if name in fixed else whole(0)[name]
            for name, tensor in whole(step).items()
        }
        for step in range(4):
            await bus.brings(step)
        in_later = Counter[int]()
        for step in range(1, 4):
            fetched = bus.fetched_in(step)
            assert fetched[0] == 2
            in_later += fetched
        assert SIZE not in in_later, "it is fetched whole again"
        assert 0 < bus.relay.publisher.traffic.sent_bytes - SIZE < SIZE


async def test_another_one_fetches_when_the_first_dies_before_it_has_the_version(folder: Path):
    async with hosts(folder) as bus:
        slow = SlowStaging(folder, "slow")
        first = await bus.join("host", staging=slow)
        bus.relay.publish(0)
        async with asyncio.timeout(60.0):
            await slow.has_begun.wait()
        others = [await bus.join("host") for _ in range(3)]
        assert [engine.fetched for engine in others] == [0, 0, 0]
        await first.ends()
        await bus.adopt(0)
        assert sorted(engine.fetched for engine in others) == [0, 0, SIZE]


async def test_the_others_go_on_when_the_one_that_fetched_dies(folder: Path):
    async with hosts(folder) as bus:
        first = await bus.join("host")
        await bus.brings(0)
        others = [await bus.join("host") for _ in range(2)]
        await bus.adopt(0)
        await first.ends()
        await bus.brings(1)
        assert sorted(engine.fetched for engine in others) == [0, SIZE]


async def test_engines_that_cannot_open_the_file_fetch(
    folder: Path, monkeypatch: pytest.MonkeyPatch
):
    def unseen(path: Path, _manifest: WeightManifest) -> int:
        raise FileNotFoundError(f"{path} is of another container")

    monkeypatch.setattr(updates, "open_mapped", unseen)
    async with hosts(folder) as bus:
        for _ in range(3):
            await bus.join("host")
        await bus.brings(0)
        assert bus.fetched_in(0) == {SIZE: 3}


async def test_engines_of_different_keys_or_no_known_host_share_nothing(folder: Path):
    async with hosts(folder) as bus:
        await bus.join("host", key="one")
        await bus.join("host", key="two")
        await bus.join("", key="three")
        await bus.join("", key="three")
        await bus.brings(0)
        assert bus.fetched_in(0) == {SIZE: 4}


async def test_an_engine_whose_load_failed_fetches_by_itself_and_the_others_have_theirs(
    folder: Path,
):
    failures = ["in_folder"]

    def fault(step: str) -> None:
        if step in failures:
            failures.remove(step)
            raise updates.EngineError("injected")

    async with hosts(folder) as bus:
        await bus.join("host")
        await bus.join("host", fault=fault)
        await bus.brings(0)
        assert bus.fetched_in(0) == {SIZE: 2, 0: 1}, "a repair is fetched"
        await bus.brings(1)
        assert bus.fetched_in(1) == {SIZE: 1, 0: 1}


async def test_a_chain_goes_from_host_to_host(folder: Path):
    async with hosts(folder, fanout=1, digests="blake2b") as bus:
        for number in range(4):
            await bus.join(f"host-{number // 2}", forward=ANY_PORT)
        for step in range(2):
            await bus.brings(step)
            assert bus.fetched_in(step) == {SIZE: 2, 0: 2}
        assert bus.relay.publisher.traffic.sent_bytes == 2 * SIZE
        assert sum(engine.subscriber.traffic.forwarded_bytes for engine in bus.engines) == 2 * SIZE


async def test_one_fetches_all_parts_and_both_compare_their_engines_with_them(folder: Path):
    learner, key = TwoHosts(folder, "encrypted"), client_key("far")
    async with learner.running_head() as head, learner.running_part(), AsyncExitStack() as stack:
        learner.listener.admit({key.public: "far"})
        learner.show_head(head)
        agents = [
            stack.enter_context(agent(folder, key, name, transport="tcp", host="host"))
            for name in ("a", "b")
        ]
        for subscriber in agents:
            await stack.enter_async_context(running(subscriber.run(head)))
        await until_async(lambda: len(learner.publisher.states()) == len(agents))
        for step in range(3):
            sent = learner.publish(step)
            for subscriber in agents:
                await adopts(subscriber, step)
                engine = cast("BusEngine", subscriber._updates._engine)
                assert digest_of(engine.tensors) == digest_of(dict(sent))
                assert subscriber._updates._expected is not None, "no checksums are compared"
            await until_async(lambda: len(learner.records) == len(agents) * (step + 1))  # noqa: B023
        assert sorted(it.traffic.relay_bytes + it.traffic.forwarded_bytes for it in agents) == [
            0,
            3 * SIZE,
        ]


@pytest.fixture(scope="module")
def server() -> Iterator[SglangProcess]:
    with sglang_server() as process:
        yield process


async def test_sglang_loads_a_version_from_the_memory_of_another_engines_agent(
    server: SglangProcess, folder: Path
):
    write_policy(folder / "model")
    tensors = load_file(folder / "model" / "model.safetensors")
    num_bytes = sum(tensor.nbytes for tensor in tensors.values())
    key = client_key("host")
    options: dict[str, Any] = {"transport": "tcp", "host": "host", "key": key}
    async with running_relay(folder, tensors=tensors) as relay, AsyncExitStack() as stack:
        relay.listener.admit({key.public: key.name})
        place = await relay.place()
        owner = stack.enter_context(agent(folder, name="owner", tensors=tensors, **options))
        await stack.enter_async_context(running(owner.run(place)))
        relay.publish(0)
        await adopts(owner, 0)
        engine = await stack.enter_async_context(client_of(server))
        reader = subscriber_of(
            engine,
            model_tensors(folder / "model", dtype="float32"),
            Staging(folder, "reader"),
            name="reader",
            **options,
        )
        await stack.enter_async_context(running(reader.run(place)))
        for step in range(3):
            if step:
                relay.publish(step)
            await adopts(owner, step)
            await adopts(reader, step)
            assert differing(expected_checksums(relay.at(step)), await engine.checksums()) == []
            await until_async(lambda: len(relay.records) == 2 * (step + 1))  # noqa: B023
        assert owner.traffic.relay_bytes == 3 * num_bytes
        assert (reader.traffic.relay_bytes, reader.traffic.copied_bytes) == (0, 0)
