"""Runs the trajectories' environments of generators on other hosts.

Consumes: messages of generators that prove the key. Produces: one answer to each thing that a
trajectory is told, and requests of its agent. Waits for: both. A generator that is silent has lost
its trajectories; each is killed with all that it has started.
"""

import asyncio
import logging
import secrets
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

import msgspec
import zmq
import zmq.asyncio

from slipstream.generators.environments.host import EnvironmentFailedError, EnvironmentHost
from slipstream.generators.environments.messages import Begin, Replied, Turned, Unable
from slipstream.generators.environments.remote.messages import (
    REVISION,
    Answered,
    Asked,
    Close,
    Failed,
    FromServer,
    Heard,
    Hello,
    Left,
    Open,
    Tell,
    Welcome,
    encoded,
    to_server,
)
from slipstream.generators.environments.remote.proxy import PolicyProxy
from slipstream.wire.errors import ProtocolError
from slipstream.wire.process.rarely import Rarely

_log = logging.getLogger(__name__)
_malformed = Rarely(_log)
_LOOK_S = 0.25


@dataclass(slots=True)
class _Trajectory:
    """One trajectory of a generator."""

    number: int
    told: "asyncio.Queue[Begin | Replied]" = field(default_factory=lambda: asyncio.Queue(1))
    task: "asyncio.Task[None] | None" = None
    key: str = ""  # of its agent at the proxy


@dataclass(slots=True)
class _Client:
    """One generator."""

    name: str
    peer: bytes  # its newest connection
    heard_s: float
    trajectories: dict[int, _Trajectory] = field(default_factory=dict)


class EnvironmentServer:
    """Serves an environment over an open ROUTER socket. Use it inside one event loop."""

    def __init__(
        self,
        host: EnvironmentHost,
        proxy: PolicyProxy,
        *,
        most: int,
        silence_s: float,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        """Serve nobody yet; ``run`` does.

        Args:
            host: of the environment, started.
            proxy: listens for agents.
            most: trajectories at a time.
            silence_s: without a sign of life, after which a generator is gone.
            now: monotonic seconds.
        """
        self._host = host
        self._proxy = proxy
        self._most = most
        self._silence_s = silence_s
        self._now = now
        self._name = secrets.token_hex(8)
        self._clients: dict[str, _Client] = {}
        self._socket: zmq.asyncio.Socket | None = None

    @property
    def num_trajectories(self) -> int:
        """Trajectories that are under way."""
        return sum(len(client.trajectories) for client in self._clients.values())

    async def run(self, socket: zmq.asyncio.Socket) -> None:
        """Serve until cancelled; then nothing is left of any trajectory."""
        self._socket = socket
        looking = asyncio.create_task(self._look())
        try:
            while True:
                peer, *frames = await socket.recv_multipart()
                await self._handle(peer, frames)
        finally:
            looking.cancel()
            await asyncio.gather(looking, return_exceptions=True)
            for client in list(self._clients.values()):
                await self._forget(client)

    async def _handle(self, peer: bytes, frames: Sequence[bytes]) -> None:
        try:
            message = to_server(b"".join(frames))
        except ProtocolError as error:
            _malformed.say("a generator sent a malformed message: %s", error)
            return
        if isinstance(message, Hello):
            await self._hello(peer, message)
            return
        client = self._clients.get(message.client)
        if client is None:
            return  # it says Hello again, and fails what it had
        client.peer, client.heard_s = peer, self._now()
        match message:
            case Open(number=number):
                await self._open(client, number)
            case Tell(number=number, said=said):
                if (one := client.trajectories.get(number)) is not None:
                    with suppress(asyncio.QueueFull):  # it is told one thing at a time
                        one.told.put_nowait(said)
            case Answered(number=number):
                if (one := client.trajectories.get(number)) is not None:
                    self._proxy.answered(one.key, message)
            case Close(number=number):
                if (one := client.trajectories.get(number)) is not None and one.task is not None:
                    one.task.cancel()

    async def _hello(self, peer: bytes, message: Hello) -> None:
        client = self._clients.get(message.client)
        if client is None:
            client = _Client(message.client, peer, self._now())
            self._clients[message.client] = client
            _log.info("generator %s is there", message.client)
        client.peer, client.heard_s = peer, self._now()
        await self._send(
            client,
            Welcome(
                server=self._name,
                version=self._host.version,
                drives_itself=self._host.drives_itself,
                may_reward=self._host.may_reward,
                revision=REVISION,
            ),
        )

    async def _open(self, client: _Client, number: int) -> None:
        if number in client.trajectories:
            return
        if self.num_trajectories >= self._most:
            why = f"the environment server has {self._most} trajectories already (--most)"
            await self._send(client, Failed(number=number, reason=why))
            return
        one = _Trajectory(number)
        client.trajectories[number] = one
        one.task = asyncio.create_task(self._play(client, one))

    async def _play(self, client: _Client, one: _Trajectory) -> None:
        try:
            async with self._host.trajectory() as acting:
                while True:
                    told = await one.told.get()
                    if isinstance(told, Begin) and self._host.drives_itself:
                        told = self._through_proxy(client, one, told)
                    await acting.tell(told)
                    said = await acting.hear()
                    if not isinstance(said, Turned | Unable):
                        said = Unable(reason="it sent nonsense")
                    await self._send(client, Heard(number=one.number, said=said))
        except EnvironmentFailedError as error:
            await self._send(client, Failed(number=one.number, reason=str(error)))
        finally:
            self._proxy.end(one.key)
            client.trajectories.pop(one.number, None)

    def _through_proxy(self, client: _Client, one: _Trajectory, begin: Begin) -> Begin:
        async def ask(call: int, path: str, body: bytes) -> None:
            await self._send(client, Asked(number=one.number, call=call, path=path, body=body))

        async def leave(call: int) -> None:
            await self._send(client, Left(number=one.number, call=call))

        one.key = self._proxy.open(ask, leave)
        return msgspec.structs.replace(begin, url=self._proxy.url, api_key=one.key)

    async def _look(self) -> None:
        while True:
            await asyncio.sleep(_LOOK_S)
            for client in list(self._clients.values()):
                if self._now() - client.heard_s > self._silence_s:
                    _log.warning(
                        "generator %s is silent for %g s: its %d trajectories end",
                        client.name,
                        self._silence_s,
                        len(client.trajectories),
                    )
                    await self._forget(client)

    async def _forget(self, client: _Client) -> None:
        self._clients.pop(client.name, None)
        tasks = [one.task for one in client.trajectories.values() if one.task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _send(self, client: _Client, message: FromServer) -> None:
        if self._socket is not None:
            with suppress(zmq.ZMQError):  # that connection is gone; it comes over another
                await self._socket.send_multipart([client.peer, encoded(message)])
