"""Another node of a role on several hosts: its link to node 0."""

import asyncio
import logging
import os
import secrets
import socket
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress

import zmq
import zmq.asyncio

from slipstream.weightbus.hosts.membership import (
    LINGER_MS,
    LONGEST_GAP_S,
    LONGEST_WAIT_S,
    MOST_TEXT,
    Membership,
)
from slipstream.weightbus.hosts.verdict import EXPLAIN_S, HostEnd, HostView
from slipstream.weightbus.net.curve import connect
from slipstream.weightbus.net.listening import endpoint_of
from slipstream.wire.errors import (
    ConfigError,
    NameTakenError,
    PeerLostError,
    ProtocolError,
    SlipstreamError,
    text_of,
)
from slipstream.wire.messages.codec import decode_to_follower, encode
from slipstream.wire.messages.followers import (
    AskHost,
    EndNode,
    FetchToo,
    Follow,
    FollowerAccepted,
    FollowerEnds,
    FollowerRefused,
    FollowerState,
    Following,
    StartNode,
    ToLeader,
)
from slipstream.wire.messages.pieces import cut
from slipstream.wire.process.patience import Patience
from slipstream.wire.process.safe_text import one_line

_log = logging.getLogger(__name__)
_SIGN_S = 1.0  # between two signs of life
_LOOK_S = 0.25
MAX_WAITING = 64  # messages to a leader that does not read


