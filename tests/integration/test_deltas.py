"""Deltas between a real relay and real agents: exact, and never more than whole versions would be.

The engines are plain tensors; over a slow link, with SGLang, it is tests/e2e/test_slow_link.py.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator, Mapping
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import pytest
import torch
from torch import Tensor
from typing_extensions import override

from slipstream.weightbus.agent.staging import Staging
from slipstream.weightbus.agent.subscriber import Subscriber
from slipstream.wire.messages.versions import PolicyVersion
from tests.support.bus.engine import BusEngine, digest_of
from tests.support.bus.remote import Relay, agent, running
from tests.support.waiting import until_async

pytestmark = pytest.mark.integration
KEPT = 3  # steps
NUM_BUCKETS = 4
SHAPES = {f"layer{i}.weight": (64, 96) for i in range(NUM_BUCKETS)}


def tensors(step: int, shapes: Mapping[str, tuple[int, ...]] = SHAPES) -> dict[str, Tensor]:
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


class Bus(Relay):
    """A relay of versions that differ by little."""

    def __init__(self, folder: Path) -> None:
        super().__init__(
            folder,
            bucket_bytes=64 * 96 * 2,
            tensors=tensors(0),
            delta_versions=KEPT,
            is_in_sight=False,
        )
        self.folder = folder
        self.deltas = self.publisher._deltas

    @override
    def at(self, step: int) -> Mapping[str, Tensor]:
        return tensors(step, {name: tuple(one.shape) for name, one in self.tensors.items()})

    def fetched(self, step: int, name: str = "a") -> list[int]:
        """Return the bytes that an agent fetched in each publish of a step."""
        version = PolicyVersion(self.epoch, step)
        return [r.fetched_bytes.get(name, 0) for r in self.records if r.version == version]


@dataclass
class Agent:
    """An agent, and the memory in which versions arrive."""

    bus: Bus
    subscriber: Subscriber
    staging: Staging

    async def adopts(self, step: int) -> None:
        """Wait until the engine runs a version; check every byte of it."""
        version = PolicyVersion(self.bus.epoch, step)
        await until_async(lambda: self.subscriber.adopted == version)
        engine = cast("BusEngine", self.subscriber._updates._engine)
        assert digest_of(engine.tensors) == digest_of(self.bus.at(step))
        await until_async(lambda: bool(self.bus.fetched(step)))

    async def runs(self, steps: Iterable[int]) -> None:
        """Have versions published one after the other, and each adopted."""
        for step in steps:
            self.bus.publish(step)
            await self.adopts(step)

    def memory_file(self) -> Path:
        return self.staging.folder / "memory"


@asynccontextmanager
async def running_bus(bus: Bus, *agents: Agent) -> AsyncIterator[None]:
    async with AsyncExitStack() as stack:
        await stack.enter_async_context(running(bus.publisher.run(bus.near)))
        for one in agents:
            await stack.enter_async_context(running(one.subscriber.run(bus.near)))
        yield


@contextmanager
def agents(bus: Bus, *names: str, uses_deltas: bool = True) -> Iterator[list[Agent]]:
    with ExitStack() as stack:
        made = []
        for name in names:
            staging = Staging(bus.folder, name, uses_deltas=uses_deltas)
            stack.callback(staging.close)
            subscriber = stack.enter_context(
                agent(bus.folder, None, name, tensors=bus.tensors, transport="tcp", staging=staging)
            )
            made.append(Agent(bus, subscriber, staging))
        yield made


def with_agent(folder: Path, scenario: Callable[[Bus, Agent], Awaitable[None]]) -> None:
    """Run a scenario beside a relay and an agent."""

    async def run() -> None:
        bus = Bus(folder)
        with agents(bus, "a") as (one,):
            async with running_bus(bus, one):
                await scenario(bus, one)

    asyncio.run(run())


def test_an_agent_fetches_what_changed_and_holds_every_byte(folder: Path):
    async def scenario(bus: Bus, one: Agent) -> None:
        await one.runs([0])
        assert bus.fetched(0) == [NUM_BYTES]
        for step in range(1, 6):
            bus.publish(step)
            await one.adopts(step)
            (fetched,) = bus.fetched(step)
            assert 0 < fetched < NUM_BYTES / 20
        assert one.staging.num_refused_deltas == 0
        assert bus.deltas.num_sent == 5 * NUM_BUCKETS
        assert bus.deltas.whole_because == {"the agent has no version": NUM_BUCKETS}

    with_agent(folder, scenario)


async def test_an_agent_without_deltas_fetches_every_byte_and_the_relay_computes_none(folder: Path):
    bus = Bus(folder)
    with agents(bus, "a", uses_deltas=False) as (one,):
        async with running_bus(bus, one):
            for step in range(3):
                bus.publish(step)
                await one.adopts(step)
                assert bus.fetched(step) == [NUM_BYTES]
    assert bus.deltas._copy is None
    assert not bus.deltas.whole_because


@pytest.mark.parametrize("missed", [1, KEPT - 1, KEPT], ids="behind by {}".format)
async def test_an_agent_some_versions_behind_catches_up_and_one_too_far_gets_all(
    folder: Path, missed: int
):
    bus = Bus(folder)
    with agents(bus, "a", "b") as (one, other):
        async with running_bus(bus, other):
            async with running(one.subscriber.run(bus.near)):
                for step in range(2):
                    bus.publish(step)
                    await one.adopts(step)
                    await other.adopts(step)
            for step in range(2, 2 + missed):
                bus.publish(step)
                await other.adopts(step)
            async with running(one.subscriber.run(bus.near)):
                last = 2 + missed
                bus.publish(last)
                await one.adopts(last)
                await until_async(lambda: any(bus.fetched(last)))
                (fetched,) = (size for size in bus.fetched(last) if size)
                await other.adopts(last)
    if missed < KEPT:
        assert 0 < fetched < NUM_BYTES / 20 * (missed + 1)
    else:
        assert fetched == NUM_BYTES
        assert bus.deltas.whole_because["what changed since the agent's version is not kept"]


def test_a_damaged_base_is_noticed_and_that_bucket_alone_is_fetched_whole(folder: Path):
    async def scenario(bus: Bus, one: Agent) -> None:
        await one.runs(range(2))
        with one.memory_file().open("r+b") as file:  # a bit of the last tensor
            file.seek(-3, 2)
            byte = file.read(1)[0]
            file.seek(-3, 2)
            file.write(bytes([byte ^ 4]))
        await one.runs([2])
        assert one.staging.num_refused_deltas == 1
        (fetched,) = bus.fetched(2)
        bucket = NUM_BYTES // NUM_BUCKETS
        assert bucket < fetched < bucket + NUM_BYTES / 20
        await one.runs([3])
        assert bus.fetched(3)[0] < NUM_BYTES / 20

    with_agent(folder, scenario)


def test_a_learner_that_took_over_goes_on_with_deltas_if_its_tensors_are_the_same(folder: Path):
    async def scenario(bus: Bus, one: Agent) -> None:
        await one.runs(range(3))
        bus.open_memory(bus.tensors)  # v2: it resumes one step before
        await one.runs([1])
        assert 0 < bus.fetched(1)[0] < NUM_BYTES / 20

    with_agent(folder, scenario)


def test_a_layout_of_other_buckets_is_fetched_whole_and_then_by_deltas_again(folder: Path):
    async def scenario(bus: Bus, one: Agent) -> None:
        await one.runs(range(2))
        bus.open_memory(dict(reversed(bus.tensors.items())))
        await one.runs(range(2))
        assert bus.fetched(0) == [NUM_BYTES]
        assert bus.fetched(1)[0] < NUM_BYTES / 20

    with_agent(folder, scenario)


async def test_a_new_relay_knows_no_base_and_sends_all(folder: Path):
    first = Bus(folder)
    with agents(first, "a") as (one,):
        async with running(one.subscriber.run(first.near)):
            async with running(first.publisher.run(first.near)):
                await one.runs(range(2))
            second = one.bus = Bus(folder)
            async with running(second.publisher.run(second.near)):
                await one.runs([2])
                assert second.fetched(2) == [NUM_BYTES]
                await one.runs([3])
                assert second.fetched(3)[0] < NUM_BYTES / 20


def test_a_slow_engine_breaks_no_chain_and_delays_no_learner(folder: Path):
    async def scenario(bus: Bus, one: Agent) -> None:
        await one.runs([0])
        slow = bus.versions.read()
        assert slow is not None
        for step in range(1, 6):
            bus.publish(step)  # raises where no slot is free
            await one.adopts(step)
            assert bus.fetched(step)[0] < NUM_BYTES / 20
        await slow.end()

    with_agent(folder, scenario)


async def test_a_relay_without_agents_that_ask_forgets_its_copy(folder: Path):
    bus = Bus(folder)
    with agents(bus, "a") as (one,):
        async with running_bus(bus):
            async with running(one.subscriber.run(bus.near)):
                await one.runs(range(2))
            assert bus.deltas._copy is not None
            for step in range(2, 3 + 2 * KEPT):
                bus.publish(step)
                newest = PolicyVersion(bus.epoch, step)
                await until_async(
                    lambda: bus.deltas._head == newest or bus.deltas._copy is None  # noqa: B023
                )
            assert bus.deltas._copy is None
            assert not bus.deltas._steps
