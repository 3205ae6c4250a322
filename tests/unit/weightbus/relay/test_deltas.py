"""Which steps a relay keeps, for whom it waits, and when it sends all of a bucket."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import msgspec
import pytest
import torch

from slipstream.weightbus.config import WeightBusSection
from slipstream.weightbus.relay.deltas import Deltas
from slipstream.weightbus.relay.served import Versions
from slipstream.weightbus.version.delta import BucketDelta, apply_delta
from slipstream.weightbus.version.layout import part_layout, plan_layout
from slipstream.weightbus.version.shared_memory import SharedSlots
from slipstream.wire.messages.manifest import TensorSpec
from slipstream.wire.messages.relay import OpenMemory
from slipstream.wire.messages.versions import PolicyVersion
from slipstream.wire.messages.weightbus import FetchBucket
from tests.support.waiting import NEVER_S, until_async

SPECS = [TensorSpec(f"w{i}", "bfloat16", (2_000,)) for i in range(3)]
LAYOUT = plan_layout(SPECS, bucket_bytes=2 * 4_000)  # w0 and w1, then w2
NOT_KEPT = "what changed since the agent's version is not kept"


def v(step: int) -> PolicyVersion:
    return PolicyVersion(1, step)


def of(**settings: float) -> WeightBusSection:
    unhurried = WeightBusSection(delta_versions=3, timeout_s=2 * NEVER_S)
    return msgspec.structs.replace(unhurried, **settings)


class Relay:
    """The versions of a learner, and deltas between them."""

    def __init__(self, folder: Path, **settings: float) -> None:
        self.versions = Versions(folder)
        self.deltas = Deltas(self.versions, of(**settings))
        self._memory = SharedSlots.make(LAYOUT, num_slots=3)
        self.versions.open(OpenMemory(epoch=1, paths=self._memory.paths, layout=LAYOUT))
        self._bytes = torch.zeros(LAYOUT.num_bytes, dtype=torch.uint8)

    def publish(self, step: int, *, count: int = 1) -> None:
        """Publish a version of which so many bytes of the first tensor changed."""
        random = torch.Generator().manual_seed(step)
        self._bytes[:count] ^= torch.randint(1, 256, (count,), generator=random).to(torch.uint8)
        slot = self.versions.reserve(1)
        self._memory.slot(slot).copy_(self._bytes)
        self.versions.written(1, slot, v(step))

    async def ask(self, base: int | None, step: int, index: int = 0) -> BucketDelta | None:
        publication = self.versions.find(v(step))
        assert publication is not None
        named = None if base is None else v(base)
        request = FetchBucket(version=v(step), index=index, base=named)
        return await self.deltas.delta(request, publication)

    async def encoded(self, step: int) -> None:
        await until_async(lambda: self.deltas._head == v(step))


@asynccontextmanager
async def running(relay: Relay, *, index: int = 0) -> AsyncIterator[Relay]:
    """Run its deltas, from version 0 on; ``index`` is a bucket that it has."""
    relay.publish(0)
    task = asyncio.create_task(relay.deltas.run())
    assert await relay.ask(None, 0, index) is None
    await relay.encoded(0)
    try:
        yield relay
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task


async def test_a_request_waits_for_the_step_that_is_computed(tmp_path: Path):
    async with running(Relay(tmp_path)) as relay:
        relay.publish(1)
        found = await asyncio.gather(*(relay.ask(0, 1, index) for index in (1, 0)))
        other, first = found
        assert first is not None
        assert (first.base, first.num_steps, first.whole) == (v(0), 1, frozenset())
        assert [bool(frame) for frame in first.frames] == [True, False]  # of w1 nothing changed
        assert other is not None
        assert other.frames == [b""]


async def test_no_more_steps_are_kept_than_set(tmp_path: Path):
    async with running(Relay(tmp_path, delta_versions=3)) as relay:
        for step in range(1, 6):
            relay.publish(step)
            assert await relay.ask(None, step) is None
            await relay.encoded(step)
        for base, steps in ((5, 0), (4, 1), (3, 2), (2, 3)):
            found = await relay.ask(base, 5)
            assert found is not None
            assert found.num_steps == steps
            assert len(found.frames) == 2 * steps
        for base in (1, 0, 77):
            assert await relay.ask(base, 5) is None
        assert relay.deltas.whole_because[NOT_KEPT] == 3
        assert relay.deltas.num_sent == 4


@pytest.mark.parametrize(("delta_bytes", "are_all_kept"), [(2_000, False), (20_000, True)])
async def test_no_more_bytes_are_kept_than_set(
    tmp_path: Path, delta_bytes: int, are_all_kept: bool
):
    async with running(Relay(tmp_path, delta_versions=9, delta_bytes=delta_bytes)) as relay:
        for step in range(1, 5):
            relay.publish(step, count=600)
            await relay.encoded(step)
            assert sum(one.num_bytes for one in relay.deltas._steps) <= delta_bytes
        assert await relay.ask(3, 4) is not None
        assert (await relay.ask(0, 4) is not None) == are_all_kept
        relay.publish(5, count=4_000)
        await relay.encoded(5)  # that step alone is larger: w0 comes whole
        assert sum(one.num_bytes for one in relay.deltas._steps) <= delta_bytes


async def test_a_tensor_comes_whole_where_its_deltas_are_longer(tmp_path: Path):
    async with running(Relay(tmp_path)) as relay:
        relay.publish(1, count=4_000)
        found = await relay.ask(0, 1)
        assert found is not None
        assert found.whole == {0}
        assert [len(frame) for frame in found.frames] == [4_000, 0]
        relay.publish(2, count=8_000)
        assert await relay.ask(1, 2) is None
        assert relay.deltas.whole_because["the deltas are no shorter"] == 1


async def test_a_version_that_could_not_be_read_is_passed_over(tmp_path: Path):
    async with running(Relay(tmp_path)) as relay:
        slow = relay.versions.read()
        relay.publish(1)
        await relay.encoded(1)
        slower = relay.versions.read()
        relay.publish(2)  # two others are being read
        assert slow is not None
        assert slower is not None
        waiting = asyncio.create_task(relay.ask(1, 2))
        await asyncio.sleep(0)
        relay.publish(3)
        assert await waiting is None  # nobody will compute it
        await slow.end()
        await relay.encoded(3)
        found = await relay.ask(1, 3)
        assert found is not None
        assert found.num_steps == 1
        assert await relay.ask(2, 3) is None
        await slower.end()


async def test_a_step_that_takes_too_long_is_not_waited_for(tmp_path: Path):
    relay = Relay(tmp_path, timeout_s=0.0)
    async with running(relay):
        relay.publish(1)
        assert await relay.ask(0, 1) is None
    why = "what changed was not computed in half of weightbus.timeout_s"
    assert relay.deltas.whole_because[why] == 1


@pytest.mark.parametrize("base", [None, 0, 1])
async def test_deltas_can_be_disabled(tmp_path: Path, base: int | None):
    relay = Relay(tmp_path, delta_versions=0)
    relay.publish(1)
    assert await relay.ask(base, 1) is None
    assert relay.deltas.whole_because == {"deltas are disabled": 1}


async def test_agents_that_ask_for_none_cost_nothing(tmp_path: Path):
    relay = Relay(tmp_path)
    relay.publish(1)
    publication = relay.versions.find(v(1))
    assert publication is not None
    request = FetchBucket(version=v(1), index=0)
    assert await relay.deltas.delta(request, publication) is None
    assert relay.deltas._left == 0
    assert not relay.deltas.whole_because


class PartOf(Relay):
    """A part's relay: w2 is there, and its slots are given out elsewhere, in turns."""

    def __init__(self, folder: Path) -> None:
        first, second = LAYOUT.buckets
        buckets = (first, msgspec.structs.replace(second, part=1))
        layout = msgspec.structs.replace(LAYOUT, buckets=buckets)
        own = part_layout(layout, 1)
        self.versions = Versions(folder)
        self.deltas = Deltas(self.versions, of(), holds=False)
        self._memory = SharedSlots.make(own, num_slots=3)
        self.versions.open(OpenMemory(epoch=1, paths=self._memory.paths, layout=layout, part=1))
        self._bytes = torch.zeros(own.num_bytes, dtype=torch.uint8)

    def publish(self, step: int, *, count: int = 1) -> None:
        self._bytes[:count] ^= step
        self.versions.writing(1, step % 3)
        self._memory.slot(step % 3).copy_(self._bytes)
        self.versions.written(1, step % 3, v(step))


async def test_a_part_has_deltas_of_its_own_buckets(tmp_path: Path):
    async with running(PartOf(tmp_path), index=1) as relay:
        for step in range(1, 6):
            relay.publish(step)
            found = await relay.ask(step - 1, step, 1)
            assert found is not None
            assert found.base == v(step - 1)
            assert len(found.frames) == 1
            data = torch.zeros_like(relay._bytes)
            data[:1] = relay._bytes[:1] ^ step
            apply_delta(memoryview(found.frames[0]), data.numpy().data, 2)
            assert torch.equal(data, relay._bytes)


async def test_a_version_that_a_part_overwrites_while_it_is_read_ends_the_chain(tmp_path: Path):
    async with running(PartOf(tmp_path), index=1) as relay:
        relay.publish(1)
        while relay.deltas._head is not None:  # noqa: ASYNC110 until it is being read
            await asyncio.sleep(0)
        relay.versions.writing(1, 1)  # before the thread's result is taken
        for step in (2, 3):
            relay.publish(step)
            await relay.encoded(step)
        assert await relay.ask(0, 3, 1) is None
        assert await relay.ask(2, 3, 1) is not None
