"""Stage 4: publishes from a CPU's memory into a real engine on the device, and a peer that dies."""

import asyncio
import itertools
import os
import signal
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

from benchmarks.device.engines import device_name, engine_dtype, engine_of, has_cuda, write_model
from benchmarks.device.report import ON_A_CPU, Report, Skipped, run_stage
from benchmarks.device.sources import TIMEOUT_S, Source, door_of
from slipstream.generators.engine import SamplingParams
from slipstream.generators.sglang.engine import SglangEngine
from slipstream.weightbus.agent.staging import Staging
from slipstream.weightbus.agent.subscriber import Subscriber
from slipstream.weightbus.agent.tensor_set import model_tensors
from slipstream.weightbus.net.compatibility import installed_libraries
from slipstream.weightbus.relay.transports.collective import EngineGroup
from slipstream.weightbus.version.engine_checksums import (
    EngineLayout,
    differing,
    expected_checksums,
)
from slipstream.wire.errors import PublishError
from slipstream.wire.messages.weightbus import Join

_TRANSPORTS = ("collective", "tcp", "disk")
_PUBLISHES = 4
_SHORT = SamplingParams(temperature=1.0, max_new_tokens=8)
_ABSENT_S = 10.0  # the timeout of a group whose peer never comes


class Bus(Source):
    """A learner's memory, a publisher of it, and one engine that is subscribed to it."""

    def __init__(
        self, engine: SglangEngine, model: Path, folder: Path, transport: str, epoch: int
    ) -> None:
        super().__init__(model, folder, epoch)
        libraries = installed_libraries()
        self.subscriber = Subscriber(
            engine,
            join=Join(
                name="generator-0",
                incarnation=f"{transport}-{epoch}",
                device=device_name(),
                torch_version=libraries.torch_version,
                nccl_version=libraries.nccl_version,
                transport=transport,
            ),
            tensors=model_tensors(model, dtype=str(engine_dtype()).removeprefix("torch.")),
            staging=Staging(folder, "generator-0"),
            silence_s=TIMEOUT_S,
            fetch_timeout_s=TIMEOUT_S,
            on_pause=lambda: None,
            on_adopt=lambda _version, _stood_s: None,
        )


@asynccontextmanager
async def _served(bus: Bus, folder: Path, *, relay: list[str] | None = None) -> AsyncIterator[None]:
    """Run a bus; with the command of a relay, that one first, until it has ended."""
    door = door_of(folder)
    tasks = [asyncio.create_task(bus.subscriber.run(door))]
    try:
        if relay:
            first = await asyncio.create_subprocess_exec(*relay)
            try:
                await first.wait()
            finally:
                with suppress(ProcessLookupError):
                    first.kill()
            if first.returncode != -signal.SIGKILL:
                raise RuntimeError(f"the relay ended with {first.returncode}")
        tasks.append(asyncio.create_task(bus.publisher.run(door)))
        yield
    finally:
        for task in tasks:
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
        epochs = itertools.count(
            2, 2
        )  # a relay before it may have the one below; one engine, whose version never goes back

        def bus_in(part: Path, transport: str) -> Bus:
            part.mkdir()
            return Bus(engine, model, part, transport, next(epochs))

        for transport in _TRANSPORTS:
            with report.part(transport):
                bus = bus_in(folder / transport, transport)
                async with asyncio.timeout(report.left_s), _served(bus, folder / transport):
                    await _versions(report, bus, engine, transport)
        with report.part("a relay that is killed amid a version"):
            await _dying_relay(report, bus_in(folder / "relay", "collective"), model, engine)
        with report.part("an engine that is killed"):
            bus = bus_in(folder / "killed", "tcp")
            async with asyncio.timeout(report.left_s), _served(bus, folder / "killed"):
                await bus.publish(1, bus.tensors)
                began_s = time.monotonic()
                os.kill(process.process.pid, signal.SIGKILL)
                record = await bus.publish(2, bus.tensors)
                report.fact("seconds until an engine is missed", time.monotonic() - began_s)
                report.holds("a killed engine is left out", "generator-0" in record.failed)


async def _dying_relay(report: Report, bus: Bus, model: Path, engine: SglangEngine) -> None:
    """Kill a relay with a bucket on its way; the next one must repair the engine."""
    folder = model.parent / "relay"
    relay = [
        *(sys.executable, "-m", "benchmarks.device.dying_relay"),
        *(str(model), str(folder), str(bus.epoch - 1)),
    ]
    async with asyncio.timeout(report.left_s), _served(bus, folder, relay=relay):
        began_s = time.monotonic()
        moved = {name: tensor + 0.5 for name, tensor in bus.tensors.items()}
        record = await bus.publish(1, moved)
        while record.failed:
            report.fact("a try after a killed relay", record.failed)
            record = await bus.next_record(1)
        report.fact("seconds until an engine is repaired", time.monotonic() - began_s)
        report.holds("the engine of a killed relay is repaired", record.adopted_by)
        wanted = expected_checksums(moved, EngineLayout(device_name()))
        report.holds("it holds our bytes", not differing(wanted, await engine.checksums()))


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
    wanted = expected_checksums(moved, EngineLayout(device_name()))
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
