"""Deltas from the relays of a learner on two hosts: each has the steps of its own buckets."""

import asyncio
import secrets
import tempfile
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
import torch
from torch import Tensor

from slipstream.weightbus.agent.staging import Staging
from slipstream.weightbus.config import WeightBusSection
from slipstream.weightbus.net.compatibility import installed_libraries
from slipstream.weightbus.net.curve import RemoteListener
from slipstream.weightbus.relay.deltas import Deltas
from slipstream.weightbus.relay.part import PartRelay
from slipstream.weightbus.relay.parts import Parts
from slipstream.weightbus.relay.publisher import Publisher
from slipstream.weightbus.relay.served import Versions
from slipstream.weightbus.version.layout import part_layout, plan_layout
from slipstream.weightbus.version.shared_memory import SharedSlots
from slipstream.weightbus.version.slots import NUM_SLOTS
from slipstream.weightbus.version.snapshot import tensor_spec, tensor_views
from slipstream.wire.messages.relay import OpenMemory, ServeHead
from slipstream.wire.messages.versions import PolicyVersion
from slipstream.wire.messages.weightbus import PublishRecord, RelayAddress
from tests.support.bus.remote import EPOCH, TENSORS, Bulk, agent, client_key, running
from tests.support.waiting import NEVER_S, until_async

pytestmark = pytest.mark.integration
SIZE = sum(tensor.nbytes for tensor in TENSORS.values())
ANY_PORT = "tcp://127.0.0.1:0"


@pytest.fixture
def folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="sp-", dir="/tmp") as name:
        yield Path(name)


class Learner:
    """Memory on two hosts, a head relay and that of part 1; tensors take turns between them."""

    def __init__(self, folder: Path, bulk: Bulk) -> None:
        is_plain = bulk == "plain"
        settings = WeightBusSection(
            timeout_s=NEVER_S, receive_timeout_s=NEVER_S, member_silence_s=NEVER_S, bulk=bulk
        )
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
        parts = Parts(relay=secrets.token_hex(8), timeout_s=NEVER_S)
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
        self.deltas_of_part = Deltas(
            self.others, most_steps=8, most_bytes=1 << 20, wait_s=NEVER_S, holds=False
        )
        self.part = PartRelay(
            1,
            self.others,
            RemoteListener(ANY_PORT, is_plain=is_plain),
            self.deltas_of_part,
            stop=asyncio.Event(),
            linger_s=NEVER_S,
        )

    async def _keep(self, record: PublishRecord) -> None:
        self.records.append(record)

    def _open(self, versions: Versions, part: int) -> SharedSlots:
        size = part_layout(self._layout, part).num_bytes
        memory = SharedSlots.make(slot_bytes=size, num_slots=NUM_SLOTS)
        keys = (self.key.public,) if part == 0 else ()
        versions.open(
            OpenMemory(
                epoch=EPOCH,
                path=memory.path,
                layout=self._layout,
                num_slots=NUM_SLOTS,
                part=part,
                part_keys=keys,
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


@pytest.mark.parametrize("bulk", ["encrypted", "plain"])
def test_every_part_sends_what_changed_in_its_buckets(folder: Path, bulk: Bulk):
    async def scenario() -> None:
        learner = Learner(folder, bulk)
        async with (
            running(learner.publisher.run(learner.near, learner.listener)),
            running(learner.part.run(f"ipc://{folder}/part")),
        ):
            await until_async(lambda: learner.listener.address is not None)
            head, key = learner.listener.address, client_key("far")
            assert head is not None
            learner.listener.admit({key.public: "far"})
            learner.part._found_head(
                ServeHead(
                    epoch=EPOCH, head=head, public=learner.key.public, secret=learner.key.secret
                )
            )
            staging = Staging(folder, "far", uses_deltas=True)
            with agent(folder, key, transport="tcp", staging=staging) as subscriber:
                async with running(subscriber.run(head)):
                    for step in range(4):
                        sent = learner.publish(step)
                        version = PolicyVersion(EPOCH, step)
                        await until_async(lambda: subscriber.adopted == version)  # noqa: B023
                        engine = subscriber._updates._engine
                        for name, tensor in sent.items():
                            assert torch.equal(engine.tensors[name], tensor)  # type: ignore[attr-defined]
            await until_async(lambda: len(learner.records) >= 4)
            staging.close()
        fetched = [sum(one.fetched_bytes.values()) for one in learner.records if one.adopted_by]
        assert fetched[0] == SIZE
        assert max(fetched[1:]) < SIZE / 10
        assert staging.num_refused_deltas == 0
        sent_as_deltas = learner.publisher._deltas.num_sent + learner.deltas_of_part.num_sent
        assert sent_as_deltas == 3 * learner.num_buckets
        assert learner.deltas_of_part.num_sent

    asyncio.run(scenario())
