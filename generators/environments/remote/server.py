"""Runs the trajectories' environments of generators on other hosts.

Consumes: messages of generators that prove the key. Produces: one answer to each message for a
trajectory, and requests of its agent. Waits for: both. A silent generator has lost its
trajectories; each is killed with all that it has started. The loop that receives never waits for
that, and calls a generator silent only once it has read all waiting messages.
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
from slipstream.wire.process.rate_limited_log import RateLimitedLog

_log = logging.getLogger(__name__)
_malformed = RateLimitedLog(_log)
_unread = RateLimitedLog(_log)
_MOST_CLIENTS = 512


@dataclass(slots=True)
class _Trajectory:
    """One trajectory of a generator."""

    number: int
    received: "asyncio.Queue[BeginTrajectory | Replied]" = field(
        default_factory=lambda: asyncio.Queue(1)
    )
    task: "asyncio.Task[None] | None" = None
    key: str = ""  # key of its agent at the proxy
    is_ending: bool = False

    def end(self) -> None:
        """Kill its process, once; the trajectory takes room until that is done.

        A second cancellation would end the wait for its end.
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
        """Prepare to serve; ``run`` serves.

        Args:
            host: Runs the environment's processes.
            proxy: Listens for agents.
            identity: Identity of the environment's name and options.
            most: Most trajectories at a time.
            silence_s: Time without a sign of life after which a generator is gone.
            now: Returns monotonic seconds.
        """
        self._host = host
        self._proxy = proxy
        self._identity = identity
        self._most = most
        self._silence_s = silence_s
        self._now = now
        self._name = secrets.token_hex(8)
        self._clients: dict[str, _Client] = {}
        # A task for each trajectory, until its process is gone.
        self._tasks: set[asyncio.Task[None]] = set()
        self._socket: zmq.asyncio.Socket | None = None

    @property
    def num_trajectories(self) -> int:
        """Trajectories that take room: under way, or ending."""
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
            return  # the answer to its next hello will not list its trajectories here
        client.silence.heard()
        match message:
            case Open(number=number):
                await self._open(client, number)
            case Tell(number=number, message=sent):
                if (trajectory := client.trajectories.get(number)) is not None:
                    with suppress(asyncio.QueueFull):  # one message at a time
                        trajectory.received.put_nowait(sent)
            case AgentAnswer(number=number):
                if (trajectory := client.trajectories.get(number)) is not None:
                    self._proxy.answered(trajectory.key, message)
            case Close(number=number):
                if (trajectory := client.trajectories.get(number)) is not None:
                    trajectory.end()

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
        # Messages over another connection may be lost, and so are their trajectories.
        kept = frozenset(message.open if client.peer == peer else ())
        client.peer = peer
        for number, trajectory in client.trajectories.items():
            if number not in kept:
                trajectory.end()
        under_way = {n for n, known in client.trajectories.items() if not known.is_ending}
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
        trajectory = _Trajectory(number)
        client.trajectories[number] = trajectory
        task = trajectory.task = asyncio.create_task(self._play(client, trajectory))
        self._tasks.add(task)
        # Also called for a task that never ran.
        task.add_done_callback(lambda task: self._ended(client, trajectory, task))
        await self._send(client, Opened(number=number))

    def _ended(self, client: _Client, trajectory: _Trajectory, task: "asyncio.Task[None]") -> None:
        self._tasks.discard(task)
        self._proxy.end(trajectory.key)
        client.trajectories.pop(trajectory.number, None)

    async def _play(self, client: _Client, trajectory: _Trajectory) -> None:
        number = trajectory.number
        try:
            async with self._host.trajectory() as process:
                while True:
                    received = await trajectory.received.get()
                    if isinstance(received, BeginTrajectory) and self._host.drives_itself:
                        received = self._through_proxy(client, trajectory, received)
                    await process.tell(received)
                    answer = await process.hear()
                    if not isinstance(answer, Turned | Unable):
                        answer = Unable(reason="it sent nonsense")
                    await self._send(client, ProcessMessage(number=number, message=answer))
        except EnvironmentFailedError as error:
            await self._send(client, Failed(number=number, reason=shortened(str(error))))
        except Exception as error:  # noqa: BLE001 the other side waits for an answer
            _log.exception("a trajectory of generator %s", client.name)
            reason = f"the environment server failed: {type(error).__name__}: {error}"
            await self._send(client, Failed(number=number, reason=shortened(reason)))

    def _through_proxy(
        self, client: _Client, trajectory: _Trajectory, begin: BeginTrajectory
    ) -> BeginTrajectory:
        number = trajectory.number

        async def ask(call: int, path: str, body: bytes) -> None:
            await self._send(client, AgentRequest(number=number, call=call, path=path, body=body))

        async def leave(call: int) -> None:
            await self._send(client, Left(number=number, call=call))

        self._proxy.end(trajectory.key)  # key of an earlier begin
        trajectory.key = self._proxy.open(ask, leave)
        return msgspec.structs.replace(begin, url=self._proxy.url, api_key=trajectory.key)

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
        for trajectory in client.trajectories.values():
            trajectory.end()

    async def _send(self, client: _Client, message: FromServer) -> None:
        """Send at once; a generator that does not take a message loses its trajectories."""
        if self._socket is None:
            return
        try:
            await self._socket.send_multipart([client.peer, *encoded(message)], flags=zmq.NOBLOCK)
        except zmq.ZMQError as error:
            _unread.say("generator %s does not take its messages: %s", client.name, error)
            for trajectory in client.trajectories.values():
                trajectory.end()
