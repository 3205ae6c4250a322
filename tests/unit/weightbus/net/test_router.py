"""Messages of many peers, taken at once."""

import asyncio
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
import zmq
import zmq.asyncio

from slipstream.weightbus.net.router import MessageRouter

COUNT = 700  # more than are taken at a time


class Ends:
    """A router in an event loop, and a peer's end of it without one."""

    def __init__(self, folder: Path) -> None:
        self.context = zmq.asyncio.Context()
        self.socket = self.context.socket(zmq.ROUTER)
        self.socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        self.socket.bind(f"ipc://{folder}/router")
        plain: zmq.Context[zmq.Socket[bytes]] = zmq.Context.shadow(self.context.underlying)
        self.peer = plain.socket(zmq.DEALER)
        self.peer.setsockopt(zmq.IDENTITY, b"peer")
        self.peer.setsockopt(zmq.RCVTIMEO, 20_000)
        self.peer.connect(f"ipc://{folder}/router")
        self.router = MessageRouter(self.socket)
        self.taken: list[list[bytes]] = []

    def close(self) -> None:
        self.peer.close(0)
        self.socket.close(0)
        self.context.term()


@pytest.fixture
def ends(tmp_path: Path) -> Iterator[Ends]:
    made = Ends(tmp_path)
    yield made
    made.close()


async def until_taken(ends: Ends, count: int) -> None:
    async with asyncio.timeout(20):
        while len(ends.taken) < count:  # noqa: ASYNC110
            await asyncio.sleep(0.001)


async def test_all_messages_are_taken_in_order_and_answered(ends: Ends):
    def take(frames: list[zmq.Frame]) -> None:
        ends.taken.append([frame.bytes for frame in frames])
        ends.router.send(b"peer", b"heard", frames[1].bytes)

    running = asyncio.create_task(ends.router.run(take))
    for burst in range(3):
        for number in range(COUNT):
            ends.peer.send(b"%d" % (burst * COUNT + number))
        await until_taken(ends, (burst + 1) * COUNT)
        numbers = range(burst * COUNT, (burst + 1) * COUNT)
        answers = [ends.peer.recv_multipart() for _ in numbers]  # a queue holds 1000
        assert answers == [[b"heard", b"%d" % number] for number in numbers]
    assert [int(body) for _, body in ends.taken] == list(range(3 * COUNT))
    running.cancel()
    with suppress(asyncio.CancelledError):
        await running


async def test_what_arrives_while_something_is_sent_is_not_forgotten(ends: Ends):
    running = asyncio.create_task(
        ends.router.run(lambda frames: ends.taken.append([one.bytes for one in frames]))
    )
    ends.peer.send(b"first")
    await until_taken(ends, 1)
    for number in range(50):  # the descriptor may be read by the send
        ends.peer.send(b"%d" % number)
        ends.router.send(b"peer", b"x")
        await until_taken(ends, number + 2)
    running.cancel()
    with suppress(asyncio.CancelledError):
        await running


async def test_a_peer_that_is_not_there_is_an_error(ends: Ends):
    await asyncio.sleep(0)
    with pytest.raises(zmq.ZMQError):
        ends.router.send(b"nobody", b"x")


@pytest.mark.parametrize("error", [ValueError, zmq.Again])
async def test_an_error_of_the_taker_ends_it(ends: Ends, error: type[Exception]):
    def take(_frames: list[zmq.Frame]) -> None:
        raise error

    ends.peer.send(b"x")
    with pytest.raises(error):
        async with asyncio.timeout(20):
            await ends.router.run(take)