class HostFollower:
    """A follower's link to node 0. Use it inside one event loop, kept up by ``following``."""

    def __init__(self, own: Membership, *, now: Callable[[], float] = time.monotonic) -> None:
        """Connect to nothing yet; ``open`` does.

        Args:
            own: Membership of this node.
            now: Returns monotonic seconds.
        """
        self._own = own
        self._place = own.place
        self.node = own.place.node
        self._now = now
        self.incarnation = secrets.token_hex(4)
        self._hosts = {own.place.node: socket.gethostname()}
        self._leader = ""  # incarnation of the node 0 that accepted this node
        self._socket: zmq.asyncio.Socket | None = None
        self._changed = asyncio.Event()
        self._has_left = False
        self.state: FollowerState = "waiting"
        self.silent_s = 0.0  # time since the last message of node 0
        self.num_heard = 0
        self.start: StartNode | None = None
        self.end: HostEnd | None = None  # ordered by node 0
        self.lost = ""  # why node 0 cannot be heard any more

    @property
    def is_admitted(self) -> bool:
        """True once this process is a node."""
        return bool(self._leader)

    def named(self, node: int) -> str:
        """Return a node's name in logs."""
        return self._place.named(node, self._hosts.get(node, ""))

    def view(self, failed: str) -> HostView:
        """Return what is known of node 0; ``failed`` is why silence counts so soon."""
        known = HostEnd(0, self.lost) if self.lost else None
        silence = f"{failed} and it gave no sign of life for {EXPLAIN_S:g} s"
        return HostView(
            node=self.node,
            known=self.end if self.end is not None and self.end.text else known,
            silent={0: silence} if self.silent_s >= EXPLAIN_S else {},
        )

    def line(self, end: HostEnd) -> str:
        """Return a line with an end as the reason of this node's end."""
        return f"{self.named(end.node)} ended: {one_line(end.text, most=MOST_TEXT)}"

    def open(self, context: zmq.asyncio.Context) -> zmq.asyncio.Socket:
        """Connect; return the socket.

        Raises:
            ConfigError: the address is invalid.
        """
        endpoint = endpoint_of(self._place.address, named="--rendezvous")
        link = context.socket(zmq.DEALER)
        link.setsockopt(zmq.LINGER, LINGER_MS)
        link.setsockopt(zmq.SNDHWM, MAX_WAITING)
        link.setsockopt(zmq.IMMEDIATE, 1)  # queue no signs of life without a connection
        key = self._own.key
        connect(link, endpoint, server_key=self._own.server_key or key.public, key=key)
        self._socket = link
        return link

    async def run(self, link: zmq.asyncio.Socket) -> None:
        """Exchange signs of life over an open socket until cancelled.

        Raises:
            ConfigError: node 0 refuses this node.
            NameTakenError: another process is this node.
            PeerLostError: node 0 is silent.
        """
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self._read(link))
                group.create_task(self._give_signs())
                group.create_task(self._look())
        except* SlipstreamError as errors:
            raise errors.exceptions[0] from errors

    def deafened(self, linking: "asyncio.Task[None]") -> None:
        """Note that nothing is heard any more; called when ``run`` ends."""
        if not linking.cancelled() and (why := linking.exception()) is not None:
            self.lost = self.lost or text_of(why)
            self._wake()

    async def _read(self, link: zmq.asyncio.Socket) -> None:
        while True:
            frames = await link.recv_multipart()
            try:
                message = decode_to_follower(b"".join(frames))
            except ProtocolError as error:
                _log.error("node 0 sent a malformed message: %s", error)
                continue
            self.silent_s = 0.0
            self.num_heard += 1
            match message:
                case FollowerAccepted():
                    self._accepted(message)
                case FollowerRefused(reason=reason, is_taken=is_taken):
                    why = one_line(reason, most=2 * MOST_TEXT)
                    raise NameTakenError(why) if is_taken else ConfigError(why)
                case StartNode():
                    self.start = self.start or message
                case EndNode(node=node, reason=reason, is_orderly=is_orderly):
                    self._hosts.setdefault(node, message.host)
                    self.end = self.end or HostEnd(node, reason, is_orderly)
                case FetchToo() | AskHost():
                    await self.take_order(message)
            self._wake()

    def _accepted(self, message: FollowerAccepted) -> None:
        if not self._leader:
            self._leader, self._hosts[0] = message.leader, message.host
            own, address = self.named(self.node), self._place.address
            _log.info("%s follows %s at %s", own, self.named(0), address)
        elif message.leader != self._leader:
            self._lose(f"another process leads at {self._place.address} now")

    async def take_order(self, order: FetchToo | AskHost) -> None:
        """Take an order of a role's own."""

    async def _give_signs(self) -> None:
        while not self._has_left:
            await self.send(self._sign())
            await asyncio.sleep(_SIGN_S)

    def _sign(self) -> ToLeader:
        node, incarnation = self.node, self.incarnation
        if self._leader:
            return Following(node=node, incarnation=incarnation, state=self.state)
        return Follow(
            node=node,
            incarnation=incarnation,
            host=socket.gethostname(),
            pid=os.getpid(),
            facts=dict(self._own.facts),
        )

    async def _look(self) -> None:
        looked_s, limit_s = self._now(), self._own.silence_s
        while True:
            await asyncio.sleep(_LOOK_S)
            gap_s, looked_s = self._now() - looked_s, self._now()
            if self._leader:
                self.silent_s += min(gap_s, LONGEST_GAP_S)
            if self.silent_s >= limit_s:
                setting = f"{self._own.section}.node_silence_s"
                self._lose(f"it gave no sign of life for {limit_s:g} s ({setting})")
            self._wake()

    def _lose(self, why: str) -> None:
        self.lost = why
        self._wake()
        raise PeerLostError(self.line(HostEnd(0, why)))

    def _wake(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    async def send(self, message: ToLeader) -> None:
        """Send a message if there is a connection; node 0 asks again for lost answers."""
        if self._socket is not None:
            with suppress(zmq.Again):
                await self._socket.send_multipart(cut([encode(message)]), zmq.NOBLOCK)

    # ---- waits and answers ---------------------------------------------------

    async def until_started(self, patience: Patience | None = None) -> StartNode | None:
        """Wait for the order to start the ranks of this node; None if all nodes end instead.

        Args:
            patience: Wait for node 0 that has begun; None for a new one.

        Raises:
            PeerLostError: node 0 was not reached in time.
        """
        own, address, limit_s = self._own, self._place.address, self._own.rendezvous_timeout_s
        patience = patience or Patience(f"node 0 at {address}", limit_s)
        while self.start is None and self.end is None:
            if not self.is_admitted and patience.is_over():
                raise PeerLostError(
                    f"{self.named(self.node)} does not reach node 0 at {address} "
                    f"(--rendezvous) within {limit_s:g} s ({own.section}.rendezvous_timeout_s): "
                    f"nobody listens there, or proves another key than this one ({own.key_source})"
                )
            await self.next_change()
        return self.start if self.end is None else None

    async def until_ended(self) -> HostEnd:
        """Wait until node 0 orders this node to end."""
        while self.end is None:
            await self.next_change()
        return self.end

    async def next_change(self) -> None:
        """Wait for a message, or for a moment."""
        with suppress(TimeoutError):
            async with asyncio.timeout(LONGEST_WAIT_S):
                await self._changed.wait()

    async def report(self, state: FollowerState) -> None:
        """Tell node 0 the state of this node."""
        self.state = state
        if self.is_admitted and not self._has_left:
            await self.send(self._sign())

    async def tell(self, end: HostEnd) -> None:
        """Tell node 0 once why this node ends, unless node 0 has ordered it."""
        if self._has_left:
            return
        self._has_left = True
        why = ""
        if not end.is_orderly and self.end is None:
            why = end.text if end.node == self.node else self.line(end)
        reason = one_line(why, most=MOST_TEXT)
        node, incarnation = self.node, self.incarnation
        await self.send(FollowerEnds(node=node, incarnation=incarnation, reason=reason))


@asynccontextmanager
async def following(
    follower: HostFollower, why: Callable[[], HostEnd]
) -> "AsyncIterator[asyncio.Task[None]]":
    """Keep up a link while the block runs, then leave; yield the task that keeps it up.

    Args:
        follower: The link.
        why: Returns the end of this node.
    """
    context = zmq.asyncio.Context()
    socket = follower.open(context)
    linking = asyncio.create_task(follower.run(socket))
    linking.add_done_callback(follower.deafened)
    try:
        yield linking
    finally:
        await follower.tell(why())
        linking.cancel()
        await asyncio.gather(linking, return_exceptions=True)
        socket.close()
        context.term()
