"""A bucket that arrives as its fetch is cancelled does not undo the cancellation."""

import asyncio
from pathlib import Path

import zmq.asyncio

from slipstream.weightbus.agent.fetcher import BucketFetcher
from slipstream.wire.messages.versions import PolicyVersion
from slipstream.wire.messages.weightbus import RelayAddress
from tests.support.waiting import until_async


def test_a_fetch_that_is_cancelled_as_its_bucket_arrives_is_cancelled(tmp_path: Path):
    async def scenario() -> bool:
        context = zmq.asyncio.Context()
        fetcher = BucketFetcher(context, timeout_s=600.0)
        endpoint = f"ipc://{tmp_path}/bulk"
        fetcher.connect(RelayAddress(endpoint=endpoint, bulk_endpoint=endpoint), None)
        fetching = asyncio.create_task(fetcher.fetch(PolicyVersion(1, 1), 0))
        waiting = fetcher._waiting
        await until_async(lambda: len(waiting) == 1)
        (future,) = waiting.values()
        await asyncio.sleep(0)
        future.set_result(b"bytes")
        fetching.cancel()
        await asyncio.wait({fetching})
        fetcher.close()
        context.destroy(linger=0)
        return fetching.cancelled()

    assert asyncio.run(scenario())
