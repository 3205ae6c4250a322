"""Stage 4: publishes from a CPU's memory into a real engine on the device, and a peer that dies."""

import asyncio
import os
import signal
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

from safetensors.torch import load_file
from torch import Tensor

from benchmarks.device.engines import device_name, engine_dtype, engine_of, has_cuda, write_model
from benchmarks.device.report import ON_A_CPU, Report, Skipped, run_stage
from slipstream.generators.engine import SamplingParams
from slipstream.generators.sglang.engine import SglangEngine
from slipstream.weightbus.agent.staging import Staging
from slipstream.weightbus.agent.subscriber import Subscriber
from slipstream.weightbus.agent.tensor_set import model_tensors
from slipstream.weightbus.config import WeightBusSection
from slipstream.weightbus.net.compatibility import installed_libraries
from slipstream.weightbus.relay.engine_checksums import Holder, differing, expected_checksums
from slipstream.weightbus.relay.publisher import Publisher
from slipstream.weightbus.relay.served import Versions
from slipstream.weightbus.relay.transports.collective import EngineGroup
from slipstream.weightbus.version.layout import plan_layout
from slipstream.weightbus.version.shared_memory import SharedSlots
from slipstream.weightbus.version.slots import NUM_SLOTS
from slipstream.weightbus.version.snapshot import tensor_spec, tensor_views
from slipstream.wire.errors import PublishError
from slipstream.wire.messages.relay import OpenMemory
from slipstream.wire.messages.versions import PolicyVersion
from slipstream.wire.messages.weightbus import Join, PublishRecord, RelayAddress

_TRANSPORTS = ("collective", "tcp", "disk")
_PUBLISHES = 4
_SHORT = SamplingParams(temperature=1.0, max_new_tokens=8)
_ABSENT_S = 10.0  # the timeout of a group whose peer never comes
_TIMEOUT_S = 60.0


class Bus:
    """A learner's memory, a publisher of it, and one engine that is subscribed to it."""

    def __init__(self, engine: SglangEngine, model: Path, folder: Path, transport: str) -> None:
        loaded = load_file(model / "model.safetensors")
        self.tensors = {name: tensor.to(engine_dtype()) for name, tensor in loaded.items()}
        self._epoch = 1 + _TRANSPORTS.index(transport)  # one engine, whose version never goes back
        self._records: asyncio.Queue[PublishRecord] = asyncio.Queue()
        libraries = installed_libraries()
        self._versions = Versions(folder / "weights")
        self.publisher = Publisher(
            WeightBusSection(timeout_s=_TIMEOUT_S, backend="gloo"),
            self._versions,
            on_record=self._records.put,
            libraries=libraries,
        )
        self.subscriber = Subscriber(
            engine,
            join=Join(
                name="generator-0",
                incarnation=transport,
                device=device_name(),
                torch_version=libraries.torch_version,
                nccl_version=libraries.nccl_version,
                transport=transport,
            ),
            tensors=model_tensors(model, dtype=str(engine_dtype()).removeprefix("torch.")),
            staging=Staging(folder, "generator-0"),
            silence_s=_TIMEOUT_S,
            fetch_timeout_s=_TIMEOUT_S,
            on_pause=lambda: None,
            on_adopt=lambda _version: None,
        )
        specs = [tensor_spec(*item) for item in self.tensors.items()]
        self._layout = plan_layout(specs, bucket_bytes=64 * 1024)
        size = self._layout.num_bytes
        self._memory = SharedSlots.make(slot_bytes=size, num_slots=NUM_SLOTS)
        self._versions.open(
            OpenMemory(
                epoch=self._epoch, path=self._memory.path, layout=self._layout, num_slots=NUM_SLOTS
            )
        )

    def version(self, step: int) -> PolicyVersion:
        return PolicyVersion(self._epoch, step)

    async def publish(self, step: int, tensors: dict[str, Tensor]) -> PublishRecord:
        """Publish a version and return the record of its first attempt."""
        slot = self._versions.reserve(self._epoch)
        for name, view in tensor_views(self._layout, self._memory.slot(slot)).items():
            view.copy_(tensors[name])
        self._versions.written(self._epoch, slot, self.version(step))
        while (record := await self._records.get()).version != self.version(step):
            pass
        return record


