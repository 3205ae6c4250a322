"""Which relay a learner ends before it writes a slot, and that it waits for no other host."""

import asyncio
import itertools
import os
import signal
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import zmq
import zmq.asyncio

from slipstream.learner.publish.relay_link import RelayLink
from slipstream.learner.publish.relay_process import RelayLaunch, is_relay
from slipstream.weightbus.version.layout import plan_layout
from slipstream.wire.messages.codec import decode_relay_request, encode
from slipstream.wire.messages.manifest import TensorSpec
from slipstream.wire.messages.relay import (
    Alive,
    EndRelay,
    Ok,
    OpenMemory,
    RelayRequest,
    Reserve,
    Reserved,
)
from slipstream.wire.messages.weightbus import RelayAddress
from tests.support.waiting import until_async

LAYOUT = plan_layout([TensorSpec("w", "float32", (4,))], bucket_bytes=64)
WAITS_AT_ITS_START = (
    "import os, time\nopen(os.environ['PID'], 'w').write(f'{os.getpid()}\\n')\ntime.sleep(3600)"
)


@asynccontextmanager
async def starting(
    folder: Path, *, on_door: Callable[[RelayAddress], None] | None = None
) -> AsyncIterator[tuple[RelayLink, int]]:
    """Yield a link that has opened a memory, and the process that it started."""
    (folder / "sitecustomize.py").write_text(WAITS_AT_ITS_START)
    file = folder / "pid"
    launch = RelayLaunch(environment={"PYTHONPATH": str(folder), "PID": str(file)})
    link = RelayLink(f"ipc://{folder}/relay", launch, on_door=on_door)
    await link.open(["/proc/1/fd/3"] * 3, LAYOUT, epoch=1, part=1)
    running = asyncio.create_task(link.run())
    try:
        await until_async(lambda: file.exists() and file.read_text().endswith("\n"))
        yield link, int(file.read_text())
    finally:
        await link.end()
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)


async def test_a_relay_that_starts_is_not_ended_by_a_learner_that_writes_meanwhile(tmp_path: Path):
    async with starting(tmp_path) as (link, pid):
        for slot in (0, 1, 2):
            await link.writing(slot)
            assert is_relay(pid)


async def test_a_relay_that_may_serve_what_is_written_is_ended(tmp_path: Path):
    seen: list[RelayRequest] = []
    context = zmq.asyncio.Context()
    socket = context.socket(zmq.ROUTER)
    socket.setsockopt(zmq.LINGER, 0)
    async with starting(tmp_path) as (link, pid):
        socket.bind(f"ipc://{tmp_path}/relay")

        async def answer() -> None:  # but not that it knows the memory
            while True:
                peer, *frames = await socket.recv_multipart()
                seen.append(request := decode_relay_request(b"".join(frames)))
                if isinstance(request, Alive):
                    await socket.send_multipart([peer, encode(Ok(pid=pid))])

        answering = asyncio.create_task(answer())
        await until_async(lambda: any(isinstance(one, OpenMemory) for one in seen))
        assert is_relay(pid)
        await link.writing(0)
        assert not is_relay(pid)
        answering.cancel()
        await asyncio.gather(answering, return_exceptions=True)
    socket.close()
    context.term()


async def test_a_store_that_does_not_answer_delays_no_publish_and_gets_the_newest_door(
    tmp_path: Path,
):
    """A relay that this process plays moves from door to door while the store hangs."""
    doors = [
        RelayAddress(endpoint=f"tcp://10.0.0.1:{port}", bulk_endpoint="", key="k" * 40)
        for port in range(4)
    ]
    at = itertools.chain([doors[0]])
    told: list[RelayAddress] = []
    seen: list[RelayRequest] = []
    answers = threading.Event()

    def post(door: RelayAddress) -> None:
        told.append(door)
        answers.wait()

    context = zmq.asyncio.Context()
    socket = context.socket(zmq.ROUTER)
    socket.setsockopt(zmq.LINGER, 0)
    async with starting(tmp_path, on_door=post) as (link, pid):
        socket.bind(f"ipc://{tmp_path}/relay")

        async def answer() -> None:
            while True:
                peer, *frames = await socket.recv_multipart()
                seen.append(request := decode_relay_request(b"".join(frames)))
                if isinstance(request, EndRelay):
                    os.kill(pid, signal.SIGKILL)
                is_slot = isinstance(request, Reserve)
                reply = Reserved(slot=1) if is_slot else Ok(pid=pid, door=next(at, None))
                await socket.send_multipart([peer, encode(reply)])

        answering = asyncio.create_task(answer())
        try:
            await until_async(  # it is adopted, and checked since
                lambda: [type(one) for one in seen][-2:] == [OpenMemory, Alive]
            )
            at = itertools.chain(doors[1:], itertools.repeat(doors[-1]))
            for _ in doors:
                # Answered while the store is not.
                await link.open(["/proc/1/fd/3"] * 3, LAYOUT, epoch=1)
                assert await link.reserve() == 1
            answers.set()
            await until_async(lambda: len(told) > 1)
            assert told == [doors[0], doors[-1]]
        finally:
            answers.set()
            await link.end()
            answering.cancel()
            await asyncio.gather(answering, return_exceptions=True)
    socket.close()
    context.term()
