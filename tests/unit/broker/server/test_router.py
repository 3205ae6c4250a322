"""The socket of the broker over inproc: what it hands over, and what it sends."""

import asyncio
from collections.abc import Callable, Sequence

import zmq
import zmq.asyncio

from slipstream.broker.server.router import EventLoopRouter, Peer
from slipstream.wire.messages.codec import Frame
from tests.support.waiting import HANG_S

SMALL, LARGE = b"header", bytes(range(256)) * 512


async def _answers(
    sent: Sequence[bytes], answer: Callable[[Sequence[zmq.Frame]], list[Frame]], count: int = 1
) -> list[list[bytes]]:
    """Send one message to a router that answers it so many times."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()

    def on_message(peer: Peer, received: Sequence[zmq.Frame]) -> None:
        for _ in range(count):
            peer.send(answer(received))

    router = EventLoopRouter(context, "inproc://router", on_message=on_message)
    client = zmq.asyncio.Context(context).socket(zmq.DEALER)
    try:
        client.connect("inproc://router")
        await client.send_multipart(list(sent))
        async with asyncio.timeout(HANG_S):
            return [await client.recv_multipart() for _ in range(count)]
    finally:
        client.close(0)
        router.close()
        context.term()


def _echo(parts: Sequence[zmq.Frame]) -> list[Frame]:
    return [part.buffer for part in parts]


def test_parts_arrive_whole_and_in_order_however_large_they_are():
    sent = [SMALL, LARGE, b"", SMALL]
    assert asyncio.run(_answers(sent, _echo)) == [sent]


def test_a_large_part_that_was_received_can_be_sent_again_and_again():
    assert asyncio.run(_answers([LARGE, SMALL], _echo, 3)) == [[LARGE, SMALL]] * 3


def test_a_view_of_some_bytes_of_a_part_sends_these_alone():
    (answer,) = asyncio.run(_answers([LARGE], lambda parts: [parts[0].buffer[:50_000]]))
    assert answer == [LARGE[:50_000]]
