"""Publishes into a real SGLang: control calls, end to end, and what generation loses."""

import asyncio
import functools
import json
import mmap
import os
import statistics
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from typing_extensions import override

from benchmarks.weightbus.figures import loss_beyond_pause, pause_s
from benchmarks.weightbus.light_bus import copy_checked
from benchmarks.weightbus.model import BUCKET_BYTES, Sizes
from benchmarks.weightbus.predicted import Parts, timed
from slipstream.generators.config import generator_settings
from slipstream.generators.engine import SamplingParams
from slipstream.generators.sglang.engine import SglangEngine
from slipstream.generators.sglang.process import SglangProcess
from slipstream.learner.batches.probe_sequences import probe_sequences
from slipstream.weightbus.agent.staging import Staging
from slipstream.weightbus.agent.subscriber import Subscriber
from slipstream.weightbus.agent.tensor_set import model_tensors
from slipstream.weightbus.config import WeightBusSection
from slipstream.weightbus.net.compatibility import installed_libraries
from slipstream.weightbus.relay.member import Member
from slipstream.weightbus.relay.publisher import Publisher
from slipstream.weightbus.relay.served import Versions
from slipstream.weightbus.version.layout import plan_layout
from slipstream.weightbus.version.shared_memory import SharedSlots
from slipstream.weightbus.version.slots import NUM_SLOTS
from slipstream.weightbus.version.snapshot import tensor_views
from slipstream.wire.messages.relay import OpenMemory
from slipstream.wire.messages.versions import PolicyVersion
from slipstream.wire.messages.weightbus import (
    BusMessage,
    CommandOutcome,
    Join,
    Offer,
    PublishRecord,
    RelayAddress,
)
from tests.support.blank_model import write_blank_model
from tests.support.bus.snapshots import tensor_spec
from tests.support.random_llama import write_random_weights

TRANSPORTS: tuple[str, ...] = ("collective", "tcp", "mapped", "disk")
"""Ways to an engine; mapped is tcp on the learner's host, as it is in runs."""
_LONGEST_S = 120.0


class CountingEngine(SglangEngine):
    """Counts its control calls."""

    num_calls = 0

    @override
    async def _control(
        self, path: str, body: dict[str, Any], limit: aiohttp.ClientTimeout | None = None
    ) -> dict[str, Any]:
        self.num_calls += 1
        return await super()._control(path, body, limit)


@dataclass(frozen=True, slots=True)
class Server:
    """A real server, and the folder of its model."""

    process: SglangProcess
    model: Path
    dtype: str


@contextmanager
def sglang(sizes: Sizes | None = None, *, shadow: bool = True) -> Iterator[Server]:
    """Yield a server of a tiny policy in float32, or of one of some size in bfloat16."""
    dtype = "float32" if sizes is None else "bfloat16"
    with tempfile.TemporaryDirectory(prefix="bw-", dir="/tmp") as name:
        model = Path(name) / "model"
        write_blank_model(model, hidden=64, layers=2)
        if sizes is not None:
            config = model / "config.json"
            written = json.loads(config.read_text()) | sizes.config() | {"torch_dtype": dtype}
            config.write_text(json.dumps(written))
        write_random_weights(model, scale=0.15 if sizes is None else 0.02, seed=3)
        settings = generator_settings(
            {
                "run": {"name": "p", "dir": name, "model": str(model)},
                "sampling": {"max_prompt_tokens": 16, "max_response_tokens": 440},
                "generators": {
                    "device": "cpu",
                    "dtype": dtype,
                    "max_cached_tokens": 8192,
                    "count": 1,
                    "shadow": shadow,
                },
            }
        )
        process = SglangProcess.start(settings, "generator-0")
        try:
            asyncio.run(process.until_ready(_LONGEST_S))
            yield Server(process, model, dtype)
        finally:
            process.stop()


