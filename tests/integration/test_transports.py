"""The contract of the transports, with a real SGLang server as receiver.

What may fail on the way is in test_weight_bus.py, with engines that can be made to fail.
"""

import asyncio
import itertools
import tempfile
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from slipstream.generators.engine import SamplingParams
from slipstream.generators.sglang.engine import SglangEngine
from slipstream.generators.sglang.process import SglangProcess
from slipstream.weightbus.agent.staging import Staging
from slipstream.weightbus.agent.subscriber import Subscriber
from slipstream.weightbus.agent.tensor_set import model_tensors
from slipstream.weightbus.config import WeightBusSection
from slipstream.weightbus.net.compatibility import installed_libraries
from slipstream.weightbus.relay.publisher import Publisher
from slipstream.weightbus.relay.served import Versions
from slipstream.weightbus.relay.transports import disk
from slipstream.weightbus.version.engine_checksums import differing, expected_checksums
from slipstream.weightbus.version.layout import plan_layout
from slipstream.weightbus.version.shared_memory import SharedSlots
from slipstream.weightbus.version.slots import NUM_SLOTS
from slipstream.weightbus.version.snapshot import WeightSnapshot, tensor_spec, tensor_views
from slipstream.wire.files.model_files import WEIGHTS
from slipstream.wire.messages.manifest import WeightManifest
from slipstream.wire.messages.probe import ProbeLogprobs
from slipstream.wire.messages.relay import OpenMemory
from slipstream.wire.messages.versions import PolicyVersion
from slipstream.wire.messages.weightbus import Join, PublishRecord, RelayAddress
from tests.integration.sglang_load import until_load
from tests.support.tiny_run import sglang_server, write_policy
from tests.support.waiting import HANG_S, NEVER_S

pytestmark = pytest.mark.integration
LONG = SamplingParams(temperature=1.0, max_new_tokens=420, min_new_tokens=400)
SHORT = SamplingParams(temperature=1.0, max_new_tokens=8)
TRANSPORTS: tuple[str, ...] = ("collective", "tcp", "disk")
PROBE = ProbeLogprobs(sequences=((3, 5, 1),), logprobs=((-0.5, -2.0),), num_context=1)
TRIES = 20  # to publish while two answers are in the making: a slow machine may do it too late
_epochs = itertools.count(1)  # one server serves all tests, and its version never goes back


@pytest.fixture(scope="module")
def server() -> Iterator[SglangProcess]:
    with sglang_server() as process:
        yield process


@pytest.fixture
def folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="sp-", dir="/tmp") as name:
        write_policy(Path(name) / "model")
        yield Path(name)


class Bus:
    """A learner's memory and a publisher of it, with one engine that is subscribed to it."""

    def __init__(self, engine: SglangEngine, folder: Path, transport: str) -> None:
        self.engine = engine
        self.tensors = load_file(folder / "model" / "model.safetensors")
        self.epoch = next(_epochs)
        self.records: asyncio.Queue[PublishRecord] = asyncio.Queue()
        self.probes: list[tuple[PolicyVersion, ProbeLogprobs | None]] = []
        self.versions = Versions(folder / "weights")
        settings = WeightBusSection(
            timeout_s=NEVER_S, receive_timeout_s=NEVER_S, member_silence_s=NEVER_S
        )
        self.publisher = Publisher(
            settings, self.versions, on_record=self.records.put, libraries=installed_libraries()
        )
        self.subscriber = Subscriber(
            engine,
            join=Join(
                name="generator-0",
                incarnation="a",
                device="cpu",
                torch_version=installed_libraries().torch_version,
                transport=transport,
            ),
            tensors=model_tensors(folder / "model", dtype="float32"),
            staging=Staging(folder, "generator-0"),
            silence_s=NEVER_S,
            fetch_timeout_s=NEVER_S,
            on_pause=lambda: None,
            on_adopt=lambda _version, _stood_s: None,
            on_probe=lambda version, probe: self.probes.append((version, probe)),
        )
        self._layout: WeightManifest
        self._memory: SharedSlots

    def moved(self, by: float) -> dict[str, Tensor]:
        return {name: tensor + by for name, tensor in self.tensors.items()}

    def open_memory(self, tensors: dict[str, Tensor]) -> None:
        specs = [tensor_spec(*item) for item in tensors.items()]
        self._layout = plan_layout(specs, bucket_bytes=64 * 1024)
        size = self._layout.num_bytes
        self._memory = SharedSlots.make(slot_bytes=size, num_slots=NUM_SLOTS)
        self.versions.open(
            OpenMemory(
                epoch=self.epoch, path=self._memory.path, layout=self._layout, num_slots=NUM_SLOTS
            )
        )

    async def publish(
        self, step: int, tensors: dict[str, Tensor], probe: ProbeLogprobs | None = None
    ) -> PublishRecord:
        """Publish a version and return the record of the first attempt."""
        slot = self.versions.reserve(self.epoch)
        views = tensor_views(self._layout, self._memory.slot(slot))
        for name, view in views.items():
            view.copy_(tensors[name])
        self.versions.written(self.epoch, slot, PolicyVersion(self.epoch, step), probe)
        return await self.record_of(step)

    async def record_of(self, step: int) -> PublishRecord:
        while True:
            record = await asyncio.wait_for(self.records.get(), HANG_S)  # noqa: TID251 cancelled by nobody
            if record.version == PolicyVersion(self.epoch, step):
                return record


