"""Connections to the socket of an environment's host that do not show a ticket."""

import asyncio
import os
import signal
import socket
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from slipstream.broker.sandbox.frames import frame_of
from slipstream.generators.environments.host import EnvironmentHost
from slipstream.generators.environments.messages import Connected
from slipstream.wire.messages.trajectory import Prompt
from tests.support.playing import hosted, play
from tests.support.waiting import HANG_S, until_async

pytestmark = pytest.mark.integration
WAITS = f"{Path(__file__).parent / 'environments' / 'borrowing.py'}:Waits"
MANY = 400


@contextmanager
def connections(host: EnvironmentHost, count: int) -> Iterator[list[socket.socket]]:
    with ExitStack() as stack:
        made = [stack.enter_context(socket.socket(socket.AF_UNIX)) for _ in range(count)]
        for one in made:
            one.connect(str(host._folder / "socket"))  # waits for room in the backlog
            one.settimeout(HANG_S)
        yield made


def num_descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))  # noqa: PTH208


async def test_silent_connections_have_a_bound_and_a_trajectory_beside_them_connects(
    caplog: pytest.LogCaptureFixture,
):
    async with hosted(WAITS) as host:
        before = num_descriptors()
        stack = ExitStack()
        with stack:
            silent = await asyncio.to_thread(stack.enter_context, connections(host, MANY))
            await until_async(lambda: host.num_refused >= MANY - 256)
            await until_async(lambda: num_descriptors() - before - MANY <= 256)
            assert [await asyncio.to_thread(one.recv, 1) for one in silent[: MANY - 256]] == [
                b""
            ] * (MANY - 256)
            assert (await play(host, Prompt(prompt="begin"), "x")).reward == 1.0
            assert host.num_refused >= MANY - 256
        assert caplog.text.count("shows no ticket is closed: 256 of them are open") == 1


@pytest.mark.parametrize(
    ("first", "why"),
    [
        ((4097).to_bytes(4, "big"), "a message of 4097 bytes, at most 4096"),
        (b"\0\0\0\1\xc1", "MessagePack data is malformed"),
        (frame_of(Connected(ticket="guessed")), "it is no trajectory's"),
    ],
)
async def test_a_first_message_that_is_too_long_or_no_ticket_ends_its_connection(
    first: bytes, why: str, caplog: pytest.LogCaptureFixture
):
    async with hosted(WAITS) as host:
        with connections(host, 1) as (one,):
            one.sendall(first)
            assert await asyncio.to_thread(one.recv, 1) == b""
        assert host.num_refused == 1
        assert why in caplog.text
        assert (await play(host, Prompt(prompt="begin"), "x")).reward == 1.0


SHOW = """
import socket, sys
one = socket.socket(socket.AF_UNIX)
one.connect(sys.argv[1])
one.sendall(bytes.fromhex(sys.argv[2]))
print(one.recv(1))
"""


async def test_a_ticket_that_another_process_shows_first_is_refused_and_stays_good():
    async with hosted(WAITS) as host:
        assert host._loader is not None
        (loader,) = host._pids_of(host._loader)
        os.kill(loader, signal.SIGSTOP)
        playing = asyncio.create_task(play(host, Prompt(prompt="begin"), "x"))
        await until_async(lambda: host._by_ticket)
        shown = frame_of(Connected(ticket=next(iter(host._by_ticket)))).hex()
        command = [sys.executable, "-c", SHOW, str(host._folder / "socket"), shown]
        thief = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
        await until_async(lambda: host._without_ticket)
        os.kill(loader, signal.SIGCONT)
        assert (await playing).reward == 1.0
        said, _ = await thief.communicate()
        assert said == b"b''\n"
        assert host.num_refused == 1
