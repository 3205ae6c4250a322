"""Who waits for a bucket gets it once it is whole, or is told that it will not come."""

import asyncio

import msgspec
import pytest

from slipstream.weightbus.agent.bucket_holdings import BucketPlace, HeldBuckets
from slipstream.wire.errors import PublishError
from slipstream.wire.messages.manifest import Bucket, WeightManifest
from slipstream.wire.messages.versions import PolicyVersion

OLD, VERSION, NEWER = (PolicyVersion(1, step) for step in range(3))
MANIFEST = WeightManifest(version=VERSION, buckets=(Bucket((), 8), Bucket((), 24)))
STARTS = [100, 108]


def manifest(version: PolicyVersion) -> WeightManifest:
    return msgspec.structs.replace(MANIFEST, version=version)


async def waiter(held: HeldBuckets, index: int = 1) -> "asyncio.Task[BucketPlace]":
    task = asyncio.create_task(held.until(VERSION, index))
    await asyncio.sleep(0)
    assert not task.done()
    return task


async def test_a_bucket_is_had_once_it_is_added():
    held = HeldBuckets()
    early = await waiter(held)
    held.begin(manifest(OLD), STARTS)
    held.begin(MANIFEST, STARTS)
    held.add(0)
    await asyncio.sleep(0)
    assert not early.done()
    assert not held.holds(VERSION, 1)
    held.add(1)
    assert await early == BucketPlace(108, 24)
    assert held.holds(VERSION, 1)
    assert await held.until(VERSION, 0) == BucketPlace(100, 8)


@pytest.mark.parametrize("end", ["failed", "again", "newer"])
async def test_nobody_waits_for_what_will_not_come(end: str):
    held = HeldBuckets()
    held.begin(MANIFEST, STARTS)
    late = await waiter(held)
    if end == "failed":
        held.end()
    else:
        held.begin(manifest(NEWER if end == "newer" else VERSION), STARTS)
    with pytest.raises(PublishError, match="failed here, or another version"):
        await late
    if end == "newer":
        with pytest.raises(PublishError, match="newer version"):
            await held.until(VERSION, 0)
    assert not held.holds(VERSION, 0)


@pytest.mark.parametrize("index", [-1, 2])
def test_there_is_no_such_bucket(index: int):
    held = HeldBuckets()
    held.begin(MANIFEST, STARTS)
    with pytest.raises(PublishError, match="no such bucket"):
        asyncio.run(held.until(VERSION, index))


async def test_a_version_whose_publish_failed_is_not_waited_for_unless_it_is_here_or_comes_again():
    held = HeldBuckets()
    early = await waiter(held)
    held.lose(VERSION)
    with pytest.raises(PublishError, match="its publish failed"):
        await early
    with pytest.raises(PublishError, match="its publish failed"):
        await held.until(VERSION, 0)
    held.begin(MANIFEST, STARTS)
    again = await waiter(held)
    held.lose(VERSION)  # its engine could not load it, but it is here
    held.add(1)
    assert await again == BucketPlace(108, 24)
