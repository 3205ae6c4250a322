"""What a rank of an engine touches of a version in its agent's memory, read as SGLang reads it."""

import asyncio
import json
from pathlib import Path

import pytest
import torch

from slipstream.weightbus.agent.staging import Staging
from slipstream.weightbus.version.layout import bucket_offsets
from slipstream.wire.messages.versions import PolicyVersion
from tests.support.bus.snapshots import CopiedSnapshot
from tests.support.ranks.run import outputs, start

pytestmark = pytest.mark.integration
MIB = 1 << 20
RANKS = 4


def received(folder: Path) -> Staging:
    """Return memory with a version of four tensors of 8 MiB."""
    tensors = {f"layer-{number}": torch.full((2048, 1024), float(number)) for number in range(4)}
    version = CopiedSnapshot.of(PolicyVersion(1, 1), tensors, bucket_bytes=8 * MIB)
    manifest, data = version.manifest(), version.memory.numpy().tobytes()
    starts = bucket_offsets(manifest)

    async def fetch(index: int) -> bytes:
        return data[starts[index] : starts[index] + manifest.buckets[index].num_bytes]

    staging = Staging(folder, "a")
    asyncio.run(staging.receive(manifest, fetch))
    return staging


def test_a_rank_touches_its_own_rows_alone(tmp_path: Path):
    staging = received(tmp_path)
    (printed,) = outputs(
        [start(tmp_path, "integration.engine_rows", staging.folder / "v1.1", RANKS)]
    )
    staging.close()
    found = json.loads(printed)
    assert found["all"] == 32 * MIB
    assert found["own"] == 32 * MIB // RANKS
    assert found["own"] <= found["mapped"] <= found["own"] + MIB
