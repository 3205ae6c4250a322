"""Node 0 of a role on several hosts: lets the others begin together, and end together."""

import asyncio
import logging
import secrets
import socket
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress

import zmq
import zmq.asyncio

from slipstream.weightbus.hosts.book import HostBook
from slipstream.weightbus.hosts.membership import LINGER_MS, LONGEST_WAIT_S, MOST_TEXT, Membership
from slipstream.weightbus.hosts.verdict import EXPLAIN_S, HostEnd, HostView
from slipstream.weightbus.net.curve import MAX_BYTES, LeaderListener
from slipstream.weightbus.net.listening import endpoint_of, listen_at
from slipstream.wire.errors import ConfigError, PeerLostError, ProtocolError
from slipstream.wire.messages.codec import decode_to_leader, encode
from slipstream.wire.messages.followers import (
    EndNode,
    FetchedThere,
    HostAnswered,
    StartNode,
    ToFollower,
)
from slipstream.wire.messages.pieces import joined_message
from slipstream.wire.process.patience import Patience
from slipstream.wire.process.rate_limited_log import RateLimitedLog
from slipstream.wire.process.run_until import running
from slipstream.wire.process.safe_text import one_line
from slipstream.wire.settings.rendezvous import Address

_log = logging.getLogger(__name__)
_malformed = RateLimitedLog(_log)
_LOOK_S = 0.25
_END_S = 10.0  # wait for the other nodes to end