class ServedBus:
    """A learner's memory, a publisher and the agent of one server, in this event loop."""

    def __init__(self, server: Server, folder: Path, transport: str, epoch: int) -> None:
        process = server.process
        self.engine = CountingEngine(
            process.url, process.api_key, request_timeout_s=60, control_timeout_s=60
        )
        dtype = getattr(torch, server.dtype)
        loaded = load_file(server.model / "model.safetensors")
        self.tensors = {name: tensor.to(dtype) for name, tensor in loaded.items()}
        specs = [tensor_spec(*item) for item in self.tensors.items()]
        self.layout = plan_layout(specs, bucket_bytes=BUCKET_BYTES)
        self._epoch, self._step = epoch, -1
        self._is_in_sight = transport == "mapped"
        self._memory = SharedSlots.make(self.layout, num_slots=NUM_SLOTS)
        self.records: asyncio.Queue[PublishRecord] = asyncio.Queue(64)
        self._versions = Versions(folder / "weights")
        self._versions.open(
            OpenMemory(epoch=self._epoch, paths=self._memory.paths, layout=self.layout)
        )
        libraries = installed_libraries()
        self.publisher = Publisher(
            WeightBusSection(timeout_s=60),
            self._versions,
            on_record=self.records.put,
            libraries=libraries,
        )
        self.subscriber = Subscriber(
            self.engine,
            join=Join(
                name="generator-0",
                incarnation="a",
                device="cpu",
                torch_version=libraries.torch_version,
                transport="tcp" if transport == "mapped" else transport,
            ),
            tensors=model_tensors(server.model, dtype=server.dtype),
            staging=Staging(folder, "generator-0"),
            silence_s=30,
            fetch_timeout_s=30,
            on_pause=lambda: None,
            on_adopt=lambda _version, _stood_s: None,
        )

    async def publish(self) -> tuple[float, PublishRecord]:
        """Publish once more; return seconds from the reserve to committed, and the record."""
        self._step += 1
        began_s = time.monotonic()
        slot, version = self._versions.reserve(self._epoch), PolicyVersion(self._epoch, self._step)
        with self._memory.writing(slot, version) as memory:
            views = tensor_views(self.layout, memory)
            await asyncio.to_thread(copy_checked, self.tensors, views)
        self._versions.written(self._epoch, slot, version)
        if not self._is_in_sight and (publication := self._versions.find(version)) is not None:
            publication.path = ""
        while True:
            record = await asyncio.wait_for(self.records.get(), _LONGEST_S)
            if record.failed:
                raise RuntimeError(f"a publish failed: {record.failed}")
            if record.version.step == self._step:
                return time.monotonic() - began_s, record

    def close(self) -> None:
        self._memory.close()


@asynccontextmanager
async def served_bus(server: Server, transport: str, epoch: int) -> AsyncIterator[ServedBus]:
    with tempfile.TemporaryDirectory(prefix="bw-", dir="/tmp") as name:
        bus = ServedBus(server, Path(name), transport, epoch)
        door = RelayAddress(endpoint=f"ipc://{name}/bus", bulk_endpoint=f"ipc://{name}/bulk")
        tasks = [
            asyncio.create_task(bus.publisher.run(door)),
            asyncio.create_task(bus.subscriber.run(door)),
        ]
        try:
            await bus.publish()  # alone, over TCP or from disk
            await bus.publish()  # this one makes the group
            yield bus
        finally:
            for task in reversed(tasks):
                task.cancel()
                with suppress(asyncio.CancelledError):
                    await task
            await bus.engine.close()
            bus.close()


# ---- control -------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ControlFigures:
    """Calls of one publish, and seconds of one that does nothing."""

    commands: int
    calls: int
    command_s: float
    call_s: float  # to SGLang's HTTP server, answered there
    scheduler_call_s: float  # passed on to its scheduler

    @property
    def seconds(self) -> float:
        """What a publish costs if every call only waits for an answer."""
        return self.commands * self.command_s + self.calls * self.scheduler_call_s


async def _control(server: Server, rounds: int) -> ControlFigures:
    async with served_bus(server, "collective", 1) as bus:
        sent: list[None] = []
        send = Member.send

        def counted(
            member: Member, command: Callable[[int], BusMessage]
        ) -> "asyncio.Future[CommandOutcome]":
            sent.append(None)
            return send(member, command)

        calls_before = bus.engine.num_calls
        Member.send = counted  # type: ignore[method-assign]
        try:
            _, record = await bus.publish()
        finally:
            Member.send = send  # type: ignore[method-assign]
        calls = bus.engine.num_calls - calls_before
        (member,) = bus.publisher._members.values()
        manifest = msgspec.structs.replace(bus.layout, version=record.version)

        async def command() -> None:
            await member.request(lambda n: Offer(command_id=n, manifest=manifest))

        async def call() -> None:
            async with bus.engine._http.get(f"{bus.engine._url}/model_info") as answer:
                await answer.read()

        return ControlFigures(
            commands=len(sent),
            calls=calls,
            command_s=await _median_s(command, rounds),
            call_s=await _median_s(call, rounds),
            scheduler_call_s=await _median_s(bus.engine.resume, rounds),
        )


