"""A relay that kills itself amid a version, as one of several buckets is sent.

Usage: dying_relay MODEL_FOLDER FOLDER EPOCH
"""

import asyncio
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path

import torch.distributed as dist

from benchmarks.device.sources import Source, door_of
from slipstream.weightbus.relay.transports.collective import EngineGroup

_BUCKET = 3  # with which it dies


def die_amid(bucket: int) -> None:
    """Have this process end as so many buckets have been started."""
    start, count = EngineGroup.start, 0

    async def counted(self: EngineGroup, fill: Callable[..., object]) -> dist.Work:
        nonlocal count
        work = await start(self, fill)  # type: ignore[arg-type]
        count += 1
        if count == bucket:
            os.kill(os.getpid(), signal.SIGKILL)
        return work

    EngineGroup.start = counted  # type: ignore[method-assign]


async def main(model: Path, folder: Path, epoch: int) -> None:
    source = Source(model, folder, epoch)
    serving = asyncio.create_task(source.publisher.run(door_of(folder)))
    first = await source.publish(0, source.tensors)  # one that repairs an engine goes over tcp
    print("first", dict(first.transports), dict(first.failed), flush=True)
    die_amid(_BUCKET)
    await source.publish(1, source.tensors)
    serving.cancel()


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3])))