@asynccontextmanager
async def _running(
    engine: SglangEngine, model: Path, folder: Path, transport: str
) -> AsyncIterator[Bus]:
    folder.mkdir()  # noqa: ASYNC240 before anything runs
    bus = Bus(engine, model, folder, transport)
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


def work(report: Report, _out: Path) -> None:
    with tempfile.TemporaryDirectory(prefix="sp-", dir="/tmp") as name:
        asyncio.run(_publish(report, Path(name)))
    with report.part("nccl with an absent peer"):
        if not has_cuda():
            raise Skipped(ON_A_CPU)
        _absent_peer(report)
    report.skip("bytes over nccl", "NCCL takes no two ranks on one GPU: it needs two GPUs")


async def _publish(report: Report, folder: Path) -> None:
    model = write_model(folder / "model", seed=3)
    async with engine_of(model, folder, "bus", start_s=max(1.0, report.left_s)) as started:
        process, engine = started
        for transport in _TRANSPORTS:
            with report.part(transport):
                async with (
                    asyncio.timeout(report.left_s),
                    _running(engine, model, folder / transport, transport) as bus,
                ):
                    await _versions(report, bus, engine, transport)
        with report.part("an engine that is killed"):
            async with (
                asyncio.timeout(report.left_s),
                _running(engine, model, folder / "killed", "tcp") as bus,
            ):
                await bus.publish(_PUBLISHES + 1, bus.tensors)
                began_s = time.monotonic()
                os.kill(process.process.pid, signal.SIGKILL)
                record = await bus.publish(_PUBLISHES + 2, bus.tensors)
                report.fact("seconds until an engine is missed", time.monotonic() - began_s)
                report.holds("a killed engine is left out", "generator-0" in record.failed)


async def _versions(report: Report, bus: Bus, engine: SglangEngine, transport: str) -> None:
    seconds = []
    for step in range(_PUBLISHES):
        moved = {name: tensor + 0.01 * step for name, tensor in bus.tensors.items()}
        record = await bus.publish(step, moved)
        report.holds(f"{transport} publish {step} is adopted", record.adopted_by)
        if record.failed:
            raise RuntimeError(f"{transport} publish {step}: {record.failed}")
        seconds += record.adopted_by.values()
    report.fact(f"{transport} went by", record.transports)
    report.fact(f"{transport} seconds", [round(one, 3) for one in seconds])
    report.fact(f"{transport} phases of the last", record.phase_seconds)
    wanted = expected_checksums(moved, Holder(device_name()))
    report.holds(f"{transport} checksums are ours", not differing(wanted, await engine.checksums()))
    (answer,) = await engine.sample([3, 4, 13], _SHORT, count=1)
    labelled = answer.version_starts == [(0, bus.version(_PUBLISHES - 1))]
    report.holds(f"{transport} answers name the version", labelled)


def _absent_peer(report: Report) -> None:
    """Measure how long a group of two holds a relay up whose engine never comes."""
    group = EngineGroup("absent", host="127.0.0.1", world_size=2, timeout_s=_ABSENT_S)
    began_s = time.monotonic()
    try:
        group.join("nccl")
        report.holds("an absent peer is noticed", is_so=False)
    except PublishError as error:
        report.fact("absent peer", str(error))
    took_s = time.monotonic() - began_s
    report.at_most("seconds until an absent peer is given up", took_s, "s", needs=3 * _ABSENT_S)
    began_s = time.monotonic()
    group.close()
    report.at_most("seconds to leave its group", time.monotonic() - began_s, "s", needs=_ABSENT_S)


if __name__ == "__main__":
    run_stage("bus", work)
