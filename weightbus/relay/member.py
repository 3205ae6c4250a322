"""One engine on the weight bus: its state, known to the relay, and commands to its agent."""

import asyncio
import itertools
import secrets
import time
from collections.abc import Callable
from typing import Literal

import msgspec
import zmq

from slipstream.weightbus.net.router import MessageRouter
from slipstream.weightbus.net.traffic import Traffic
from slipstream.weightbus.relay.host_fetches import HostEngine
from slipstream.weightbus.relay.host_sharing import HostSharing
from slipstream.wire.errors import PublishError
from slipstream.wire.messages.codec import encode
from slipstream.wire.messages.versions import PolicyVersion
from slipstream.wire.messages.weightbus import (
    PUBLISH_PHASES,
    BulkDoor,
    BusMessage,
    CommandOutcome,
    Join,
    JoinAcknowledged,
)
from slipstream.wire.process.safe_text import one_line

State = Literal["current", "behind", "receiving", "torn"]
PROBE_S = 0.25  # interval between probes of a member that does not answer
_MOST_REASON = 500  # characters, as the broker shows
_MOST_DIGEST = 100
_MOST = 1e15  # limit of a figure
_command_ids = itertools.count(secrets.randbits(48))  # differ from those of an earlier relay


class Member:
    """One engine as its agent described it last. Its agent carries out one command at a time."""

    def __init__(
        self,
        peer: bytes,
        join: Join,
        router: MessageRouter,
        *,
        name: str,
        relay: str = "",
        key: str = "",
        transport: str,
        timeout_s: float,
        bulk: BulkDoor | None = None,
        traffic: Traffic | None = None,
        host: str = "",
        sharing: HostSharing | None = None,
    ) -> None:
        self.name = name
        self.bulk = bulk  # this relay's door for it
        self.before: Member | None = None  # its source in a chain, for the version it receives
        self.on_host = HostEngine(host)  # state among the engines of its host
        self._sharing = sharing
        self.first_part = 0  # first part to fetch of a version; in a chain the same for all
        self.serves: Member | None = None  # member behind it, admitted at its door
        self.num_commands = 0
        self._traffic = traffic or Traffic()
        self._relay = relay  # incarnation of this relay
        self.key = key  # key that it proved; empty on this host
        self.peer = peer  # routing id of its agent
        self.join = join
        self.transport = transport
        self.adopted: PolicyVersion | None = join.adopted
        self.since_s = time.time()  # unix time
        self.receiving: PolicyVersion | None = None
        self.failure = ""  # reason that its last publish failed
        self.num_publishes = 0
        self.is_checked = True  # in its current publish
        self.router = router
        self._timeout_s = timeout_s
        self._waiting: dict[int, asyncio.Future[CommandOutcome]] = {}
        self._waits_since_s = 0.0  # start of the first wait
        self._gone = ""

    @property
    def place(self) -> tuple[MessageRouter, bytes]:
        """Its agent's connection."""
        return self.router, self.peer

    def state(self, newest: PolicyVersion | None) -> State:
        """Return its state compared with the newest version."""
        if self.receiving is not None:
            return "receiving"
        if self.adopted is None:
            return "torn" if self.failure else "behind"
        return "current" if self.adopted == newest else "behind"

    def heartbeat(self, join: Join) -> None:
        """Record a heartbeat."""
        if self.receiving is None and self.adopted != join.adopted:
            self.holds(join.adopted)  # the engine returned to its previous version, or lost it

    def holds(self, version: PolicyVersion | None) -> None:
        """Record the version of its engine; None if it may hold a mixture."""
        self.adopted = version
        self.since_s = time.time()

    def take(self, outcome: CommandOutcome) -> None:
        """Deliver an outcome to the caller that waits for it."""
        future = self._waiting.get(outcome.command_id)
        if future is not None and not future.done():
            future.set_result(bounded(outcome))

    def leave(self, why: str) -> None:
        """Fail all pending commands: the agent will not answer."""
        self._gone = why
        self._fail(PublishError(f"{self.name} {why}"))

    # ---- other engines of its host --------------------------------------------

    async def source(self) -> str:
        """Return another engine's file to map; empty if it is to fetch. Waits for that engine."""
        return await self._sharing.source(self.on_host) if self._sharing is not None else ""

    def fetched(self, path: str) -> None:
        """Let others of its host map the file with what its agent has fetched."""
        if self._sharing is not None:
            self._sharing.fetched(self.on_host, path)

    # ---- commands ------------------------------------------------------------

    async def request(
        self, command: Callable[[int], BusMessage], *, timeout_s: float | None = None
    ) -> CommandOutcome:
        """Send a command and return its outcome.

        Raises:
            PublishError: it failed, or was not answered in time.
        """
        what = type(command(0)).__name__.removeprefix("Encoded")
        return await self.outcome(self.send(command), what, timeout_s=timeout_s)

    def send(self, command: Callable[[int], BusMessage]) -> asyncio.Future[CommandOutcome]:
        """Send a command; return a future of its outcome.

        Raises:
            PublishError: the agent's connection does not exist.
        """
        if self._gone:
            raise PublishError(f"{self.name} {self._gone}")
        number = next(_command_ids)
        self._transmit(command(number))
        future: asyncio.Future[CommandOutcome] = asyncio.get_running_loop().create_future()
        if not self._waiting:
            self._waits_since_s = time.monotonic()
        self._waiting[number] = future
        future.add_done_callback(lambda done: self._forget(number, done))
        self.num_commands += 1
        self._traffic.commands += 1
        return future

    def _transmit(self, message: BusMessage) -> None:
        try:
            self.router.send(self.peer, encode(message))
        except zmq.ZMQError as error:  # ROUTER_MANDATORY: not dropped silently
            raise PublishError(f"{self.name} has gone") from error

    def _forget(self, number: int, done: asyncio.Future[CommandOutcome]) -> None:
        self._waiting.pop(number, None)
        if not done.cancelled():
            done.exception()  # retrieved, as the caller may be gone

    async def outcome(
        self, future: asyncio.Future[CommandOutcome], what: str, *, timeout_s: float | None = None
    ) -> CommandOutcome:
        """Return the outcome of a command that was sent.

        Raises:
            PublishError: it failed, or did not arrive in time.
        """
        setting = "weightbus.timeout_s" if timeout_s is None else "weightbus.receive_timeout_s"
        limit_s = timeout_s or self._timeout_s
        try:
            async with asyncio.timeout(limit_s):
                outcome = await future  # cancelled at the limit: a later outcome has no use
        except TimeoutError as error:
            raise PublishError(
                f"{self.name} did not answer {what} in {limit_s:g} s ({setting})"
            ) from error
        if outcome.error:
            raise PublishError(f"{what}: {outcome.error}")
        return outcome

    def is_overdue(self, now_s: float) -> bool:
        """True if an outcome has been awaited for ``PROBE_S``, at a monotonic time."""
        return bool(self._waiting) and now_s - self._waits_since_s >= PROBE_S

    def probe(self) -> None:
        """Fail all pending commands if the agent's connection is gone."""
        try:
            self._transmit(JoinAcknowledged(relay=self._relay))
        except PublishError as error:
            self._fail(error)

    def _fail(self, error: PublishError) -> None:
        for future in list(self._waiting.values()):
            if not future.done():
                future.set_exception(error)


def bounded(outcome: CommandOutcome) -> CommandOutcome:
    """Return an outcome with texts and figures bounded to what an agent has reason to send.

    An agent's outcomes go into records. A record too large for the broker would block all others,
    and with them the news of revoked keys for this relay.
    """
    seconds = outcome.phase_seconds
    return msgspec.structs.replace(
        outcome,
        error=one_line(outcome.error, most=_MOST_REASON),
        digest=outcome.digest[:_MOST_DIGEST],
        num_bytes=_figure(outcome.num_bytes),
        num_in_flight=_figure(outcome.num_in_flight),
        phase_seconds={
            phase: seconds[phase] for phase in PUBLISH_PHASES if 0 <= seconds.get(phase, -1) < _MOST
        },
    )


def _figure(value: int) -> int:
    return value if 0 <= value < _MOST else 0