@asynccontextmanager
async def running_bus(server: SglangProcess, folder: Path, transport: str) -> AsyncIterator[Bus]:
    engine = SglangEngine(
        server.url, server.api_key, request_timeout_s=HANG_S, control_timeout_s=HANG_S
    )
    bus = Bus(engine, folder, transport)
    bus.open_memory(bus.tensors)
    door = RelayAddress(endpoint=f"ipc://{folder}/bus", bulk_endpoint=f"ipc://{folder}/bulk")
    tasks = [
        asyncio.create_task(bus.publisher.run(door)),
        asyncio.create_task(bus.subscriber.run(door)),
    ]
    try:
        yield bus
    finally:
        for task in reversed(tasks):
            task.cancel()
            with suppress(asyncio.CancelledError):
                await task
        await engine.close()


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_publish_into_a_running_generation_is_labelled_verified_and_exact(
    server: SglangProcess, folder: Path, transport: str
):
    async def scenario() -> None:
        async with running_bus(server, folder, transport) as bus:
            first = await bus.publish(0, bus.tensors)
            assert first.transports == {"generator-0": "disk" if transport == "disk" else "tcp"}

            for step in range(1, TRIES):
                asked = bus.engine.sample([3, 4, 13], LONG, count=2)
                generation = asyncio.create_task(asked)
                await until_load(server, lambda load: load.num_running == 2 or generation.done())  # noqa: B023
                newer = bus.moved(by=0.01 * step)
                record = await bus.publish(step, newer, PROBE)
                completions = await generation
                if all(len(one.version_starts) > 1 for one in completions):
                    break
            assert record.transports == {"generator-0": transport}
            labels = [PolicyVersion(bus.epoch, one) for one in range(step + 1)]
            assert bus.probes == [(labels[0], None), *((one, PROBE) for one in labels[1:])]
            assert record.num_in_flight == {"generator-0": 2}
            assert record.num_bytes == sum(tensor.nbytes for tensor in newer.values())
            for completion in completions:
                steps = [version.step for _, version in completion.version_starts]
                assert steps == [step - 1, step]
                assert completion.version_starts[1][0] > 0
                assert len(completion.token_ids) >= 400
            assert differing(expected_checksums(newer), await bus.engine.checksums()) == []

            for later in range(step + 1, step + 7):
                record = await bus.publish(later, bus.moved(by=-0.01 * later))
                assert record.adopted_by, record.failed
            last = expected_checksums(bus.moved(by=-0.01 * later))
            assert differing(last, await bus.engine.checksums()) == []

            incomplete = dict(newer)
            del incomplete["model.norm.weight"]
            before = PolicyVersion(bus.epoch, later)
            bus.epoch = next(_epochs)  # another learner
            bus.open_memory(incomplete)
            refused = await bus.publish(later + 1, incomplete)
            assert "lacks ['model.norm.weight']" in refused.failed["generator-0"]
            (answer,) = await bus.engine.sample([3, 4, 13], SHORT, count=1)
            assert answer.version_starts == [(0, before)]

    asyncio.run(scenario())


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_bytes_that_change_on_the_way_are_never_served(
    server: SglangProcess, folder: Path, transport: str, monkeypatch: pytest.MonkeyPatch
):
    async def scenario() -> None:
        async with running_bus(server, folder, transport) as bus:
            await bus.publish(0, bus.tensors)
            honest = bus.moved(by=0.02)
            with monkeypatch.context() as patch:
                _damage(patch, transport)
                record = await bus.publish(1, honest)
                why = record.failed["generator-0"]
                waiting = asyncio.create_task(bus.engine.sample([3, 4, 13], SHORT, count=1))
                if transport == "collective":
                    assert "tensors differ in the engine" in why
                    await asyncio.sleep(0.2)
                    assert not waiting.done(), "served while torn"
                else:
                    assert "arrived with digest" in why
                    (answer,) = await waiting  # it was never paused
                    assert answer.version_starts == [(0, PolicyVersion(bus.epoch, 0))]
            repaired = await bus.record_of(1)
            while repaired.failed:
                repaired = await bus.record_of(1)
            (answer,) = await waiting
            if transport == "collective":
                assert answer.version_starts == [(0, PolicyVersion(bus.epoch, 1))]
            assert differing(expected_checksums(honest), await bus.engine.checksums()) == []

    asyncio.run(scenario())


def _damage(patch: pytest.MonkeyPatch, transport: str) -> None:
    """Have a bit change behind the digests."""
    if transport == "disk":
        write: Callable[..., Path] = disk.write_version

        def written(*arguments: object, **named: object) -> Path:
            folder = write(*arguments, **named)
            with (folder / WEIGHTS).open("r+b") as file:
                file.seek(-1, 2)
                last = file.read(1)
                file.seek(-1, 2)
                file.write(bytes([last[0] ^ 1]))
            return folder

        patch.setattr(disk, "write_version", written)
        return
    bucket = WeightSnapshot.bucket

    def damaged(self: WeightSnapshot, index: int) -> Tensor:
        sent: Tensor = bucket(self, index).clone()
        sent[:4] ^= torch.tensor(1, dtype=torch.uint8)
        return sent

    patch.setattr(WeightSnapshot, "bucket", damaged)
