"""Strangers at everything that listens: what they make a process keep, and who still gets in."""

import asyncio
import os
import resource
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import cast

import pytest
import zmq
import zmq.asyncio
from yarl import URL

from slipstream.broker.dashboard.comparison import ComparisonPage
from slipstream.broker.dashboard.encoding import RunSource
from slipstream.broker.dashboard.items import RecordedItems
from slipstream.broker.dashboard.web import Dashboard
from slipstream.generators.capture.server import CaptureServer
from slipstream.generators.environments.remote.proxy import PolicyProxy
from slipstream.generators.turns.calls import TrajectoryCalls
from slipstream.weightbus.net.curve import (
    ForwardListener,
    KeyedListener,
    LeaderListener,
    RemoteListener,
    connect,
)
from slipstream.wire.errors import ProtocolError
from slipstream.wire.messages.pieces import cut, joined_message
from tests.support.bus.remote import client_key
from tests.support.strangers import (
    MALFORMED,
    REFUSED,
    all_said,
    filled,
    filled_heads,
    num_descriptors,
    resident_bytes,
    silent,
    status_of,
)
from tests.support.waiting import HANG_S, until_async

pytestmark = pytest.mark.integration
ANY = "tcp://127.0.0.1:0"
KEY = client_key("leader")
HOST = "127.0.0.1"
MANY, MIB = 30, 1 << 20


@asynccontextmanager
async def listening(name: str) -> AsyncIterator[tuple[KeyedListener, str]]:
    context = zmq.asyncio.Context()
    listener: KeyedListener
    if name == "rendezvous":
        listener = LeaderListener(ANY, KEY)
        endpoint = listener.open(context).getsockopt_string(zmq.LAST_ENDPOINT)
    elif name.startswith("forward"):
        listener = ForwardListener(ANY, is_plain=name.endswith("plain"))
        endpoint = listener.open(context)[1].endpoint
    else:
        listener = RemoteListener(ANY, is_plain=name.endswith("plain"))
        listener.open(context)
        assert listener.address is not None
        is_bulk = "buckets" in name
        endpoint = listener.address.bulk_endpoint if is_bulk else listener.address.endpoint
    try:
        yield listener, endpoint
    finally:
        listener.close()
        context.destroy(linger=0)


def address_of(endpoint: str) -> tuple[str, int]:
    host, _, port = endpoint.removeprefix("tcp://").rpartition(":")
    return host, int(port)


@pytest.mark.parametrize(
    "name", ["rendezvous", "commands", "buckets", "buckets, plain", "forward", "forward, plain"]
)
async def test_strangers_make_a_router_keep_64_kib_each(name: str):
    async with listening(name) as (_, endpoint):
        before = resident_bytes(os.getpid())

        def attack() -> int:
            with filled(address_of(endpoint), MANY, 15 * MIB):
                return resident_bytes(os.getpid()) - before

        grown = await asyncio.to_thread(attack)
    assert grown < 16 * MIB, f"{grown / MIB:.0f} MiB for {MANY} connections"


@pytest.fixture
def few_descriptors() -> Iterator[int]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    # Strangers and the listener's side of them take three quarters of it, whatever is open already.
    few = 4 * num_descriptors(os.getpid()) + 600
    resource.setrlimit(resource.RLIMIT_NOFILE, (few, hard))
    try:
        yield few
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


async def test_silent_strangers_take_a_share_of_the_descriptors_and_the_holder_of_a_key_gets_in(
    few_descriptors: int, caplog: pytest.LogCaptureFixture
):
    """They took all, and nothing else of the process could open a file."""
    context = zmq.asyncio.Context()
    listener = LeaderListener(ANY, KEY)
    router = listener.open(context)
    endpoint = router.getsockopt_string(zmq.LAST_ENDPOINT)
    share = few_descriptors // 4
    async with asyncio.timeout(HANG_S):
        with silent(address_of(endpoint), share + 100):
            await until_async(lambda: "further ones wait (ulimit -n)" in caplog.text)
            client = context.socket(zmq.DEALER)
            connect(client, endpoint, server_key=KEY.public, key=KEY)
            await client.send(b"hello")
            assert (await router.recv_multipart())[1] == b"hello"
    client.close(linger=0)
    listener.close()
    context.term()


async def test_a_message_of_many_pieces_arrives_whole_and_a_larger_frame_never_does():
    context = zmq.asyncio.Context()
    listener = LeaderListener(ANY, KEY)
    router = listener.open(context)
    endpoint = router.getsockopt_string(zmq.LAST_ENDPOINT)
    message = bytes(range(256)) * 4096
    async with asyncio.timeout(HANG_S):
        for frames in ([message], cut([message])):
            client = context.socket(zmq.DEALER)
            connect(client, endpoint, server_key=KEY.public, key=KEY)
            await client.send_multipart(frames)
            if len(frames) > 1:
                _, *pieces = await router.recv_multipart()
                assert joined_message(pieces, most_bytes=len(message)) == message
            client.close(linger=0)
    with pytest.raises(ProtocolError, match=f"a message of {len(message)} bytes; there may be 9"):
        joined_message(pieces, most_bytes=9)
    listener.close()
    context.term()


