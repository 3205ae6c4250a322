"""An environment server answers everybody while processes of one generator are being killed."""

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any, cast

import msgspec
import zmq
import zmq.asyncio

from slipstream.generators.environments.host import EnvironmentHost
from slipstream.generators.environments.remote.messages import (
    REVISION,
    Close,
    EnvironmentHello,
    EnvironmentWelcome,
    FromServer,
    Open,
    Opened,
    ToServer,
    encoded,
    from_server,
)
from slipstream.generators.environments.remote.proxy import PolicyProxy
from slipstream.generators.environments.remote.server import EnvironmentServer
from tests.support.waiting import until_async

MOST = 4


class SlowToEnd:
    """An environment whose processes are gone once a test lets them go."""

    version, drives_itself, may_reward = "1", False, True

    def __init__(self) -> None:
        self.may_end = asyncio.Event()

    @asynccontextmanager
    async def trajectory(self) -> AsyncIterator[object]:
        try:
            yield object()
        finally:
            await asyncio.shield(self.may_end.wait())  # a kill goes on whoever gives up waiting


class NoAgents:
    """A proxy that no agent asks."""

    def end(self, key: str) -> None:
        """Forget an agent."""


class Generator:
    """The other end of a server's socket."""

    def __init__(self, context: zmq.asyncio.Context, name: str) -> None:
        self.name = name
        self._socket = context.socket(zmq.DEALER)
        self._socket.connect("inproc://server")

    async def ask(self, message: ToServer) -> FromServer:
        await self.tell(message)
        return from_server(await self._socket.recv_multipart())

    async def ask_other_revision(self, message: dict[str, object]) -> dict[str, object]:
        await self._socket.send_multipart([msgspec.msgpack.encode(message)])
        return msgspec.msgpack.decode((await self._socket.recv_multipart())[0], type=dict)

    async def tell(self, message: ToServer) -> None:
        await self._socket.send_multipart(encoded(message))

    async def hello(self, *open_here: int) -> EnvironmentWelcome:
        answer = await self.ask(
            EnvironmentHello(client=self.name, revision=REVISION, open=open_here)
        )
        assert isinstance(answer, EnvironmentWelcome)
        return answer

    async def open(self, number: int) -> bool:
        answer = await self.ask(Open(client=self.name, number=number))
        assert isinstance(answer, Opened)
        return not answer.is_full


Serving = Callable[[EnvironmentServer, SlowToEnd, zmq.asyncio.Context], Coroutine[Any, Any, None]]


def serve(body: Serving, *, silence_s: float = 1e6, now: Callable[[], float]) -> None:
    async def run() -> None:
        context, host = zmq.asyncio.Context(), SlowToEnd()
        socket = context.socket(zmq.ROUTER)
        socket.bind("inproc://server")
        server = EnvironmentServer(
            cast("EnvironmentHost", host),
            cast("PolicyProxy", NoAgents()),
            identity="environment",
            most=MOST,
            silence_s=silence_s,
            now=now,
        )
        running = asyncio.create_task(server.run(socket))
        try:
            await body(server, host, context)
        finally:
            host.may_end.set()
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)
            context.destroy(linger=0)
        assert server.num_trajectories == 0

    asyncio.run(run())


def test_killing_trajectories_of_one_generator_delays_no_answer_to_another():
    async def body(
        server: EnvironmentServer, host: SlowToEnd, context: zmq.asyncio.Context
    ) -> None:
        first, second = Generator(context, "a"), Generator(context, "b")
        assert (await first.hello()).room == MOST
        assert [await first.open(number) for number in (1, 2)] == [True, True]
        await second.hello()
        assert await second.open(1)
        given_up = await first.hello()
        assert given_up.open == ()
        assert given_up.room == MOST - 3, "processes that are being killed take room"
        await first.tell(Close(client="a", number=2))
        again = await first.hello()
        assert (again.open, again.room) == ((), MOST - 3), "asked again, it is as before"
        assert (await second.hello(1)).open == (1,)
        assert not await first.open(1), "its number is taken until its process is gone"
        host.may_end.set()
        await until_async(lambda: server.num_trajectories == 1)
        assert await first.open(1)
        assert (await second.hello(1)).open == (1,)

    serve(body, now=lambda: 0.0)


def test_silent_generator_loses_its_trajectories_and_another_keeps_its_own():
    now_s = 0.0

    async def body(
        server: EnvironmentServer, host: SlowToEnd, context: zmq.asyncio.Context
    ) -> None:
        nonlocal now_s
        silent, speaking = Generator(context, "a"), Generator(context, "b")
        for one in (silent, speaking):
            await one.hello()
            assert await one.open(1)
        host.may_end.set()
        while server.num_trajectories == 2:
            now_s += 0.2
            assert (await speaking.hello(1)).open == (1,)
            assert now_s < 1000.0
            await asyncio.sleep(0)
        assert now_s > 3.0
        assert (await silent.hello(1)).open == ()

    serve(body, silence_s=3.0, now=lambda: now_s)


def test_flood_of_one_generator_keeps_no_silent_one_there():
    now_s = 0.0

    async def body(
        server: EnvironmentServer, host: SlowToEnd, context: zmq.asyncio.Context
    ) -> None:
        nonlocal now_s
        silent, flooding = Generator(context, "a"), Generator(context, "b")
        await silent.hello()
        assert await silent.open(1)
        await flooding.hello()
        host.may_end.set()
        while server.num_trajectories:
            now_s += 0.2
            assert now_s < 1000.0
            for _ in range(100):
                await flooding.tell(Close(client="b", number=7))
            await asyncio.sleep(0)

    serve(body, silence_s=3.0, now=lambda: now_s)


def test_late_message_of_an_older_connection_changes_nothing():
    async def body(
        server: EnvironmentServer, host: SlowToEnd, context: zmq.asyncio.Context
    ) -> None:
        older, newer = Generator(context, "a"), Generator(context, "a")
        await older.hello()
        await newer.hello()
        assert await newer.open(1)
        await older.tell(Close(client="a", number=1))
        await older.tell(Open(client="a", number=2))
        await asyncio.sleep(0.1)
        assert (await newer.hello(1)).open == (1,)
        assert server.num_trajectories == 1
        host.may_end.set()

    serve(body, now=lambda: 0.0)


def test_generator_of_another_revision_learns_this_ones():
    async def body(
        server: EnvironmentServer, host: SlowToEnd, context: zmq.asyncio.Context
    ) -> None:
        answer = await Generator(context, "a").ask_other_revision(
            {"kind": "hello", "client": "a", "revision": 3, "open": []}
        )
        assert (answer["kind"], answer["revision"]) == ("welcome", REVISION)
        assert {"server", "version", "identity", "drives_itself"} < answer.keys()
        host.may_end.set()
        assert server.num_trajectories == 0

    serve(body, now=lambda: 0.0)
