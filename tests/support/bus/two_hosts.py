"""A learner on two hosts in one process: its memories, a head relay, and that of part 1."""

import asyncio
import secrets
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec
from torch import Tensor

from slipstream.weightbus.config import WeightBusSection
from slipstream.weightbus.net.compatibility import installed_libraries
from slipstream.weightbus.net.curve import RemoteListener
from slipstream.weightbus.relay.deltas import Deltas
from slipstream.weightbus.relay.learner_parts import Parts
from slipstream.weightbus.relay.part import PartRelay
from slipstream.weightbus.relay.publisher import Publisher
from slipstream.weightbus.relay.served import Versions
from slipstream.weightbus.version.layout import part_layout, plan_layout
from slipstream.weightbus.version.shared_memory import SharedSlots
from slipstream.weightbus.version.slots import NUM_SLOTS
from slipstream.weightbus.version.snapshot import tensor_views
from slipstream.wire.messages.relay import OpenMemory, ServeHead
from slipstream.wire.messages.versions import PolicyVersion
from slipstream.wire.messages.weightbus import PublishRecord, RelayAddress
from tests.support.bus.remote import EPOCH, TENSORS, Bulk, client_key, running
from tests.support.bus.snapshots import tensor_spec
from tests.support.waiting import NEVER_S, until_async

ANY_PORT = "tcp://127.0.0.1:0"


class TwoHosts:
    """Tensors take turns between the hosts."""

    def __init__(self, folder: Path, bulk: Bulk = "encrypted") -> None:
        is_plain = bulk == "plain"
        settings = WeightBusSection(
            timeout_s=NEVER_S, receive_timeout_s=NEVER_S, member_silence_s=NEVER_S, bulk=bulk
        )
        self.folder = folder
        self.records: list[PublishRecord] = []
        self._tensors = {name: tensor.clone() for name, tensor in TENSORS.items()}
        layout = plan_layout(
            [tensor_spec(*item) for item in TENSORS.items()],
            bucket_bytes=max(tensor.nbytes for tensor in TENSORS.values()),
        )
        buckets = (msgspec.structs.replace(b, part=i % 2) for i, b in enumerate(layout.buckets))
        self._layout = msgspec.structs.replace(layout, buckets=tuple(buckets))
        self.num_buckets = len(self._layout.buckets)
        self.key = client_key("part-1")
        self.parts = parts = Parts(
            relay=secrets.token_hex(8), timeout_s=NEVER_S, hash_timeout_s=NEVER_S
        )
        self.heads = Versions(folder / "head", parts=parts, digests=settings.digest_kind)
        self.others = Versions(folder / "part", digests=settings.digest_kind)
        self._memories = [self._open(self.heads, 0), self._open(self.others, 1)]
        self.publisher = Publisher(
            settings, self.heads, on_record=self._keep, libraries=installed_libraries(), parts=parts
        )
        self.listener = RemoteListener(ANY_PORT, is_plain=is_plain)
        self.near = RelayAddress(
            endpoint=f"ipc://{folder}/bus", bulk_endpoint=f"ipc://{folder}/bulk"
        )
        deltas = WeightBusSection(timeout_s=2 * NEVER_S)
        self.deltas_of_part = Deltas(self.others, deltas, holds=False)
        self.part_listener = RemoteListener(ANY_PORT, is_plain=is_plain)
        self.part = PartRelay(
            1,
            self.others,
            self.part_listener,
            self.deltas_of_part,
            stop=asyncio.Event(),
            linger_s=NEVER_S,
        )

    async def _keep(self, record: PublishRecord) -> None:
        self.records.append(record)

    def _open(self, versions: Versions, part: int) -> SharedSlots:
        memory = SharedSlots.make(part_layout(self._layout, part), num_slots=NUM_SLOTS)
        keys = (self.key.public,) if part == 0 else ()
        versions.open(
            OpenMemory(
                epoch=EPOCH, paths=memory.paths, layout=self._layout, part=part, part_keys=keys
            )
        )
        return memory

    def publish(self, step: int) -> dict[str, Tensor]:
        """Publish a version of which one item of each tensor changed."""
        slot = self.heads.reserve(EPOCH)
        self.others.writing(EPOCH, slot)
        for tensor in self._tensors.values():
            tensor.view(-1)[step] = 1000.0 + step
        for part, memory in enumerate(self._memories):
            own = part_layout(self._layout, part)
            for name, view in tensor_views(own, memory.slot(slot)).items():
                view.copy_(self._tensors[name])
        for versions in (self.others, self.heads):
            versions.written(EPOCH, slot, PolicyVersion(EPOCH, step))
        return {name: tensor.clone() for name, tensor in self._tensors.items()}

    def show_head(self, head: RelayAddress) -> None:
        """Have the part report to a head."""
        self.part._found_head(
            ServeHead(epoch=EPOCH, head=head, public=self.key.public, secret=self.key.secret)
        )

    @asynccontextmanager
    async def running_head(self) -> AsyncIterator[RelayAddress]:
        """Run the head; yield its address."""
        async with running(self.publisher.run(self.near, self.listener)):
            await until_async(lambda: self.listener.address is not None)
            assert self.listener.address is not None
            yield self.listener.address

    @asynccontextmanager
    async def running_part(self) -> AsyncIterator[None]:
        """Run the part's relay."""
        async with running(self.part.run(f"ipc://{self.folder}/part")):
            yield
