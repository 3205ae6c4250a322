"""A transport that the product does not know publishes after one line in the registry."""

import asyncio
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from slipstream.weightbus.agent.staging import Staging
from slipstream.weightbus.agent.subscriber import Subscriber
from slipstream.weightbus.agent.tensor_set import TensorSet
from slipstream.weightbus.config import WeightBusSection
from slipstream.weightbus.net.compatibility import installed_libraries
from slipstream.weightbus.relay.publisher import Publisher
from slipstream.weightbus.relay.served import Versions
from slipstream.weightbus.transports import TRANSPORTS, TransportEntry
from slipstream.weightbus.version.layout import plan_layout
from slipstream.weightbus.version.shared_memory import SharedSlots
from slipstream.weightbus.version.slots import NUM_SLOTS
from slipstream.weightbus.version.snapshot import tensor_spec, tensor_views
from slipstream.wire.messages.relay import OpenMemory
from slipstream.wire.messages.versions import PolicyVersion
from slipstream.wire.messages.weightbus import Join, PublishRecord, RelayAddress
from tests.support.bus.engine import BusEngine, digest_of, random_tensors
from tests.support.waiting import HANG_S, NEVER_S

pytestmark = pytest.mark.integration
TENSORS = random_tensors(seed=1)
OWN = {"own-folder": TransportEntry("tests.support.bus.toy_transport:OwnFolder", is_staged=False)}


@pytest.fixture
def folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="sp-", dir="/tmp") as name:
        yield Path(name)


async def _publish_one(folder: Path, transport: str) -> tuple[PublishRecord, str]:
    """Publish a version; return its record and the digest of what the engine holds."""
    records: asyncio.Queue[PublishRecord] = asyncio.Queue()
    settings = WeightBusSection(
        timeout_s=NEVER_S,
        receive_timeout_s=NEVER_S,
        member_silence_s=NEVER_S,
        folder=str(folder / "own"),
    )
    versions = Versions(folder / "weights")
    publisher = Publisher(
        settings,
        versions,
        on_record=records.put,
        libraries=installed_libraries(),
        transports={**TRANSPORTS, **OWN},
    )
    layout = plan_layout([tensor_spec(*item) for item in TENSORS.items()], bucket_bytes=4096)
    memory = SharedSlots.make(slot_bytes=layout.num_bytes, num_slots=NUM_SLOTS)
    versions.open(OpenMemory(epoch=1, path=memory.path, layout=layout, num_slots=NUM_SLOTS))
    slot = versions.reserve(1)
    for name, view in tensor_views(layout, memory.slot(slot)).items():
        view.copy_(TENSORS[name] + 1)
    versions.written(1, slot, PolicyVersion(1, 0))
    engine = BusEngine(TENSORS, log=folder / "tokens", group_timeout_s=NEVER_S)
    subscriber = Subscriber(
        engine,
        join=Join(
            name="generator-0",
            incarnation="a",
            device="cpu",
            torch_version=installed_libraries().torch_version,
            transport=transport,
        ),
        tensors=TensorSet({n: tuple(t.shape) for n, t in TENSORS.items()}, "float32"),
        staging=Staging(folder, "generator-0"),
        silence_s=NEVER_S,
        fetch_timeout_s=NEVER_S,
        on_pause=lambda: None,
        on_adopt=lambda _version, _stood_s: None,
    )
    address = RelayAddress(endpoint=f"ipc://{folder}/bus", bulk_endpoint=f"ipc://{folder}/bulk")
    tasks = [
        asyncio.create_task(publisher.run(address)),
        asyncio.create_task(subscriber.run(address)),
    ]
    try:
        record = await asyncio.wait_for(records.get(), HANG_S)  # noqa: TID251 cancelled by nobody
        return record, digest_of(engine.tensors)
    finally:
        for task in reversed(tasks):
            task.cancel()
            with suppress(asyncio.CancelledError):
                await task
        engine.close()
        memory.close()


def test_registered_transport_of_ones_own_brings_an_engine_to_a_version(folder: Path):
    record, held = asyncio.run(_publish_one(folder, "own-folder"))
    assert record.failed == {}
    assert record.transports == {"generator-0": "own-folder"}
    assert {"receive", "load"} <= record.phase_seconds.keys()
    assert held == digest_of({name: tensor + 1 for name, tensor in TENSORS.items()})


def test_transport_that_the_relay_does_not_have_falls_back_to_tcp(
    folder: Path, caplog: pytest.LogCaptureFixture
):
    record, _ = asyncio.run(_publish_one(folder, "another"))
    assert record.transports == {"generator-0": "tcp"}
    assert "this relay has no such transport, only collective, tcp, disk, own-folder" in caplog.text
