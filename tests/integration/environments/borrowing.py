"""Environments that ask for more keepers, and more of them, than is good."""

import asyncio
import json
import os
import resource
import socket
import struct
from contextlib import suppress
from typing import Any

from slipstream.broker.sandbox import keeper, sandbox
from slipstream.broker.sandbox.bubblewrap import SandboxUnavailableError
from slipstream.generators.environments.sdk import Environment, Messages, Prompt, Reply, Step

MANY_FILES = 1_100


class ManyFiles(Environment):
    """Has a library that opens many files where it is imported."""

    @classmethod
    def prepare(cls, **_options: object) -> None:
        cls.files = [os.open(os.devnull, os.O_RDONLY) for _ in range(MANY_FILES)]

    async def step(self, _reply: Reply) -> Step:
        soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        return Step(done=True, reward=1.0, parts={"soft": float(soft)})


class Waits(Environment):
    async def step(self, _reply: Reply) -> Step:
        return Step(done=True, reward=1.0)


class TooMany(Environment):
    """Has as many interpreters as it gets; says how many those are, and why it gets no more."""

    async def step(self, _reply: Reply) -> Messages:
        return await asyncio.to_thread(self._all)

    def _all(self) -> str:
        limits = sandbox.Limits(memory_bytes=100 << 20)
        consoles = [keeper.console(limits, mode="namespaces")]
        said = []
        try:
            while len(consoles) < 40:
                said.append(consoles[-1].run("6 * 7", own_s=60.0).text)
                consoles.append(keeper.console(limits, mode="namespaces"))
        except SandboxUnavailableError as error:
            said.append(str(error))
        for one in consoles:
            one.__exit__(None, None, None)
        while True:  # the loader sees their ends a little later
            with suppress(SandboxUnavailableError):
                return json.dumps([*said, sandbox.run("print(6 * 7)").text])


class HangsUp(Environment):
    """Asks for a keeper and hangs up, again and again."""

    async def step(self, reply: Reply) -> Messages:
        for _ in range(int(reply.text)):
            _ask()
        return "done"


class Lingers(Environment):
    """Sends what takes long to close, besides and instead of a connection."""

    async def step(self, _reply: Reply) -> Messages:
        for beside in (True, False):
            with _unsent() as slow:
                _ask(slow, beside=beside)
        found = await asyncio.to_thread(sandbox.run, "print(6 * 7)")
        return found.text


def _ask(*others: socket.socket, beside: bool = True) -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        given = ([theirs] if beside else []) + list(others)
        socket.send_fds(keeper._link, [b"k"], [one.fileno() for one in given])  # type: ignore[list-item]


def _unsent() -> socket.socket:
    """Return a connection that waits, when it is closed, until what was sent has been read."""
    listener = socket.create_server(("127.0.0.1", 0))
    connection = socket.create_connection(listener.getsockname())
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 10_000))
    connection.setblocking(False)
    with suppress(BlockingIOError):
        while True:
            connection.send(bytes(1 << 16))
    _listeners.append(listener)
    return connection


_listeners: list[socket.socket] = []


class Limitless(Environment):
    """Runs code under limits of the reply; says what came of it."""

    async def reset(self, prompt: Prompt) -> str:
        return prompt.text

    async def step(self, reply: Reply) -> Messages:
        asked: dict[str, Any] = json.loads(reply.text)
        limits = sandbox.Limits(**asked["limits"])
        try:
            found = await asyncio.to_thread(sandbox.run, asked["code"], limits=limits)
        except SandboxUnavailableError as error:
            return f"unavailable: {error}"
        return f"{found.status}: {found.text}"