class HostLeader:
    """Node 0's link to the others. Use it inside one event loop, served by ``leading``."""

    def __init__(self, own: Membership, *, now: Callable[[], float] = time.monotonic) -> None:
        """Start without other nodes; ``serve`` answers them.

        Args:
            own: Membership of node 0.
            now: Returns monotonic seconds.

        Raises:
            ConfigError: the address is invalid.
        """
        self.own = own
        self.place = own.place
        self.now = now
        host = socket.gethostname()
        self.book = HostBook(own, leader=secrets.token_hex(4), host=host, now_s=now())
        endpoint = endpoint_of(own.place.address, named="--rendezvous")
        self._listener = LeaderListener(
            endpoint, own.key, setting=f"--rendezvous of {self.book.named(0)}"
        )
        if own.admitted:
            self._listener.admit(own.admitted)
        self._socket: zmq.asyncio.Socket | None = None
        self._changed = asyncio.Event()
        self.is_finished = False  # the others were ordered to end
        self.deaf = ""  # reason that no messages of nodes are read any more

    def open(self, context: zmq.asyncio.Context) -> zmq.asyncio.Socket:
        """Listen; return the socket.

        Raises:
            ConfigError: the address cannot be bound.
        """
        self._socket = self._listener.open(context)
        return self._socket

    def close(self) -> None:
        """Stop listening; the last messages may still leave."""
        self._socket = None
        self._listener.close(LINGER_MS)

    async def serve(self, link: zmq.asyncio.Socket) -> None:
        """Answer the other nodes over an open socket until cancelled."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._read(link))
            group.create_task(self._look())

    def deafened(self, serving: "asyncio.Task[object]") -> None:
        """End all waits for nodes: no messages are read any more; called when ``serve`` ends."""
        if not serving.cancelled() and (why := serving.exception()) is not None:
            self.deaf = repr(why)
            self._wake()

    async def _read(self, link: zmq.asyncio.Socket) -> None:
        while True:
            peer, *frames = await link.recv_multipart()
            try:
                message = decode_to_leader(joined_message(frames, most_bytes=MAX_BYTES))
            except ProtocolError as error:
                _malformed.say("another node sent a malformed message: %s", error)
                continue
            if isinstance(message, FetchedThere | HostAnswered):
                self.note_answer(message)
            elif (answer := self.book.heard(peer, message)) is not None:
                await self.send(peer, answer)
                await self.repeat_order(message.node)
            self._wake()

    def note_answer(self, message: FetchedThere | HostAnswered) -> None:
        """Note the answer to an order of a role's own."""

    async def repeat_order(self, node: int) -> None:
        """Repeat an order of a role's own that may be lost."""

    async def _look(self) -> None:
        while True:
            self.book.look(self.now())
            self._wake()
            await asyncio.sleep(_LOOK_S)

    def _wake(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    async def send(self, peer: bytes, message: ToFollower) -> None:
        """Send a message over a connection, if there is one."""
        if self._socket is not None:
            with suppress(zmq.ZMQError):  # the connection is gone; the node comes over another
                await self._socket.send_multipart([peer, encode(message)])

    async def _tell_all(self, message: ToFollower) -> None:
        for member in list(self.book.known.values()):
            await self.send(member.peer, message)

    # ---- the start -----------------------------------------------------------

    async def until_all_are_there(self) -> None:
        """Wait until each of the other nodes has a process.

        Raises:
            ConfigError: a node differs, and that ends the start.
            PeerLostError: a node did not come in time.
        """

        def log(line: str) -> None:
            _log.info("%s; missing: %s", line, self.names(self.book.missing))

        own, address = self.own, self.place.address
        patience = Patience(f"the other nodes at {address}", own.rendezvous_timeout_s, log=log)
        while missing := self.book.missing:
            if own.difference_ends and self.book.differs:
                raise ConfigError(self.book.differs)
            if patience.is_over():
                verb = "do" if len(missing) > 1 else "does"
                raise PeerLostError(
                    f"{self.names(missing)} {verb} not come to node 0 at {address} within "
                    f"{own.rendezvous_timeout_s:g} s ({own.section}.rendezvous_timeout_s); "
                    f"{self.book.refused or own.advice}"
                )
            await self.next_change()

    async def start_all(self) -> tuple[Address, socket.socket]:
        """Order every node to start its ranks; return the store where they meet, and its listener.

        Raises:
            ConfigError: this machine does not have the address of node 0.
        """
        host = self.place.address.host
        store = listen_at(host, named="--rendezvous")
        order = StartNode(host=host, port=store.getsockname()[1])
        self.book.begin(order)
        await self._tell_all(order)
        return Address(order.host, order.port), store

    # ---- the end -------------------------------------------------------------

    async def tell(self, end: HostEnd) -> None:
        """Order the other nodes to end, as this one does; the first such order stays."""
        if self.is_finished:
            return
        self.is_finished = True
        order = EndNode(
            reason=one_line(end.text, most=MOST_TEXT),
            node=end.node,
            host=self.book.host_of(end.node),
            is_orderly=end.is_orderly,
        )
        self.book.finish(order)
        await self._tell_all(order)
        self._wake()

    async def until_all_ended(self) -> None:
        """Wait some seconds for the other nodes, and those turned away, to say that they end.

        What is on its way to a node may be lost with this socket; a node asks again.
        """
        end_s, book = self.now() + _END_S, self.book
        while left := {*book.known, *book.turned_away.values()}:
            if self.now() > end_s or left == set(book.silent(EXPLAIN_S)):
                _log.warning("%s did not say that it ended", self.names(sorted(left)))
                return
            await self.next_change()

    async def next_change(self) -> None:
        """Wait for a message, or for a moment."""
        with suppress(TimeoutError):
            async with asyncio.timeout(LONGEST_WAIT_S):
                await self._changed.wait()

    def names(self, nodes: list[int]) -> str:
        """Return the names of nodes in logs."""
        return ", ".join(self.book.named(node) for node in nodes)

    def named(self, node: int) -> str:
        """Return a node's name in logs."""
        return self.book.named(node)

    def view(self, failed: str) -> HostView:
        """Return what is known of the other nodes; ``failed`` is why silence counts so soon."""
        silent = self.book.silent(EXPLAIN_S)
        deaf = HostEnd(0, f"it hears no other node any more: {self.deaf}")
        return HostView(
            node=0,
            known=deaf if self.deaf else None,
            reported=self.book.ended,
            silent={node: f"{failed} and {text}" for node, text in silent.items()},
            stopping=frozenset(self.book.stopping),
            stop_is_ours=True,
        )

    def line(self, end: HostEnd) -> str:
        """Return a line with an end as the reason of this node's end."""
        return f"{self.book.named(end.node)} ended: {one_line(end.text, most=MOST_TEXT)}"


@asynccontextmanager
async def leading(
    leader: HostLeader, why: Callable[[], HostEnd]
) -> "AsyncIterator[asyncio.Task[object]]":
    """Answer the other nodes while the block runs, then end them; yield the task that answers.

    Args:
        leader: Node 0.
        why: Returns the reason that the others are given, unless they have one.

    Raises:
        ConfigError: the address cannot be bound.
    """
    context = zmq.asyncio.Context()
    try:
        async with running(leader.serve(leader.open(context))) as (serving,):
            serving.add_done_callback(leader.deafened)
            try:
                yield serving
            finally:
                await leader.tell(why())
                await leader.until_all_ended()
    finally:
        leader.close()
        context.term()
