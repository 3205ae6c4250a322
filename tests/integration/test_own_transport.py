"""A transport that the product does not know publishes after one line in the registry."""

from pathlib import Path

import pytest

from slipstream.weightbus.agent.staging import Staging
from slipstream.weightbus.agent.tensor_set import TensorSet
from slipstream.weightbus.transports import TRANSPORTS, TransportEntry
from slipstream.wire.messages.weightbus import PublishRecord
from tests.support.bus.engine import BusEngine, digest_of, random_tensors
from tests.support.bus.published import Published, subscriber_of
from tests.support.waiting import NEVER_S

pytestmark = pytest.mark.integration
TENSORS = random_tensors(seed=1)
OWN = {"own-folder": TransportEntry("tests.support.bus.toy_transport:OwnFolder", is_staged=False)}


async def _publish_one(folder: Path, transport: str) -> tuple[PublishRecord, str]:
    """Publish a version; return its record and the digest of what the engine holds."""
    bus = Published(
        folder,
        TENSORS,
        bucket_bytes=4096,
        transports={**TRANSPORTS, **OWN},
        folder=str(folder / "own"),
    )
    engine = BusEngine(TENSORS, log=folder / "tokens", group_timeout_s=NEVER_S)
    shapes = {name: tuple(tensor.shape) for name, tensor in TENSORS.items()}
    subscriber = subscriber_of(
        engine, TensorSet(shapes, "float32"), Staging(folder, "generator-0"), transport=transport
    )
    version = bus.write(0, {name: tensor + 1 for name, tensor in TENSORS.items()})
    async with bus.running(subscriber):
        record = await bus.record_of(version)
        held = digest_of(engine.tensors)
    engine.close()
    return record, held


async def test_registered_transport_of_ones_own_brings_an_engine_to_a_version(folder: Path):
    record, held = await _publish_one(folder, "own-folder")
    assert record.failed == {}
    assert record.transports == {"generator-0": "own-folder"}
    assert {"receive", "load"} <= record.phase_seconds.keys()
    assert held == digest_of({name: tensor + 1 for name, tensor in TENSORS.items()})


async def test_transport_that_the_relay_does_not_have_falls_back_to_tcp(
    folder: Path, caplog: pytest.LogCaptureFixture
):
    record, _ = await _publish_one(folder, "another")
    assert record.transports == {"generator-0": "tcp"}
    assert "this relay has no such transport, only collective, tcp, disk, own-folder" in caplog.text