# ---- HTTP ----------------------------------------------------------------------


async def ask(_call: int, _path: str, _body: bytes) -> None:
    """Carry nothing."""


async def leave(_call: int) -> None:
    """Leave nobody."""


class Unseen:
    """Figures of a run that nobody gets to see."""

    snapshot = None

    def letters(self) -> list[object]:
        return []


@asynccontextmanager
async def web(name: str, folder: Path) -> AsyncIterator[tuple[str, int]]:
    """Yield the address of a server of HTTP."""
    async with AsyncExitStack() as cleanup:
        match name:
            case "agents":
                capture = CaptureServer(host=HOST, port=0, model="policy", token_text=chr)
                cleanup.push_async_callback(capture.close)
                await capture.start()
                capture.open(cast("TrajectoryCalls", None))
                url = capture.url
            case "proxy":
                proxy = PolicyProxy()
                cleanup.push_async_callback(proxy.close)
                await proxy.start()
                proxy.open(ask, leave)
                url = proxy.url
            case "page":
                items, source = RecordedItems(folder), cast("RunSource", Unseen())
                page = Dashboard(source, items, host=HOST, port=0, folder=folder)
                cleanup.push_async_callback(page.stop)
                url = await page.start()
            case _:
                pages = ComparisonPage([], parent=folder, host=HOST, port=0)
                cleanup.push_async_callback(pages.stop)
                url = await pages.start()
        yield HOST, URL(url).port or 0


SITES = ["agents", "proxy", "page", "comparison"]


@pytest.mark.parametrize("name", SITES)
async def test_requests_without_a_key_are_refused_and_seldom_logged_whatever_is_in_them(
    name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    """A key that was no text was answered with 500, and with a traceback in the log each time."""

    async with web(name, tmp_path) as address:
        found = {
            what: await asyncio.to_thread(status_of, address, request)
            for what, request in MALFORMED.items()
            for _ in range(3)
        }
        foreign = await asyncio.to_thread(
            status_of, address, b"GET / HTTP/1.1\r\nHost: attacker.example\r\n\r\n"
        )
    assert {what: status for what, status in found.items() if status not in REFUSED} == {}
    assert (found["a key that is no text"], foreign) == (401, 403)
    assert "Traceback" not in caplog.text
    assert len(caplog.records) <= 2, caplog.text


@pytest.mark.parametrize("name", SITES)
@pytest.mark.parametrize("path", ["v1/models", "nothing", "v1/chat/completions"])
@pytest.mark.parametrize("expects", [b"", b"Expect: x\r\n"])
async def test_who_shows_no_key_asks_once(name: str, path: str, expects: bytes, tmp_path: Path):
    """What follows the first request of a connection is not limited like that one."""

    async with web(name, tmp_path) as address:
        asked = b"GET /%s HTTP/1.1\r\nHost: localhost\r\n%s\r\n" % (path.encode(), expects)
        said = await asyncio.to_thread(all_said, address, asked * 2)
    assert said.count(b"HTTP/1.1 ") == 1


@pytest.mark.parametrize("name", SITES)
async def test_heads_that_do_not_end_take_64_kib_and_their_connection(name: str, tmp_path: Path):
    async with web(name, tmp_path) as address:
        before = resident_bytes(os.getpid())

        def attack() -> tuple[int, int]:
            with filled_heads(address, MANY, 4 * MIB) as taken:
                return taken, resident_bytes(os.getpid()) - before

        taken, grown = await asyncio.to_thread(attack)
        assert await asyncio.to_thread(status_of, address, MALFORMED["no key"]) in REFUSED
    assert grown < 12 * MIB, f"{grown / MIB:.0f} MiB for {MANY} connections"
    assert taken < 2 * MANY * MIB, "what was sent after 64 KiB was read"


@pytest.mark.parametrize("name", ["page", "comparison"])
async def test_silent_strangers_leave_a_server_descriptors(
    name: str, tmp_path: Path, few_descriptors: int
):
    async with web(name, tmp_path) as address:
        before = num_descriptors(os.getpid())
        most = before + 250 + few_descriptors // 8 + 2
        with silent(address, 250):  # many are taken at a time, and let go at once
            await asyncio.to_thread(status_of, address, MALFORMED["no key"])
            await until_async(lambda: num_descriptors(os.getpid()) <= most)
