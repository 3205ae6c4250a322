"""A learner's memory and a publisher of it, and a subscriber with an engine, in one process."""

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any, Literal

from torch import Tensor

from slipstream.weightbus.agent.engine import EngineWeights
from slipstream.weightbus.agent.staging import Staging
from slipstream.weightbus.agent.subscriber import Subscriber
from slipstream.weightbus.agent.tensor_set import TensorSet
from slipstream.weightbus.agent.updates import EngineUpdates
from slipstream.weightbus.config import WeightBusSection
from slipstream.weightbus.net.compatibility import installed_libraries
from slipstream.weightbus.relay.publisher import Publisher
from slipstream.weightbus.relay.served import Versions
from slipstream.weightbus.transports import TRANSPORTS, TransportEntry
from slipstream.weightbus.version.layout import plan_layout
from slipstream.weightbus.version.shared_memory import SharedSlots
from slipstream.weightbus.version.slots import NUM_SLOTS
from slipstream.weightbus.version.snapshot import tensor_views
from slipstream.wire.messages.probe import ProbeLogprobs
from slipstream.wire.messages.relay import OpenMemory
from slipstream.wire.messages.versions import PolicyVersion
from slipstream.wire.messages.weightbus import Join, PublishRecord, RelayAddress
from tests.support.bus.snapshots import tensor_spec
from tests.support.waiting import HANG_S, NEVER_S


class Published:
    """A learner's memory and a publisher of it, of which no deadline runs out."""

    def __init__(
        self,
        folder: Path,
        tensors: Mapping[str, Tensor],
        /,
        *,
        bucket_bytes: int,
        epoch: int = 1,
        is_in_sight: bool = True,
        transports: Mapping[str, TransportEntry] = TRANSPORTS,
        **settings: Any,  # noqa: ANN401 as WeightBusSection
    ) -> None:
        """Begin an epoch with tensors of these shapes, and ``settings`` of [weightbus].

        Engines fetch versions if the memory is not ``is_in_sight`` for them.
        """
        self._is_in_sight = is_in_sight
        section = WeightBusSection(
            timeout_s=NEVER_S, receive_timeout_s=NEVER_S, member_silence_s=NEVER_S, **settings
        )
        self._bucket_bytes = bucket_bytes
        self._records: asyncio.Queue[PublishRecord] = asyncio.Queue()
        self.versions = Versions(folder / f"weights-{epoch}", digests=section.digest_kind)
        self.publisher = Publisher(
            section,
            self.versions,
            on_record=self.keep,
            libraries=installed_libraries(),
            transports=transports,
        )
        at = f"ipc://{folder}/{epoch}"
        self.near = RelayAddress(endpoint=f"{at}-bus", bulk_endpoint=f"{at}-bulk")
        self.open_memory(tensors, epoch)

    async def keep(self, record: PublishRecord) -> None:
        await self._records.put(record)

    def open_memory(self, tensors: Mapping[str, Tensor], epoch: int) -> None:
        """Begin an epoch: a learner, or one that took over."""
        self.epoch = epoch
        specs = [tensor_spec(*item) for item in tensors.items()]
        self._layout = plan_layout(specs, bucket_bytes=self._bucket_bytes)
        self._memory = SharedSlots.make(self._layout, num_slots=NUM_SLOTS)
        self.versions.open(OpenMemory(epoch=epoch, paths=self._memory.paths, layout=self._layout))

    def write(
        self, step: int, tensors: Mapping[str, Tensor], probe: ProbeLogprobs | None = None
    ) -> PolicyVersion:
        version, slot = PolicyVersion(self.epoch, step), self.versions.reserve(self.epoch)
        with self._memory.writing(slot, version) as memory:
            for name, view in tensor_views(self._layout, memory).items():
                view.copy_(tensors[name])
        self.versions.written(self.epoch, slot, version, probe)
        if not self._is_in_sight and (publication := self.versions.find(version)) is not None:
            publication.path = "/proc/0/fd/0"
        return version

    async def record_of(self, version: PolicyVersion) -> PublishRecord:
        """Return the record of the next attempt to publish a version."""
        while True:
            record = await asyncio.wait_for(self._records.get(), HANG_S)  # noqa: TID251 cancelled by nobody
            if record.version == version:
                return record

    @asynccontextmanager
    async def running(self, subscriber: Subscriber) -> AsyncIterator[None]:
        """Run the publisher and a subscriber to it."""
        jobs = (self.publisher.run(self.near), subscriber.run(self.near))
        tasks: list[asyncio.Task[Any]] = [asyncio.create_task(job) for job in jobs]
        try:
            yield
        finally:
            for task in reversed(tasks):
                task.cancel()
                with suppress(asyncio.CancelledError):
                    await task


def subscriber_of(
    engine: Any,  # noqa: ANN401 as Subscriber
    tensors: TensorSet,
    staging: Staging,
    *,
    name: str = "generator-0",
    transport: str,
    num_ranks: int = 1,
    host: str = "",
    device: Literal["cpu", "cuda"] = "cpu",
    **others: Any,  # noqa: ANN401 as Subscriber
) -> Subscriber:
    """Return the subscriber of an engine, without a deadline unless ``others`` give it one."""
    usual = {
        "silence_s": NEVER_S,
        "fetch_timeout_s": NEVER_S,
        "on_pause": lambda: None,
        "on_adopt": lambda _version, _stood_s: None,
    }
    join = Join(
        name=name,
        incarnation="a",
        device=device,
        torch_version=installed_libraries().torch_version,
        num_ranks=num_ranks,
        transport=transport,
        host=host,
    )
    return Subscriber(engine, join=join, tensors=tensors, staging=staging, **usual | others)


def updates_of(
    engine: EngineWeights, tensors: Mapping[str, Tensor], staging: Staging
) -> EngineUpdates:
    """Return the publishes of an engine with these tensors in float32, which tells nobody."""
    return EngineUpdates(
        engine,
        tensors=TensorSet({name: tuple(t.shape) for name, t in tensors.items()}, "float32"),
        staging=staging,
        on_pause=lambda: None,
        on_adopt=lambda _version, _stood_s: None,
    )