async def _median_s(what: Callable[[], Coroutine[Any, Any, None]], rounds: int) -> float:
    spent = []
    for _ in range(rounds):
        began_s = time.monotonic()
        await what()
        spent.append(time.monotonic() - began_s)
    return statistics.median(spent)


def measure_control(server: Server, *, rounds: int) -> ControlFigures:
    """Count the messages of one publish over a collective, and time what does nothing."""
    return asyncio.run(_control(server, rounds))


# ---- the probe -----------------------------------------------------------------


def measure_probe(server: Server, *, rounds: int) -> list[float]:
    """Return the seconds that an engine without other work takes for the probe of a version.

    A probe has the default size, and other tokens each time: none of it is in the prefix cache.
    """
    return asyncio.run(_probe(server, rounds))


async def _probe(server: Server, rounds: int) -> list[float]:
    bus = WeightBusSection()
    vocabulary = json.loads((server.model / "config.json").read_bytes())["vocab_size"]
    engine = SglangEngine(
        server.process.url, server.process.api_key, request_timeout_s=60, control_timeout_s=60
    )
    spent = []
    try:
        for number in range(rounds + 1):
            sequences = probe_sequences(
                str(number),
                vocab_size=vocabulary,
                count=bus.probe_sequences,
                length=bus.probe_tokens,
            )
            began_s = time.monotonic()
            await engine.score(sequences, num_context=bus.probe_tokens // 2)
            spent.append(time.monotonic() - began_s)
    finally:
        await engine.close()
    return spent[1:]  # the first makes connections


# ---- standing still -------------------------------------------------------------


@dataclass(slots=True)
class StandstillFigures:
    """Seconds by publish."""

    num_bytes: int = 0
    stood: list[float] = field(default_factory=list)  # engine's pause
    arrived: list[float] = field(default_factory=list)  # from the reserve until it runs it
    memcpy: list[float] = field(default_factory=list)  # one copy of the version, warm


def measure_standstill(server: Server, *, rounds: int) -> StandstillFigures:
    """Publish to an engine of this host, with a plain copy of the same tensors in between."""
    return asyncio.run(_standstill(server, rounds))


async def _standstill(server: Server, rounds: int) -> StandstillFigures:
    figures = StandstillFigures()
    async with served_bus(server, "mapped", 1) as bus:
        figures.num_bytes = bus.layout.num_bytes
        target = {name: torch.empty_like(tensor) for name, tensor in bus.tensors.items()}

        def copy() -> None:
            for name, tensor in bus.tensors.items():
                target[name].copy_(tensor)

        copy()  # touches the memory
        for _ in range(rounds):
            seconds, record = await bus.publish()
            figures.arrived.append(seconds)
            figures.stood.append(pause_s(record.phase_seconds))
            figures.memcpy.append(timed(copy))
    return figures


# ---- end to end ----------------------------------------------------------------


@dataclass(slots=True)
class EndToEnd:
    """Seconds from the learner's reserve to committed, by transport, beside plain ways."""

    num_bytes: int = 0
    seconds: dict[str, list[float]] = field(default_factory=dict)
    phases: dict[str, dict[str, float]] = field(default_factory=dict)


def measure_end_to_end(server: Server, *, rounds: int, epoch: int) -> EndToEnd:
    """Publish over each transport, and move the same bytes in plain ways in between."""
    figures = EndToEnd()
    for number, transport in enumerate(TRANSPORTS):
        asyncio.run(_end_to_end(server, transport, rounds, epoch + number, figures))
    return figures


async def _end_to_end(
    server: Server, transport: str, rounds: int, epoch: int, figures: EndToEnd
) -> None:
    async with served_bus(server, transport, epoch) as bus:
        figures.num_bytes = bus.layout.num_bytes
        records = []
        parts = Parts(bus.tensors)
        ways = parts.ways | {
            "shared memory": lambda: _memory_copy(bus.tensors),
            "safetensors": lambda: _save_and_load(bus.tensors),
        }
        for _ in range(rounds):
            seconds, record = await bus.publish()
            figures.seconds.setdefault(transport, []).append(seconds)
            records.append(record)
            for name, way in ways.items():
                spent = await asyncio.to_thread(timed, way)
                figures.seconds.setdefault(name, []).append(spent)
        parts.close()
        figures.phases[transport] = {
            phase: statistics.median(record.phase_seconds[phase] for record in records)
            for phase in records[0].phase_seconds
        }


@functools.cache
def _copy_target(num_bytes: int) -> Tensor:
    descriptor = os.memfd_create("bench")
    os.ftruncate(descriptor, num_bytes)
    mapped = mmap.mmap(descriptor, num_bytes)
    os.close(descriptor)
    return torch.frombuffer(mapped, dtype=torch.uint8)


def _memory_copy(tensors: dict[str, Tensor]) -> None:
    """Copy into a memory without a name, and back."""
    memory = _copy_target(sum(tensor.nbytes for tensor in tensors.values()))
    for into in (True, False):
        at = 0
        for tensor in tensors.values():
            flat = tensor.view(-1).view(torch.uint8)
            shared = memory[at : at + len(flat)]
            at += len(flat)
            _ = shared.copy_(flat) if into else flat.copy_(shared)


def _save_and_load(tensors: dict[str, Tensor]) -> None:
    with tempfile.TemporaryDirectory(prefix="bw-") as name:
        file = Path(name) / "model.safetensors"
        save_file(tensors, file)
        copies = {name: tensor.clone() for name, tensor in load_file(file).items()}
    del copies


# ---- what generation loses -----------------------------------------------------


@dataclass(slots=True)
class LossFigures:
    """Tokens per second of each window, and the share of it in which the engine was paused."""

    alone: list[float] = field(default_factory=list)
    published: list[float] = field(default_factory=list)
    pause_shares: list[float] = field(default_factory=list)

    @property
    def losses(self) -> list[float]:
        """Loss beyond the pause, of each pair of windows side by side."""
        rows = zip(self.alone, self.published, self.pause_shares, strict=True)
        return [
            loss_beyond_pause(rate=rate, rate_alone=alone, pause_share=share)
            for alone, rate, share in rows
        ]

    @property
    def noise(self) -> float:
        """How far windows without a publish lie apart, as a share of their median."""
        return (max(self.alone) - min(self.alone)) / statistics.median(self.alone)


def measure_loss(
    server: Server, *, windows: int, window_s: float, every_s: float, epoch: int
) -> LossFigures:
    """Generate under constant load, in turns with and without a publish every so many seconds."""
    return asyncio.run(_loss(server, windows, window_s, every_s, epoch))


async def _loss(
    server: Server, windows: int, window_s: float, every_s: float, epoch: int
) -> LossFigures:
    figures = LossFigures()
    async with served_bus(server, "collective", epoch) as bus:
        tokens = [0]
        load = [asyncio.create_task(_load(bus.engine, tokens, n)) for n in range(8)]
        try:
            await asyncio.sleep(min(3.0, window_s))
            for number in range(2 * windows):
                publishes = (number % 2 == 1) != (number // 2 % 2 == 1)  # ABBA against drift
                began_s, before, paused_s = time.monotonic(), tokens[0], 0.0
                while (left_s := began_s + window_s - time.monotonic()) > 0:
                    next_s = time.monotonic() + every_s
                    if publishes and left_s > every_s / 2:
                        _, record = await bus.publish()
                        paused_s += pause_s(record.phase_seconds)
                    left_s = min(next_s, began_s + window_s) - time.monotonic()
                    await asyncio.sleep(max(0.0, left_s))
                    if any(task.done() for task in load):
                        await asyncio.gather(*load)
                seconds = time.monotonic() - began_s
                rate = (tokens[0] - before) / seconds
                (figures.published if publishes else figures.alone).append(rate)
                if publishes:
                    figures.pause_shares.append(paused_s / seconds)
        finally:
            for task in load:
                task.cancel()
            await asyncio.gather(*load, return_exceptions=True)
    return figures


async def _load(engine: SglangEngine, tokens: list[int], number: int) -> None:
    """Keep one request in flight for ever; lengths differ, so that none end together."""
    length = 40 + 5 * number
    params = SamplingParams(temperature=1.0, max_new_tokens=length, min_new_tokens=length)
    while True:
        for completion in await engine.sample([3, 4, 13], params, count=1):
            tokens[0] += len(completion.token_ids)
