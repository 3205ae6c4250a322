"""Connections beyond the limit wait outside; those inside are served, the others come in later."""

import asyncio
import socket
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

import pytest
import zmq
import zmq.asyncio

from slipstream.broker.listening.gate import ConnectionCount, Limit
from slipstream.broker.server.router import EventLoopRouter, Peer
from slipstream.wire.errors import ConfigError
from tests.support.waiting import HANG_S, until_async

LIMIT = 20


def strangers(endpoint: str, count: int, cleanup: ExitStack) -> int:
    """Connect as often as that without a word; return how often it succeeded at once."""
    connected = 0
    for _ in range(count):
        kind = socket.AF_UNIX if endpoint.startswith("ipc:") else socket.AF_INET
        stranger = cleanup.enter_context(socket.socket(kind))
        stranger.setblocking(False)
        place: object = endpoint.removeprefix("ipc://")
        if kind == socket.AF_INET:
            host, _, port = endpoint.removeprefix("tcp://").rpartition(":")
            place = (host, int(port))
        try:
            stranger.connect(place)
        except BlockingIOError:
            pass  # it is under way
        except OSError:
            continue
        connected += 1
    return connected


async def asked(endpoint: str) -> list[bytes]:
    """Ask as a client that comes back until it is let in."""
    context = zmq.asyncio.Context()
    client = context.socket(zmq.DEALER)
    client.setsockopt(zmq.LINGER, 0)
    client.connect(endpoint)
    try:
        await client.send_multipart([b"1", b"hello"])
        async with asyncio.timeout(HANG_S):
            return await client.recv_multipart()
    finally:
        client.close()
        context.term()


def echo(peer: Peer, frames: Sequence[zmq.Frame]) -> None:
    peer.send([frame.buffer for frame in frames])


@pytest.mark.parametrize("kind", ["tcp", "ipc"])
async def test_further_connections_wait_until_others_have_gone(
    kind: str, short_folder: Path, caplog: pytest.LogCaptureFixture
):
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    endpoint = "tcp://127.0.0.1:*" if kind == "tcp" else f"ipc://{short_folder}/r.sock"
    router = EventLoopRouter(context, endpoint, on_message=echo, limit=Limit(LIMIT, "broker.some"))
    count = router._listening.connections
    assert count is not None
    early = asyncio.create_task(asked(router.endpoint))
    assert await early == [b"1", b"hello"]
    with ExitStack() as leave:
        before = strangers(router.endpoint, LIMIT, leave)
        assert before == LIMIT
        await until_async(lambda: count.is_shut, "the gate stays open")
        strangers(router.endpoint, 300, leave)
        late = asyncio.create_task(asked(router.endpoint))
        assert count.is_shut
        assert not late.done()
    assert await late == [b"1", b"hello"]
    assert not count.is_shut
    router.close()
    context.term()
    assert list(short_folder.glob("*.full")) == []  # noqa: ASYNC240 nothing else runs
    assert f"there are {LIMIT} connections to" in caplog.text
    assert "(broker.some)" in caplog.text


@pytest.mark.parametrize(
    ("endpoint", "setting"),
    [
        ("tcp://127.0.0.1", "invalid literal"),
        ("tcp://127.0.0.1:99999", "is no port"),
        ("tcp://203.0.113.7:0", "assign"),
        ("tcp://nowhere.invalid:1", "not known|resolution"),
    ],
)
def test_an_address_that_cannot_be_listened_at_is_named(endpoint: str, setting: str):
    async def body() -> None:
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        try:
            EventLoopRouter(context, endpoint, on_message=echo)
        finally:
            context.term()

    with pytest.raises(ConfigError, match=f"{endpoint} .broker.listen.*({setting})"):
        asyncio.run(body())


class StuckGate:
    """A gate of a kernel that allows no filters."""

    def shut(self) -> None:
        raise PermissionError(1, "Operation not permitted")

    def open(self) -> None:
        raise PermissionError(1, "Operation not permitted")


def test_gate_that_cannot_shut_is_logged_and_the_socket_keeps_working(short_folder: Path):
    """The thread ended, and libzmq waited for ever to pass it the next connection."""
    logged: list[str] = []
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    router = context.socket(zmq.ROUTER)
    endpoint = f"ipc://{short_folder}/r.sock"
    count = ConnectionCount(
        router,
        StuckGate(),
        Limit(1, "some"),
        where=endpoint,
        log=lambda line, *words: logged.append(line % words),
    )
    router.bind(endpoint)
    clients = [context.socket(zmq.DEALER) for _ in range(30)]
    for client in clients:
        client.connect(endpoint)
        client.send(b"hello")
    router.setsockopt(zmq.RCVTIMEO, round(HANG_S * 1_000))
    for _ in clients:
        assert router.recv_multipart()[1] == b"hello"
    for client in clients:
        client.close(0)
    count.stop()
    router.close(0)
    context.term()
    assert 1 <= len(logged) <= 10
    assert "cannot be limited: [Errno 1] Operation not permitted" in logged[0]
