"""The weight bus against a real SGLang server, driven command by command."""

import asyncio
import tempfile
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from generators.config import generator_settings
from generators.engine import SamplingParams
from generators.sglang_engine import SglangEngine
from generators.sglang_process import SglangProcess
from tests.e2e.tiny_run import write_policy
from weightbus.config import WeightBusSection
from weightbus.engine_checksums import differing, expected_checksums
from weightbus.publisher import Publisher
from weightbus.snapshot import WeightSnapshot
from weightbus.subscriber import Subscriber
from weightbus.tensor_set import model_shapes
from wire.bus import Join, PublishRecord
from wire.manifest import Bucket
from wire.versions import PolicyVersion

pytestmark = [pytest.mark.integration, pytest.mark.timeout(120)]
LONG = SamplingParams(temperature=1.0, max_new_tokens=420, min_new_tokens=400)
SHORT = SamplingParams(temperature=1.0, max_new_tokens=8)


@pytest.fixture
def folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="sp-", dir="/tmp") as name:
        yield Path(name)


class Bus:
    """A publisher and one engine with its subscriber."""

    def __init__(self, engine: SglangEngine, publisher: Publisher, model: Path) -> None:
        self.engine = engine
        self.publisher = publisher
        self.records: asyncio.Queue[PublishRecord] = asyncio.Queue()
        self.tensors = load_file(model / "model.safetensors")

    def moved(self, by: float) -> dict[str, torch.Tensor]:
        return {name: tensor + by for name, tensor in self.tensors.items()}

    async def publish(self, step: int, tensors: dict[str, torch.Tensor]) -> PublishRecord:
        self.publisher.submit(WeightSnapshot(PolicyVersion(1, step), tensors))
        while True:
            record = await asyncio.wait_for(self.records.get(), 30)
            if record.version.step == step:
                return record


@asynccontextmanager
async def running_bus(folder: Path) -> AsyncIterator[Bus]:
    write_policy(folder / "model")
    settings = generator_settings(
        {
            "run": {"name": "p", "dir": str(folder), "model": str(folder / "model")},
            "sampling": {"max_prompt_tokens": 16, "max_response_tokens": 440},
            "generators": {"device": "cpu", "max_cached_tokens": 4096},
        }
    )
    process = SglangProcess.start(settings, "generator-0")
    tasks: list[asyncio.Task[None]] = []
    try:
        await process.until_ready(90)
        engine = SglangEngine(
            process.url, process.api_key, request_timeout_s=60, control_timeout_s=20
        )
        bus_settings = WeightBusSection(bucket_bytes=64 * 1024, timeout_s=20)

        async def keep(record: PublishRecord) -> None:
            await bus.records.put(record)

        publisher = Publisher(bus_settings, on_record=keep)
        bus = Bus(engine, publisher, folder / "model")
        subscriber = Subscriber(
            engine,
            join=Join(name="generator-0", incarnation="a", device="cpu", torch_version="2"),
            shapes=model_shapes(folder / "model"),
            on_pause=lambda: None,
            on_adopt=lambda _version: None,
        )
        endpoint = f"ipc://{folder}/bus"
        tasks = [
            asyncio.create_task(publisher.run(endpoint)),
            asyncio.create_task(subscriber.run(endpoint)),
        ]
        try:
            yield bus
        finally:
            await engine.close()
            for task in tasks:
                task.cancel()
                with suppress(asyncio.CancelledError):
                    await task
    finally:
        process.stop()


def test_a_publish_into_a_running_generation_is_labelled_verified_and_exact(folder: Path):
    async def scenario() -> None:
        async with running_bus(folder) as bus:
            first = await bus.publish(0, bus.tensors)
            assert list(first.adopted_by) == ["generator-0"]

            generation = asyncio.create_task(bus.engine.sample([3, 4, 13], LONG, count=2))
            await asyncio.sleep(0.4)
            newer = bus.moved(by=0.01)
            record = await bus.publish(1, newer)
            assert record.num_in_flight == {"generator-0": 2}
            for completion in await generation:
                steps = [version.step for _, version in completion.version_starts]
                assert steps == [0, 1]
                assert completion.version_starts[1][0] > 0
                assert len(completion.token_ids) >= 400
            assert differing(expected_checksums(newer), await bus.engine.checksums()) == []

            incomplete = dict(newer)
            del incomplete["model.norm.weight"]
            refused = await bus.publish(2, incomplete)
            assert "lacks ['model.norm.weight']" in refused.failed["generator-0"]
            (answer,) = await bus.engine.sample([3, 4, 13], SHORT, count=1)
            assert answer.version_starts == [(0, PolicyVersion(1, 1))]

    asyncio.run(scenario())


def test_an_engine_that_holds_something_else_is_not_relabelled_and_is_repaired(folder: Path):
    async def scenario() -> None:
        async with running_bus(folder) as bus:
            await bus.publish(0, bus.tensors)
            honest = bus.moved(by=0.02)
            bus.publisher.submit(_Corrupting(PolicyVersion(1, 1), dict(honest)))
            record = await asyncio.wait_for(bus.records.get(), 30)
            assert "tensors differ in the engine" in record.failed["generator-0"]
            waiting = asyncio.create_task(bus.engine.sample([3, 4, 13], SHORT, count=1))
            repaired = await bus.publish(2, honest)
            assert list(repaired.adopted_by) == ["generator-0"]
            (answer,) = await waiting
            assert answer.version_starts == [(0, PolicyVersion(1, 2))], "served while torn"
            assert differing(expected_checksums(honest), await bus.engine.checksums()) == []

    asyncio.run(scenario())


class _Corrupting(WeightSnapshot):
    """Sends bytes that differ from the tensors it announces."""

    def flat(self, bucket: Bucket) -> torch.Tensor:
        sent = WeightSnapshot.flat(self, bucket)
        sent[:4] ^= 1
        return sent
