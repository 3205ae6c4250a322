"""The learner's side of a weight bus, as the stages of buses need it."""

import asyncio
from pathlib import Path

from safetensors.torch import load_file
from torch import Tensor

from benchmarks.device.engines import engine_dtype
from slipstream.weightbus.config import WeightBusSection
from slipstream.weightbus.net.compatibility import installed_libraries
from slipstream.weightbus.relay.publisher import Publisher
from slipstream.weightbus.relay.served import Versions
from slipstream.weightbus.version.layout import plan_layout
from slipstream.weightbus.version.shared_memory import SharedSlots
from slipstream.weightbus.version.slots import NUM_SLOTS
from slipstream.weightbus.version.snapshot import tensor_views
from slipstream.wire.messages.relay import OpenMemory
from slipstream.wire.messages.versions import PolicyVersion
from slipstream.wire.messages.weightbus import PublishRecord, RelayAddress
from tests.support.bus.snapshots import tensor_spec

TIMEOUT_S = 60.0


def door_of(folder: Path) -> RelayAddress:
    """Return where the relay of a folder listens."""
    return RelayAddress(endpoint=f"ipc://{folder}/bus", bulk_endpoint=f"ipc://{folder}/bulk")


class Source:
    """A learner's memory and a publisher of it."""

    def __init__(self, model: Path, folder: Path, epoch: int) -> None:
        loaded = load_file(model / "model.safetensors")
        self.tensors = {name: tensor.to(engine_dtype()) for name, tensor in loaded.items()}
        self.epoch = epoch
        self._records: asyncio.Queue[PublishRecord] = asyncio.Queue()
        self._versions = Versions(folder / "weights")
        self.publisher = Publisher(
            WeightBusSection(timeout_s=TIMEOUT_S, backend="gloo"),
            self._versions,
            on_record=self._records.put,
            libraries=installed_libraries(),
        )
        specs = [tensor_spec(*item) for item in self.tensors.items()]
        self._layout = plan_layout(specs, bucket_bytes=64 * 1024)
        self._memory = SharedSlots.make(self._layout, num_slots=NUM_SLOTS)
        self._versions.open(OpenMemory(epoch=epoch, paths=self._memory.paths, layout=self._layout))

    def version(self, step: int) -> PolicyVersion:
        return PolicyVersion(self.epoch, step)

    async def publish(self, step: int, tensors: dict[str, Tensor]) -> PublishRecord:
        """Publish a version and return the record of its first attempt."""
        slot = self._versions.reserve(self.epoch)
        with self._memory.writing(slot, self.version(step)) as memory:
            for name, view in tensor_views(self._layout, memory).items():
                view.copy_(tensors[name])
        self._versions.written(self.epoch, slot, self.version(step))
        return await self.next_record(step)

    async def next_record(self, step: int) -> PublishRecord:
        """Wait for the next record of a version."""
        while (record := await self._records.get()).version != self.version(step):
            pass
        return record
