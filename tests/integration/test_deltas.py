"""Deltas between a real relay and real agents: exact, and never more than whole versions would be.

The engines are plain tensors; over a slow link, with SGLang, it is tests/e2e/test_slow_link.py.
"""

import asyncio
import tempfile
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager, suppress
from pathlib import Path

import pytest
import torch
from torch import Tensor

from slipstream.weightbus.agent.staging import Staging
from slipstream.weightbus.agent.subscriber import Subscriber
from slipstream.weightbus.agent.tensor_set import TensorSet
from slipstream.weightbus.config import WeightBusSection
from slipstream.weightbus.net.compatibility import installed_libraries
from slipstream.weightbus.relay.publisher import Publisher
from slipstream.weightbus.relay.served import Versions
from slipstream.weightbus.version.layout import plan_layout
from slipstream.weightbus.version.shared_memory import SharedSlots
from slipstream.weightbus.version.slots import NUM_SLOTS
from slipstream.weightbus.version.snapshot import tensor_spec, tensor_views
from slipstream.wire.files.model_files import WEIGHTS
from slipstream.wire.messages.relay import OpenMemory
from slipstream.wire.messages.versions import PolicyVersion
from slipstream.wire.messages.weightbus import Join, PublishRecord, RelayAddress
from tests.support.bus.engine import BusEngine, digest_of
from tests.support.waiting import NEVER_S, until_async

pytestmark = pytest.mark.integration
KEPT = 3  # steps
NUM_BUCKETS = 4
SHAPES = {f"layer{i}.weight": (64, 96) for i in range(NUM_BUCKETS)}


