"""Runs the trajectories' environments of generators on other hosts.

Consumes: messages of generators that prove the key. Produces: one answer to each thing that a
trajectory is told, and requests of its agent. Waits for: both. A generator that is silent has lost
its trajectories; each is killed with all that it has started. The loop that receives never waits
for that, and calls a generator silent only once it has read all that was waiting.
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
from slipstream.generators.environments.messages import BeginTrajectory, Replied, Turned, Unable
from slipstream.generators.environments.remote.messages import (
    LOOK_S,
    REVISION,
    AgentAnswer,
    AgentRequest,
    Close,
    EnvironmentHello,
    EnvironmentWelcome,
    Failed,
    FromServer,
    Left,
    Open,
    Opened,
    ProcessMessage,
    Tell,
    encoded,
    to_server,
    waiting,
)
from slipstream.generators.environments.remote.proxy import PolicyProxy
from slipstream.wire.errors import ProtocolError
from slipstream.wire.messages.bounds import shortened
from slipstream.wire.process.patience import Silence
from slipstream.wire.process.rarely import Rarely

_log = logging.getLogger(__name__)
_malformed = Rarely(_log)
_unread = Rarely(_log)
_MOST_CLIENTS = 512


@dataclass(slots=True)
class _Trajectory:
    """One trajectory of a generator."""

    number: int
    told: "asyncio.Queue[BeginTrajectory | Replied]" = field(
        default_factory=lambda: asyncio.Queue(1)
    )
    task: "asyncio.Task[None] | None" = None
    key: str = ""  # of its agent at the proxy
    is_ending: bool = False

    def end(self) -> None:
        """Have its process killed, once; it takes room until that is done.

        A second cancellation would end the wait for that, not hasten it.
        """
        if not self.is_ending and self.task is not None:
            self.task.cancel()
        self.is_ending = True


@dataclass(slots=True)
class _Client:
    """One generator."""

    name: str
    peer: bytes  # its newest connection
    silence: Silence
    trajectories: dict[int, _Trajectory] = field(default_factory=dict)


class EnvironmentServer:
    """Serves an environment over an open ROUTER socket. Use it inside one event loop."""

    def __init__(
        self,
        host: EnvironmentHost,
        proxy: PolicyProxy,
        *,
        identity: str,
        most: int,
        silence_s: float,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        """Serve nobody yet; ``run`` does.

        Args:
            host: of the environment, started.
            identity: of its name and options.
            proxy: listens for agents.
            most: trajectories at a time.
            silence_s: without a sign of life, after which a generator is gone.
            now: monotonic seconds.
        """
        self._host = host
        self._proxy = proxy
        self._identity = identity
        self._most = most
        self._silence_s = silence_s
        self._now = now
        self._name = secrets.token_hex(8)
        self._clients: dict[str, _Client] = {}
        # One for each trajectory, until its process is gone.
        self._tasks: set[asyncio.Task[None]] = set()
        self._socket: zmq.asyncio.Socket | None = None

    @property
    def num_trajectories(self) -> int:
        """Trajectories that take room: under way, or about to be gone."""
        return len(self._tasks)

    async def run(self, socket: zmq.asyncio.Socket) -> None:
        """Serve until cancelled; then nothing is left of any trajectory."""
        self._socket = socket
        try:
            while True:
                async for peer, *frames in waiting(socket):
                    await self._handle(peer, frames)
                self._look()
        finally:
            for client in list(self._clients.values()):
                self._forget(client)
            await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _handle(self, peer: bytes, frames: Sequence[bytes]) -> None:
        try:
            message = to_server(frames)
        except ProtocolError as error:
            _malformed.say("a generator sent a malformed message: %s", error)
            return
        if isinstance(message, EnvironmentHello):
            await self._hello(peer, message)
            return
        client = self._clients.get(message.client)
        if client is None or client.peer != peer:
            return  # its next EnvironmentHello names what it has here, and the answer does not
        client.silence.heard()
        match message:
            case Open(number=number):
                await self._open(client, number)
            case Tell(number=number, said=said):
                if (one := client.trajectories.get(number)) is not None:
                    with suppress(asyncio.QueueFull):  # it is told one thing at a time
                        one.told.put_nowait(said)
            case AgentAnswer(number=number):
                if (one := client.trajectories.get(number)) is not None:
                    self._proxy.answered(one.key, message)
            case Close(number=number):
                if (one := client.trajectories.get(number)) is not None:
                    one.end()

    async def _hello(self, peer: bytes, message: EnvironmentHello) -> None:
        client = self._clients.get(message.client)
        if client is None:
            if len(self._clients) >= _MOST_CLIENTS:
                _unread.say("generator %s is one too many", message.client)
                return
            silence = Silence(self._silence_s, look_s=2 * LOOK_S, now=self._now)
            client = _Client(message.client, peer, silence)
            self._clients[message.client] = client
            _log.info("generator %s is there", message.client)
        client.silence.heard()
        # What was sent over another connection may be lost, and with it what it was about.
        kept = frozenset(message.open if client.peer == peer else ())
        client.peer = peer
        for number, one in client.trajectories.items():
            if number not in kept:
                one.end()
        under_way = {n for n, one in client.trajectories.items() if not one.is_ending}
        await self._send(
            client,
            EnvironmentWelcome(
                server=self._name,
                version=self._host.version,
                identity=self._identity,
                drives_itself=self._host.drives_itself,
                may_reward=self._host.may_reward,
                revision=REVISION,
                room=max(0, self._most - self.num_trajectories),
                open=tuple(number for number in message.open if number in under_way),
            ),
        )

    async def _open(self, client: _Client, number: int) -> None:
        known = client.trajectories.get(number)
        if known is not None and not known.is_ending:
            return
        if known is not None or self.num_trajectories >= self._most:
            await self._send(client, Opened(number=number, is_full=True))
            return
        one = _Trajectory(number)
        client.trajectories[number] = one
        one.task = asyncio.create_task(self._play(client, one))
        self._tasks.add(one.task)
        one.task.add_done_callback(lambda task: self._ended(client, one, task))  # never run, too
        await self._send(client, Opened(number=number))

    def _ended(self, client: _Client, one: _Trajectory, task: "asyncio.Task[None]") -> None:
        self._tasks.discard(task)
        self._proxy.end(one.key)
        client.trajectories.pop(one.number, None)

    async def _play(self, client: _Client, one: _Trajectory) -> None:
        try:
            async with self._host.trajectory() as acting:
                while True:
                    told = await one.told.get()
                    if isinstance(told, BeginTrajectory) and self._host.drives_itself:
                        told = self._through_proxy(client, one, told)
                    await acting.tell(told)
                    said = await acting.hear()
                    if not isinstance(said, Turned | Unable):
                        said = Unable(reason="it sent nonsense")
                    await self._send(client, ProcessMessage(number=one.number, said=said))
        except EnvironmentFailedError as error:
            await self._send(client, Failed(number=one.number, reason=shortened(str(error))))
        except Exception as error:  # noqa: BLE001 the other side waits for an answer
            _log.exception("a trajectory of generator %s", client.name)
            why = f"the environment server failed: {type(error).__name__}: {error}"
            await self._send(client, Failed(number=one.number, reason=shortened(why)))

    def _through_proxy(
        self, client: _Client, one: _Trajectory, begin: BeginTrajectory
    ) -> BeginTrajectory:
        async def ask(call: int, path: str, body: bytes) -> None:
            await self._send(
                client, AgentRequest(number=one.number, call=call, path=path, body=body)
            )

        async def leave(call: int) -> None:
            await self._send(client, Left(number=one.number, call=call))

        self._proxy.end(one.key)  # it was begun before
        one.key = self._proxy.open(ask, leave)
        return msgspec.structs.replace(begin, url=self._proxy.url, api_key=one.key)

    def _look(self) -> None:
        for client in list(self._clients.values()):
            if client.silence.is_over():
                _log.warning(
                    "generator %s is silent for %g s: its %d trajectories end",
                    client.name,
                    self._silence_s,
                    len(client.trajectories),
                )
                self._forget(client)

    def _forget(self, client: _Client) -> None:
        self._clients.pop(client.name, None)
        for one in client.trajectories.values():
            one.end()

    async def _send(self, client: _Client, message: FromServer) -> None:
        """Send at once; what a generator does not take, or no longer, ends all it has here."""
        if self._socket is None:
            return
        try:
            await self._socket.send_multipart([client.peer, *encoded(message)], flags=zmq.NOBLOCK)
        except zmq.ZMQError as error:
            _unread.say("generator %s does not take its messages: %s", client.name, error)
            for one in client.trajectories.values():
                one.end()
