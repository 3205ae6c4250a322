"""Node 0 of an engine on several hosts: orders the others to start, fetch versions, and end."""

import asyncio
import logging
import socket
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import TypeVar

from typing_extensions import override

from slipstream.generators.config import GeneratorSettings
from slipstream.generators.nodes.membership import membership_of
from slipstream.generators.sglang.process import SglangProcess
from slipstream.generators.sglang.start_order import EngineNode
from slipstream.weightbus.hosts.explained import explained
from slipstream.weightbus.hosts.leader import HostLeader, leading
from slipstream.weightbus.hosts.membership import MOST_TEXT, HostPlace, Membership
from slipstream.weightbus.hosts.verdict import HostEnd, ended_by, verdict_of
from slipstream.wire.errors import ChildDiedError, ConfigError, PeerLostError, PublishError
from slipstream.wire.messages.followers import FetchedThere, FetchToo, HostAnswered
from slipstream.wire.messages.weightbus import ReceiveVersion, RelayAddress
from slipstream.wire.process.health import Health
from slipstream.wire.process.run_until import running, unless
from slipstream.wire.process.safe_text import one_line

T = TypeVar("T")
_log = logging.getLogger(__name__)
FAILED = "a server of the engine failed"


class EngineLeader(HostLeader):
    """Node 0's link to the others of its engine, made by ``leading_engine``."""

    def __init__(
        self, own: Membership, *, receive_timeout_s: float, on_stop: Callable[[], None]
    ) -> None:
        """Start without other nodes; ``serve`` answers them.

        Args:
            own: Membership of node 0.
            receive_timeout_s: Limit for a version to arrive on all nodes.
            on_stop: Ends this generator cleanly.

        Raises:
            ConfigError: the address is invalid.
        """
        super().__init__(own)
        self._receive_timeout_s = receive_timeout_s
        self._on_stop = on_stop
        self._is_stopping = False
        self._command_id = 0
        self._fetching: FetchToo | None = None
        self._fetched: dict[int, FetchedThere] = {}  # answers to it, by node
        self._asked: dict[int, bytes] = {}  # connection that it was sent over, by node
        self._may_be_read = False  # memory of others, until all have carried out an order

    @override
    def note_answer(self, message: FetchedThere | HostAnswered) -> None:
        if isinstance(message, HostAnswered):
            return
        member, fetching = self.book.known.get(message.node), self._fetching
        is_of_node = member is not None and member.incarnation == message.incarnation
        if is_of_node and fetching is not None and message.command_id == fetching.command_id:
            self._fetched[message.node] = message

    @override
    async def repeat_order(self, node: int) -> None:
        member, fetching = self.book.known.get(node), self._fetching
        if fetching is None or member is None or node in self._fetched:
            return
        if self._asked.get(node, member.peer) != member.peer:  # sent over a broken connection
            self._asked[node] = member.peer
            await self.send(member.peer, fetching)

    # ---- the engine ----------------------------------------------------------

    async def start(self) -> tuple[EngineNode, socket.socket]:
        """Order every node to start its ranks; return this node's part, and its listening store.

        Raises:
            ConfigError: this machine does not have the address of node 0.
        """
        address, store = await self.start_all()
        return EngineNode(0, self.place.nodes, address), store

    async def until_all_run(self) -> None:
        """Wait for the ranks of every node to run; ``watch`` notices those that end instead."""
        while self.book.not_in("running"):
            await self.next_change()

    async def watch(self) -> None:
        """Wait until another node ends, then raise; ``on_stop`` is called if one was asked to end.

        Raises:
            PeerLostError: a node has ended before its time.
        """
        while not self.book.ended:
            if self.deaf:
                raise PeerLostError(f"node 0 hears no other node any more: {self.deaf}")
            if (stopping := self.book.stopping) and not self._is_stopping:
                _log.info("%s was asked to end: the engine ends", self.names(stopping))
                self._is_stopping = True
                self._on_stop()
            await self.next_change()
        end = verdict_of(replace(self.view(FAILED), silent={}, is_final=True))
        raise PeerLostError(self.line(end or HostEnd(0, "for no known reason")))

    async def explained(self, work: Awaitable[T], process: SglangProcess) -> T:
        """Return the result of some work on this node's server; name the node that made it fail.

        Raises:
            PeerLostError: another node has ended.
            ChildDiedError: the server has ended.
            ConfigError: the server has ended at its start.
        """
        try:
            return await work
        except (ChildDiedError, ConfigError) as error:
            end = await explained(self, process.reason(), FAILED)
            if end.node:
                raise PeerLostError(self.line(end)) from error
            raise

    async def dismiss(self, error: BaseException | None, *, is_orderly: bool = False) -> None:
        """Order the other nodes to end, as this one does.

        Args:
            error: Error that ends this node.
            is_orderly: True if it was asked to end, whatever the error is.
        """
        await self.tell(ended_by(0, None if is_orderly else error))

    # ---- versions ------------------------------------------------------------

    async def fetch_too(
        self, receive: ReceiveVersion, relay: RelayAddress, *, may_be_read: bool
    ) -> int:
        """Order every other node to fetch a version; return the bytes that they fetched.

        Raises:
            PublishError: a node failed, or was late.
        """
        self._command_id += 1
        self._may_be_read = self._may_be_read or may_be_read
        order = FetchToo(
            command_id=self._command_id, receive=receive, relay=relay, may_be_read=self._may_be_read
        )
        self._fetching, self._fetched = order, {}
        self._asked = {node: member.peer for node, member in self.book.known.items()}
        try:
            async with asyncio.timeout(self._receive_timeout_s):
                for peer in self._asked.values():
                    await self.send(peer, order)
                while len(self._fetched) < self.place.nodes - 1:
                    self._refuse_failed()
                    await self.next_change()
                self._refuse_failed()
        except TimeoutError as error:
            late = [node for node in range(1, self.place.nodes) if node not in self._fetched]
            raise PublishError(
                f"{self.names(late)} did not receive {receive.manifest.version.label} in "
                f"{self._receive_timeout_s:g} s (weightbus.receive_timeout_s)"
            ) from error
        finally:
            self._fetching = None
        self._may_be_read = False
        return sum(answer.num_bytes for answer in self._fetched.values())

    def _refuse_failed(self) -> None:
        if self.book.ended:
            raise PublishError("a node of the engine has ended")
        for node, answer in self._fetched.items():
            if answer.error:
                why = one_line(answer.error, most=MOST_TEXT)
                raise PublishError(f"{self.book.named(node)}: {why}")


@asynccontextmanager
async def leading_engine(
    settings: GeneratorSettings,
    name: str,
    place: HostPlace | None,
    stop: asyncio.Event,
    health: Health,
) -> AsyncIterator[EngineLeader | None]:
    """Yield the link to the other nodes of an engine once they have come; then end them, too.

    Args:
        settings: Settings of the generator.
        name: Name of the generator.
        place: Place of node 0; None for an engine on one host, which has no such link.
        stop: Event that ends the generator cleanly and ends the wait for nodes; set if another node
            was asked to end.
        health: Gets the current wait.

    Raises:
        ConfigError: the address cannot be bound, or there is no usable key.
        PeerLostError: a node did not come in time.
    """
    if place is None:
        yield None
        return
    leader = EngineLeader(
        membership_of(settings, name, place),
        receive_timeout_s=settings.weightbus.receive_timeout_s,
        on_stop=stop.set,
    )

    def why() -> HostEnd:
        return ended_by(0, None if stop.is_set() else sys.exception())

    async with leading(leader, why) as serving, running(stop.wait()) as (stopping,):
        health.waits_for(f"the other hosts of its engine at {place.address}")
        await unless(leader.until_all_are_there(), stopping, serving)
        yield leader
