"""The contract of the transports, with a real SGLang server as receiver.

What may fail on the way is in test_weight_bus.py, with engines that can be made to fail.
"""

import asyncio
import itertools
import tempfile
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from slipstream.generators.engine import SamplingParams
from slipstream.generators.sglang.engine import SglangEngine
from slipstream.generators.sglang.process import SglangProcess
from slipstream.weightbus.agent import updates
from slipstream.weightbus.agent.staging import Staging
from slipstream.weightbus.agent.tensor_set import model_tensors
from slipstream.weightbus.relay.transports import disk
from slipstream.weightbus.version.engine_checksums import (
    EngineLayout,
    differing,
    expected_checksums,
)
from slipstream.weightbus.version.mapped_file import open_mapped
from slipstream.weightbus.version.snapshot import WeightSnapshot
from slipstream.wire.messages.manifest import WeightManifest
from slipstream.wire.messages.probe import ProbeLogprobs
from slipstream.wire.messages.versions import PolicyVersion
from slipstream.wire.messages.weightbus import PublishRecord
from slipstream.wire.models.model_files import WEIGHTS
from tests.integration.sglang_load import client_of, until_load
from tests.support.bus.published import Published, subscriber_of
from tests.support.tiny_run import sglang_server, write_policy
from tests.support.waiting import until

pytestmark = pytest.mark.integration
LONG = SamplingParams(temperature=1.0, max_new_tokens=420, min_new_tokens=400)
SHORT = SamplingParams(temperature=1.0, max_new_tokens=8)
TRANSPORTS: tuple[str, ...] = ("collective", "tcp", "mapped", "disk")
NAMES = {"mapped": "tcp"}  # on the learner's host
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


class Bus(Published):
    """A learner's memory and a publisher of it, with one engine that is subscribed to it."""

    def __init__(self, engine: SglangEngine, folder: Path, transport: str) -> None:
        self.engine = engine
        self.tensors = load_file(folder / "model" / "model.safetensors")
        self.probes: list[tuple[PolicyVersion, ProbeLogprobs | None]] = []
        super().__init__(
            folder,
            self.tensors,
            bucket_bytes=64 * 1024,
            epoch=next(_epochs),
            is_in_sight=transport == "mapped",
        )
        self.subscriber = subscriber_of(
            engine,
            model_tensors(folder / "model", dtype="float32"),
            Staging(folder, "generator-0"),
            transport=NAMES.get(transport, transport),
            on_probe=lambda version, probe, _: self.probes.append((version, probe)),
        )

    def moved(self, by: float) -> dict[str, Tensor]:
        return {name: tensor + by for name, tensor in self.tensors.items()}

    async def publish(
        self, step: int, tensors: dict[str, Tensor], probe: ProbeLogprobs | None = None
    ) -> PublishRecord:
        """Publish a version and return the record of the first attempt."""
        return await self.record_of(self.write(step, tensors, probe))


@asynccontextmanager
async def running_bus(server: SglangProcess, folder: Path, transport: str) -> AsyncIterator[Bus]:
    async with client_of(server) as engine:
        bus = Bus(engine, folder, transport)
        async with bus.running(bus.subscriber):
            yield bus


@pytest.mark.parametrize("transport", TRANSPORTS)
async def test_a_publish_into_a_running_generation_is_labelled_verified_and_exact(
    server: SglangProcess, folder: Path, transport: str
):
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
        assert record.transports == {"generator-0": NAMES.get(transport, transport)}
        if transport in {"tcp", "mapped"}:
            moved = record.num_bytes if transport == "tcp" else 0
            assert record.fetched_bytes == {"generator-0": moved}
            assert bus.subscriber.traffic.copied_bytes == (step + 1) * moved
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
        bus.open_memory(incomplete, next(_epochs))  # another learner
        refused = await bus.publish(later + 1, incomplete)
        assert "lacks ['model.norm.weight']" in refused.failed["generator-0"]
        (answer,) = await bus.engine.sample([3, 4, 13], SHORT, count=1)
        assert answer.version_starts == [(0, before)]


@pytest.mark.parametrize("transport", TRANSPORTS)
async def test_bytes_that_change_on_the_way_are_never_served(
    server: SglangProcess, folder: Path, transport: str, monkeypatch: pytest.MonkeyPatch
):
    async with running_bus(server, folder, transport) as bus:
        await bus.publish(0, bus.tensors)
        honest = bus.moved(by=0.02)
        with monkeypatch.context() as patch, _damaged(patch, bus, transport):
            record = await bus.publish(1, honest)
            why = record.failed["generator-0"]
            waiting = asyncio.create_task(bus.engine.sample([3, 4, 13], SHORT, count=1))
            if transport == "collective":
                assert "tensors differ in the engine" in why
                await asyncio.sleep(0.2)
                assert not waiting.done(), "served while torn"
            else:
                is_mapped = transport == "mapped"
                assert (
                    "tensors differ in the engine" if is_mapped else "arrived with digest"
                ) in why
                (answer,) = await waiting  # it was never paused
                assert answer.version_starts == [(0, PolicyVersion(bus.epoch, 0))]
        repaired = await bus.record_of(PolicyVersion(bus.epoch, 1))
        while repaired.failed:
            repaired = await bus.record_of(PolicyVersion(bus.epoch, 1))
        (answer,) = await waiting
        if transport == "collective":
            assert answer.version_starts == [(0, PolicyVersion(bus.epoch, 1))]
        assert differing(expected_checksums(honest), await bus.engine.checksums()) == []


@contextmanager
def _damaged(patch: pytest.MonkeyPatch, bus: Bus, transport: str) -> Iterator[None]:
    """Have a bit change after the relay has computed digests and checksums."""
    if transport == "mapped":
        paths: list[Path] = []

        def opened(path: Path, manifest: WeightManifest) -> int:
            descriptor = open_mapped(path, manifest)
            publication = bus.versions.find(manifest.version)
            if not paths and publication is not None:
                until(lambda: publication.digest_expected(EngineLayout()) != "")
                paths.append(path)
                _flip_last_byte(path)
            return descriptor

        patch.setattr(updates, "open_mapped", opened)
        yield
        for path in paths:
            _flip_last_byte(path)
        return
    if transport == "disk":
        write: Callable[..., Path] = disk.write_version

        def written(*arguments: object, **named: object) -> Path:
            folder = write(*arguments, **named)
            _flip_last_byte(folder / WEIGHTS)
            return folder

        patch.setattr(disk, "write_version", written)
        yield
        return
    bucket = WeightSnapshot.bucket

    def damaged(self: WeightSnapshot, index: int) -> Tensor:
        sent: Tensor = bucket(self, index).clone()
        sent[:4] ^= torch.tensor(1, dtype=torch.uint8)
        return sent

    patch.setattr(WeightSnapshot, "bucket", damaged)
    yield


def _flip_last_byte(path: Path) -> None:
    with path.open("r+b") as file:
        file.seek(-1, 2)
        last = file.read(1)
        file.seek(-1, 2)
        file.write(bytes([last[0] ^ 1]))
