"""A generator's link to environment servers on other hosts.

Trajectories go to the server with the most room, or wait for room. A server without a sign of life
has lost them: they fail with that reason, and begin anew like others.
"""

import asyncio
import itertools
import logging
import secrets
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import zmq
import zmq.asyncio

from slipstream.generators.environments.host import EnvironmentFailedError, EnvironmentLostError
from slipstream.generators.environments.messages import (
    BeginTrajectory,
    FromEnvironment,
    ToEnvironment,
    Turned,
    Unable,
)
from slipstream.generators.environments.remote.messages import (
    LOOK_S,
    MAX_BYTES,
    MOST_CALLS,
    REVISION,
    SIGN_S,
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
    ToServer,
    encoded,
    from_server,
    waiting,
)
from slipstream.weightbus.net.curve import connect
from slipstream.weightbus.net.listening import endpoint_of
from slipstream.wire.errors import ConfigError, PeerLostError, ProtocolError
from slipstream.wire.files.keys import ClientKey
from slipstream.wire.process.patience import Patience, Silence
from slipstream.wire.process.rate_limited_log import RateLimitedLog
from slipstream.wire.settings.rendezvous import Address

_log = logging.getLogger(__name__)
_malformed = RateLimitedLog(_log)
_waits = RateLimitedLog(_log)
_LINGER_MS = 1_000
_MAX_WAITING = 1_024  # messages to a server that does not read
_PART_BYTES = 1 << 16  # largest part of an answer to an agent
_SETTING = "environment.servers"


@dataclass(slots=True)
class RemoteActing:
    """The process of one trajectory, on another host."""

    number: int
    server: "_Server"
    opened: "asyncio.Future[bool]"
    """True once it has begun; False if there was no room."""
    received: "asyncio.Queue[Turned | Unable | EnvironmentFailedError]" = field(
        default_factory=lambda: asyncio.Queue(2)
    )
    url: str = ""  # endpoint of the policy here, for an agent there
    api_key: str = ""
    calls: "dict[int, asyncio.Task[None]]" = field(default_factory=dict)

    async def tell(self, message: ToEnvironment) -> None:
        """Send a message to the process."""
        if isinstance(message, BeginTrajectory):
            self.url, self.api_key = message.url, message.api_key
        await self.server.send(Tell(client=self.server.client, number=self.number, message=message))

    async def hear(self) -> FromEnvironment:
        """Return the next message of the process.

        Raises:
            EnvironmentFailedError: no message comes.
        """
        message = await self.received.get()
        if isinstance(message, EnvironmentFailedError):
            raise message
        return message

    def take(self, message: "Turned | Unable | EnvironmentFailedError") -> None:
        """Keep a message or an error of the process, which sends one at a time."""
        if not self.opened.done() and isinstance(message, EnvironmentFailedError):
            self.opened.set_result(False)
        with suppress(asyncio.QueueFull):
            self.received.put_nowait(message)


class _Server:
    """One environment server."""

    def __init__(self, address: Address, key: ClientKey, client: str, silence: Silence) -> None:
        self.address = address
        self.silence = silence
        self.client = client
        self.incarnation = ""  # process that answered; empty without an answer
        self.welcome: EnvironmentWelcome | None = None
        self.refused = ""  # reason why it is not used
        self.reported: tuple[int, ...] = ()  # trajectories in the newest hello
        self.room = 0  # number of further trajectories, as far as it is known
        self.acting: dict[int, RemoteActing] = {}
        self._key = key
        self._socket: zmq.asyncio.Socket | None = None

    def open(self, context: zmq.asyncio.Context) -> zmq.asyncio.Socket:
        endpoint = endpoint_of(self.address, named=_SETTING)
        link = context.socket(zmq.DEALER)
        link.setsockopt(zmq.LINGER, _LINGER_MS)
        link.setsockopt(zmq.SNDHWM, _MAX_WAITING)
        link.setsockopt(zmq.MAXMSGSIZE, MAX_BYTES)
        connect(link, endpoint, server_key=self._key.public, key=self._key)
        self._socket = link
        return link

    async def send(self, message: ToServer) -> None:
        """Send at once, or not at all: the next welcome shows what the server missed."""
        if self._socket is not None:
            with suppress(zmq.ZMQError):
                await self._socket.send_multipart(encoded(message), flags=zmq.NOBLOCK)

    def fail_all(self, reason: str) -> None:
        for acting in self.acting.values():
            acting.take(EnvironmentLostError(f"environment server {self.address}: {reason}"))


