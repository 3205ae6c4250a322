"""One engine on the weight bus: what is known of it, and what its agent is told to do."""

import asyncio
import itertools
import secrets
import time
from collections.abc import Callable
from typing import Literal

import zmq
import zmq.asyncio

from slipstream.wire.errors import PublishError
from slipstream.wire.messages.codec import encode
from slipstream.wire.messages.versions import PolicyVersion
from slipstream.wire.messages.weightbus import Command, Heard, Join, Outcome

State = Literal["current", "behind", "receiving", "torn"]
_PROBE_S = 0.25  # a member that does not answer is looked for this often
_command_ids = itertools.count(secrets.randbits(48))  # no outcome meant for another relay fits


class Member:
    """One engine as its agent described it last. Its agent carries out one command at a time."""

    def __init__(
        self,
        peer: bytes,
        join: Join,
        socket: zmq.asyncio.Socket,
        *,
        name: str,
        relay: str = "",
        key: str = "",
        transport: str,
        timeout_s: float,
    ) -> None:
        self.name = name
        self._relay = relay  # what the relay calls itself
        self.key = key  # that it proved; empty on this host
        self.peer = peer  # routing id of its agent
        self.join = join
        self.transport = transport
        self.adopted: PolicyVersion | None = join.adopted
        self.since_s = time.time()  # unix time since which it holds that
        self.receiving: PolicyVersion | None = None
        self.failure = ""  # of its last publish
        self.num_publishes = 0
        self._socket = socket
        self._timeout_s = timeout_s
        self._waiting: dict[int, asyncio.Future[Outcome]] = {}
        self._gone = ""

    def is_at(self, peer: bytes, socket: zmq.asyncio.Socket) -> bool:
        """Tell whether a message came from its agent."""
        return self.peer == peer and self._socket is socket

    def state(self, newest: PolicyVersion | None) -> State:
        """Return what is going on with it."""
        if self.receiving is not None:
            return "receiving"
        if self.adopted is None:
            return "torn" if self.failure else "behind"
        return "current" if self.adopted == newest else "behind"

    def heard(self, peer: bytes, join: Join) -> None:
        """Take note of a heartbeat."""
        self.peer = peer
        if self.receiving is None and self.adopted != join.adopted:
            self.holds(join.adopted)  # it went back to what it had, or has lost it

    def holds(self, version: PolicyVersion | None) -> None:
        """Note which version its engine runs; None if it may hold a mixture."""
        self.adopted = version
        self.since_s = time.time()

    def take(self, outcome: Outcome) -> None:
        """Hand an outcome to whoever waits for it."""
        future = self._waiting.get(outcome.command_id)
        if future is not None and not future.done():
            future.set_result(outcome)

    def leave(self, why: str) -> None:
        """End at once whatever is going on with this member: its agent will not answer."""
        self._gone = why
        for future in list(self._waiting.values()):
            if not future.done():
                future.set_exception(PublishError(f"{self.name} {why}"))

    # ---- commands ------------------------------------------------------------

    async def tell(
        self, command: Callable[[int], Command], *, timeout_s: float | None = None
    ) -> Outcome:
        """Have a command carried out; return how that went.

        Raises:
            PublishError: it failed, or was not answered in time.
        """
        what = type(command(0)).__name__
        return await self.outcome(await self.send(command), what, timeout_s=timeout_s)

    async def send(self, command: Callable[[int], Command]) -> asyncio.Future[Outcome]:
        """Send a command; its outcome comes later."""
        if self._gone:
            raise PublishError(f"{self.name} {self._gone}")
        number = next(_command_ids)
        future: asyncio.Future[Outcome] = asyncio.get_running_loop().create_future()
        self._waiting[number] = future
        future.add_done_callback(lambda done: self._forget(number, done))
        await self._say(command(number))
        return future

    async def _say(self, command: Command) -> None:
        try:
            await self._socket.send_multipart([self.peer, encode(command)])
        except zmq.ZMQError as error:  # the socket says so, rather than dropping it
            raise PublishError(f"{self.name} has gone") from error

    def _forget(self, number: int, done: asyncio.Future[Outcome]) -> None:
        self._waiting.pop(number, None)
        if not done.cancelled():
            done.exception()  # it may be that nobody waits any more

    async def outcome(
        self, future: asyncio.Future[Outcome], what: str, *, timeout_s: float | None = None
    ) -> Outcome:
        """Return the outcome of a command that was sent.

        Raises:
            PublishError: it failed, or is not there in time.
        """
        setting = "weightbus.timeout_s" if timeout_s is None else "weightbus.receive_timeout_s"
        limit_s = timeout_s or self._timeout_s
        try:
            async with asyncio.timeout(limit_s):
                await self._look_for(future)
        except TimeoutError as error:
            future.cancel()  # an outcome that comes later is of no use
            raise PublishError(
                f"{self.name} did not answer {what} in {limit_s:g} s ({setting})"
            ) from error
        outcome = future.result()
        if outcome.error:
            raise PublishError(f"{what}: {outcome.error}")
        return outcome

    async def _look_for(self, future: asyncio.Future[Outcome]) -> None:
        """Wait for an outcome, as long as there is somebody who may send it."""
        while not (await asyncio.wait({future}, timeout=_PROBE_S))[0]:
            try:
                await self._say(Heard(relay=self._relay))
            except PublishError:
                future.cancel()
                raise