def tensors(step: int, shapes: dict[str, tuple[int, ...]] = SHAPES) -> dict[str, Tensor]:
    """Return a version: about 1% of each tensor differs from the version before."""
    found = {}
    for number, (name, shape) in enumerate(shapes.items()):
        random = torch.Generator().manual_seed(number)
        tensor = torch.randn(shape, generator=random).to(torch.bfloat16)
        for _ in range(step):
            places = torch.randperm(tensor.numel(), generator=random)[: tensor.numel() // 100]
            tensor.view(-1)[places] = torch.randn(len(places), generator=random).to(torch.bfloat16)
        found[name] = tensor
    return found


NUM_BYTES = sum(tensor.nbytes for tensor in tensors(0).values())


class Bus:
    """A relay, and the learner's memory."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.records: list[PublishRecord] = []
        self.versions = Versions(folder / "weights")
        settings = WeightBusSection(
            timeout_s=NEVER_S,
            receive_timeout_s=NEVER_S,
            member_silence_s=NEVER_S,
            delta_versions=KEPT,
        )
        self.publisher = Publisher(
            settings, self.versions, on_record=self._keep, libraries=installed_libraries()
        )
        self.deltas = self.publisher._deltas
        self.address = RelayAddress(
            endpoint=f"ipc://{folder}/bus", bulk_endpoint=f"ipc://{folder}/bulk"
        )
        self.epoch = 0
        self.open_memory()

    async def _keep(self, record: PublishRecord) -> None:
        self.records.append(record)

    def open_memory(self, shapes: dict[str, tuple[int, ...]] = SHAPES) -> None:
        """Begin an epoch: a learner that took over."""
        self.epoch += 1
        self._shapes = shapes
        specs = [tensor_spec(*item) for item in tensors(0, shapes).items()]
        self._layout = plan_layout(specs, bucket_bytes=64 * 96 * 2)
        size = self._layout.num_bytes
        self._memory = SharedSlots.make(slot_bytes=size, num_slots=NUM_SLOTS)
        self.versions.open(
            OpenMemory(
                epoch=self.epoch, path=self._memory.path, layout=self._layout, num_slots=NUM_SLOTS
            )
        )

    def publish(self, step: int) -> None:
        slot = self.versions.reserve(self.epoch)
        for name, view in tensor_views(self._layout, self._memory.slot(slot)).items():
            view.copy_(tensors(step, self._shapes)[name])
        self.versions.written(self.epoch, slot, PolicyVersion(self.epoch, step))

    def fetched(self, step: int, name: str = "a") -> list[int]:
        """Return the bytes that an agent fetched in each publish of a step."""
        version = PolicyVersion(self.epoch, step)
        return [r.fetched_bytes.get(name, 0) for r in self.records if r.version == version]


class Agent:
    """An agent, its engine, and the memory in which versions arrive."""

    def __init__(self, bus: Bus, name: str = "a", *, uses_deltas: bool = True) -> None:
        self.bus = bus
        initial = tensors(0, bus._shapes)
        self.engine = BusEngine(initial, log=bus.folder / f"{name}.tokens", group_timeout_s=NEVER_S)
        self.staging = Staging(bus.folder, name, uses_deltas=uses_deltas)
        self.subscriber = Subscriber(
            self.engine,
            join=Join(
                name=name,
                incarnation="a",
                device="cpu",
                torch_version=installed_libraries().torch_version,
                transport="tcp",
            ),
            tensors=TensorSet({n: tuple(t.shape) for n, t in initial.items()}, "bfloat16"),
            staging=self.staging,
            silence_s=NEVER_S,
            fetch_timeout_s=NEVER_S,
            on_pause=lambda: None,
            on_adopt=lambda _version, _stood_s: None,
        )

    async def adopts(self, step: int) -> None:
        """Wait until the engine runs a version; check every byte of it."""
        version = PolicyVersion(self.bus.epoch, step)
        await until_async(lambda: self.subscriber.adopted == version)
        assert digest_of(self.engine.tensors) == digest_of(tensors(step, self.bus._shapes))
        await until_async(lambda: bool(self.bus.fetched(step)))

    def memory_file(self) -> Path:
        return self.staging._folder / WEIGHTS

    def close(self) -> None:
        self.engine.close()
        self.staging.close()


@asynccontextmanager
async def running(job: "asyncio._CoroutineLike[None]") -> AsyncIterator[None]:
    task = asyncio.ensure_future(job)
    try:
        yield
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task


@asynccontextmanager
async def running_bus(bus: Bus, *agents: Agent) -> AsyncIterator[None]:
    async with AsyncExitStack() as stack:
        await stack.enter_async_context(running(bus.publisher.run(bus.address)))
        for agent in agents:
            await stack.enter_async_context(running(agent.subscriber.run(bus.address)))
        yield


@contextmanager
def agents(bus: Bus, *names: str, uses_deltas: bool = True) -> Iterator[list[Agent]]:
    made = [Agent(bus, name, uses_deltas=uses_deltas) for name in names]
    try:
        yield made
    finally:
        for one in made:
            one.close()


@pytest.fixture
def folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="sp-", dir="/tmp") as name:
        yield Path(name)


def test_an_agent_fetches_what_changed_and_holds_every_byte(folder: Path):
    async def scenario() -> None:
        bus = Bus(folder)
        with agents(bus, "a") as (agent,):
            async with running_bus(bus, agent):
                bus.publish(0)
                await agent.adopts(0)
                assert bus.fetched(0) == [NUM_BYTES]
                for step in range(1, 6):
                    bus.publish(step)
                    await agent.adopts(step)
                    (fetched,) = bus.fetched(step)
                    assert 0 < fetched < NUM_BYTES / 20
        assert agent.staging.num_refused_deltas == 0
        assert bus.deltas.num_sent == 5 * NUM_BUCKETS
        assert bus.deltas.whole_because == {"the agent has no version": NUM_BUCKETS}

    asyncio.run(scenario())


def test_an_agent_without_deltas_fetches_every_byte_and_the_relay_computes_none(folder: Path):
    async def scenario() -> None:
        bus = Bus(folder)
        with agents(bus, "a", uses_deltas=False) as (agent,):
            async with running_bus(bus, agent):
                for step in range(3):
                    bus.publish(step)
                    await agent.adopts(step)
                    assert bus.fetched(step) == [NUM_BYTES]
        assert bus.deltas._copy is None
        assert not bus.deltas.whole_because

    asyncio.run(scenario())


@pytest.mark.parametrize("missed", [1, KEPT - 1, KEPT], ids="behind by {}".format)
def test_an_agent_some_versions_behind_catches_up_and_one_too_far_gets_all(
    folder: Path, missed: int
):
    async def scenario() -> None:
        bus = Bus(folder)
        with agents(bus, "a", "b") as (agent, other):
            async with running_bus(bus, other):
                async with running(agent.subscriber.run(bus.address)):
                    for step in range(2):
                        bus.publish(step)
                        await agent.adopts(step)
                        await other.adopts(step)
                for step in range(2, 2 + missed):
                    bus.publish(step)
                    await other.adopts(step)
                async with running(agent.subscriber.run(bus.address)):
                    last = 2 + missed
                    bus.publish(last)
                    await agent.adopts(last)
                    await until_async(lambda: any(bus.fetched(last)))
                    (fetched,) = (one for one in bus.fetched(last) if one)
                    await other.adopts(last)
        if missed < KEPT:
            assert 0 < fetched < NUM_BYTES / 20 * (missed + 1)
        else:
            assert fetched == NUM_BYTES
            assert bus.deltas.whole_because["what changed since the agent's version is not kept"]

    asyncio.run(scenario())


def test_a_damaged_base_is_noticed_and_that_bucket_alone_is_fetched_whole(folder: Path):
    async def scenario() -> None:
        bus = Bus(folder)
        with agents(bus, "a") as (agent,):
            async with running_bus(bus, agent):
                for step in range(2):
                    bus.publish(step)
                    await agent.adopts(step)
                with agent.memory_file().open("r+b") as file:  # a bit of the last tensor
                    file.seek(-3, 2)
                    byte = file.read(1)[0]
                    file.seek(-3, 2)
                    file.write(bytes([byte ^ 4]))
                bus.publish(2)
                await agent.adopts(2)
                assert agent.staging.num_refused_deltas == 1
                (fetched,) = bus.fetched(2)
                bucket = NUM_BYTES // NUM_BUCKETS
                assert bucket < fetched < bucket + NUM_BYTES / 20
                bus.publish(3)
                await agent.adopts(3)
                assert bus.fetched(3)[0] < NUM_BYTES / 20

    asyncio.run(scenario())


def test_a_learner_that_took_over_goes_on_with_deltas_if_its_tensors_are_the_same(folder: Path):
    async def scenario() -> None:
        bus = Bus(folder)
        with agents(bus, "a") as (agent,):
            async with running_bus(bus, agent):
                for step in range(3):
                    bus.publish(step)
                    await agent.adopts(step)
                bus.open_memory()  # v2: it resumes one step before
                bus.publish(1)
                await agent.adopts(1)
                assert 0 < bus.fetched(1)[0] < NUM_BYTES / 20

    asyncio.run(scenario())


def test_a_layout_of_other_buckets_is_fetched_whole_and_then_by_deltas_again(folder: Path):
    async def scenario() -> None:
        bus = Bus(folder)
        with agents(bus, "a") as (agent,):
            async with running_bus(bus, agent):
                for step in range(2):
                    bus.publish(step)
                    await agent.adopts(step)
                bus.open_memory(dict(reversed(SHAPES.items())))
                for step in range(2):
                    bus.publish(step)
                    await agent.adopts(step)
                assert bus.fetched(0) == [NUM_BYTES]
                assert bus.fetched(1)[0] < NUM_BYTES / 20

    asyncio.run(scenario())


def test_a_new_relay_knows_no_base_and_sends_all(folder: Path):
    async def scenario() -> None:
        first = Bus(folder)
        with agents(first, "a") as (agent,):
            async with running(agent.subscriber.run(first.address)):
                async with running(first.publisher.run(first.address)):
                    for step in range(2):
                        first.publish(step)
                        await agent.adopts(step)
                second = agent.bus = Bus(folder)
                async with running(second.publisher.run(second.address)):
                    second.publish(2)
                    await agent.adopts(2)
                    assert second.fetched(2) == [NUM_BYTES]
                    second.publish(3)
                    await agent.adopts(3)
                    assert second.fetched(3)[0] < NUM_BYTES / 20

    asyncio.run(scenario())


def test_a_slow_engine_breaks_no_chain_and_delays_no_learner(folder: Path):
    async def scenario() -> None:
        bus = Bus(folder)
        with agents(bus, "a") as (agent,):
            async with running_bus(bus, agent):
                bus.publish(0)
                await agent.adopts(0)
                slow = bus.versions.read()
                assert slow is not None
                for step in range(1, 6):
                    bus.publish(step)  # raises where no slot is free
                    await agent.adopts(step)
                    assert bus.fetched(step)[0] < NUM_BYTES / 20
                await slow.end()

    asyncio.run(scenario())


def test_a_relay_without_agents_that_ask_forgets_its_copy(folder: Path):
    async def scenario() -> None:
        bus = Bus(folder)
        with agents(bus, "a") as (agent,):
            async with running_bus(bus):
                async with running(agent.subscriber.run(bus.address)):
                    for step in range(2):
                        bus.publish(step)
                        await agent.adopts(step)
                assert bus.deltas._copy is not None
                for step in range(2, 3 + 2 * KEPT):
                    bus.publish(step)
                    newest = PolicyVersion(bus.epoch, step)
                    await until_async(
                        lambda: bus.deltas._head == newest or bus.deltas._copy is None  # noqa: B023
                    )
                assert bus.deltas._copy is None
                assert not bus.deltas._steps

    asyncio.run(scenario())