class EnvironmentServers:
    """Servers of one environment. Make one with ``start``; close it."""

    def __init__(
        self,
        addresses: Sequence[Address],
        key: ClientKey,
        *,
        identity: str,
        silence_s: float,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        """Prepare; ``start`` connects."""
        self._identity = identity
        self._changed = asyncio.Event()
        self.version = ""
        self.drives_itself = False
        self.may_reward = True
        self.replaced: Counter[str] = Counter()  # lost servers
        self._silence_s = silence_s
        self._client = secrets.token_hex(8)
        self._servers = [
            _Server(address, key, self._client, Silence(silence_s, look_s=2 * LOOK_S, now=now))
            for address in addresses
        ]
        self._numbers = itertools.count(1)
        self._tasks: set[asyncio.Task[None]] = set()
        self._context = zmq.asyncio.Context()
        self._http: aiohttp.ClientSession | None = None

    @classmethod
    async def start(
        cls,
        addresses: Sequence[Address],
        key: ClientKey,
        *,
        identity: str,
        silence_s: float,
        patience_s: float,
    ) -> "EnvironmentServers":
        """Connect, and wait for at least one server.

        Args:
            addresses: Addresses of the servers.
            key: Key that both sides prove.
            identity: Identity of the environment and its options, which servers must have.
            silence_s: Time without a sign of life after which a server is gone.
            patience_s: Wait for the first server.

        Raises:
            ConfigError: an address is wrong, or servers serve different environments.
            PeerLostError: no server answers.
        """
        servers = cls(addresses, key, identity=identity, silence_s=silence_s)
        try:
            servers._http = aiohttp.ClientSession(
                # The endpoint counts connections by trajectory: two must not share one.
                connector=aiohttp.TCPConnector(limit=0, force_close=True),
                timeout=aiohttp.ClientTimeout(total=None),
            )
            for server in servers._servers:
                servers._in_background(servers._read(server, server.open(servers._context)))
                servers._in_background(servers._give_signs(server))
            await servers._until_first_answer(patience_s)
        except BaseException:
            await servers.close()
            raise
        return servers

    @asynccontextmanager
    async def trajectory(self) -> AsyncIterator[RemoteActing]:
        """Yield the process of a trajectory once a server has room; end it there afterwards.

        Raises:
            EnvironmentLostError: its server was lost.
        """
        acting = await self._begun()
        try:
            yield acting
        finally:
            await self._leave(acting)

    async def _begun(self) -> RemoteActing:
        """Return a trajectory that has begun on the server with the most room."""
        while True:
            server = max(self._servers, key=lambda known: known.room if known.incarnation else 0)
            if not server.incarnation or server.room <= 0:
                _waits.say("trajectories wait for room on an environment server (%s)", _SETTING)
                self._changed.clear()
                await self._changed.wait()
                continue
            acting = RemoteActing(
                next(self._numbers), server, asyncio.get_running_loop().create_future()
            )
            server.acting[acting.number] = acting
            server.room -= 1
            try:
                await server.send(Open(client=self._client, number=acting.number))
                if await acting.opened:
                    return acting
            except BaseException:
                await self._leave(acting)
                raise
            server.room = 0  # until its next welcome
            await self._leave(acting)

    async def _leave(self, acting: RemoteActing) -> None:
        acting.server.acting.pop(acting.number, None)
        for call in list(acting.calls.values()):
            call.cancel()
        await acting.server.send(Close(client=self._client, number=acting.number))

    async def close(self) -> None:
        """Hang up; the servers end what is under way."""
        for server in self._servers:
            server.fail_all("the generator ends")
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._http is not None:
            await self._http.close()
        self._context.destroy(linger=_LINGER_MS)

    # ---- signs of life -----------------------------------------------------------

    async def _until_first_answer(self, patience_s: float) -> None:
        addresses = ", ".join(str(server.address) for server in self._servers)
        patience = Patience(f"an environment server at {addresses}", patience_s, log=_log.info)
        while not any(server.incarnation for server in self._servers):
            if patience.is_over():
                raise PeerLostError(
                    f"no environment server answers at {addresses} ({_SETTING}) with the key of "
                    "environment.key_file: start it with start-environment"
                )
            if all(server.refused for server in self._servers):
                raise ConfigError(self._servers[0].refused)
            await asyncio.sleep(0.05)

    async def _give_signs(self, server: _Server) -> None:
        while True:
            server.reported = tuple(server.acting)
            await server.send(
                EnvironmentHello(client=self._client, revision=REVISION, open=server.reported)
            )
            await asyncio.sleep(SIGN_S)

    def _lost(self, server: _Server, reason: str) -> None:
        _log.error("environment server %s: %s", server.address, reason)
        self.replaced["server"] += 1
        server.incarnation = ""
        server.room = 0
        server.fail_all(reason)

    def _welcomed(self, server: _Server, welcome: EnvironmentWelcome) -> None:
        reason = self._refusal(server, welcome)
        if reason and not server.refused:
            _log.error("environment server %s is not used: %s", server.address, reason)
        named = f"environment server {server.address}"
        server.refused = f"{named}: {reason} ({_SETTING})" if reason else ""
        if server.incarnation and (reason or server.incarnation != welcome.server):
            self._lost(server, reason or "it was restarted")
        if reason:
            return
        self.version, self.drives_itself = welcome.version, welcome.drives_itself
        self.may_reward = welcome.may_reward
        server.welcome, server.incarnation = welcome, welcome.server
        server.room = welcome.room
        for number in server.reported:
            if number not in welcome.open and (acting := server.acting.get(number)) is not None:
                acting.take(EnvironmentLostError(f"{named} no longer has this trajectory"))
        self._changed.set()

    def _refusal(self, server: _Server, welcome: EnvironmentWelcome) -> str:
        """Return why a server cannot be used; empty if it can."""
        if welcome.revision != REVISION:
            return (
                f"it speaks revision {welcome.revision} of the protocol, expected {REVISION}: "
                "install the same version there"
            )
        if welcome.identity != self._identity:
            return (
                "it serves another environment, or the same with other options: start it with the "
                "settings of this run (environment.function, environment.options)"
            )
        welcomes = (
            other.welcome for other in self._servers if other.incarnation and other is not server
        )
        used = next(filter(None, welcomes), welcome)
        if (used.version, used.drives_itself) != (welcome.version, welcome.drives_itself):
            return (
                f"it serves version {welcome.version} of the environment, and others serve "
                f"{used.version}"
            )
        return ""

    # ---- messages ------------------------------------------------------------------

    async def _read(self, server: _Server, link: zmq.asyncio.Socket) -> None:
        """Handle messages; a server is silent only once all waiting messages were read."""
        while True:
            async for frames in waiting(link):
                self._take(server, frames)
            if server.silence.is_over() and server.incarnation:
                self._lost(server, f"silent for {self._silence_s:g} s")

    def _take(self, server: _Server, frames: Sequence[bytes]) -> None:
        try:
            message = from_server(frames)
        except ProtocolError as error:
            _malformed.say("an environment server sent a malformed message: %s", error)
            return
        server.silence.heard()
        self._handle(server, message)

    def _handle(self, server: _Server, message: FromServer) -> None:
        if isinstance(message, EnvironmentWelcome):
            self._welcomed(server, message)
            return
        acting = server.acting.get(message.number)
        if acting is None:
            return
        match message:
            case Opened(is_full=is_full):
                if not acting.opened.done():
                    acting.opened.set_result(not is_full)
            case ProcessMessage(message=sent):
                acting.take(sent)
            case Failed(reason=reason):
                acting.take(EnvironmentFailedError(reason))
            case AgentRequest():
                if message.call not in acting.calls and len(acting.calls) < MOST_CALLS:
                    asking = self._in_background(self._ask(acting, message))
                    acting.calls[message.call] = asking
                    asking.add_done_callback(lambda _: acting.calls.pop(message.call, None))
            case Left(call=call):
                if (waiting := acting.calls.get(call)) is not None:
                    waiting.cancel()

    async def _ask(self, acting: RemoteActing, asked: AgentRequest) -> None:
        """Carry a request to the endpoint here, and its answer back."""
        method, _, path = asked.path.partition(" ")
        headers = {"Authorization": f"Bearer {acting.api_key}", "Content-Type": "application/json"}

        async def part(body: bytes, **more: Any) -> None:  # noqa: ANN401 fields
            await acting.server.send(
                AgentAnswer(
                    client=self._client, number=acting.number, call=asked.call, body=body, **more
                )
            )

        if self._http is None or method not in {"GET", "POST"} or ".." in path:
            await part(b"", status=405, content_type="application/json", is_last=True)
            return
        try:
            asking = self._http.request(
                method, f"{acting.url}/{path}", data=asked.body or None, headers=headers
            )
            async with asking as answer:
                await part(b"", status=answer.status, content_type=answer.content_type)
                async for body in answer.content.iter_chunked(_PART_BYTES):
                    await part(body)
            await part(b"", is_last=True)
        except (aiohttp.ClientError, OSError, ValueError) as error:
            _log.warning("an agent's request was not answered: %s", error)
            await part(b"", status=503, content_type="application/json", is_last=True)

    def _in_background(self, job: Coroutine[Any, Any, None]) -> "asyncio.Task[None]":
        task = asyncio.get_running_loop().create_task(job)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task
