"""Link of another node of an engine on several hosts to node 0."""

import asyncio
import logging
import os
import secrets
import socket
import time
from collections.abc import Callable, Mapping
from contextlib import suppress

import zmq
import zmq.asyncio

from slipstream.generators.nodes.limits import LINGER_MS, LONGEST_GAP_S, MOST_TEXT
from slipstream.generators.nodes.place import NodePlace
from slipstream.weightbus.net.curve import connect
from slipstream.weightbus.net.listening import endpoint_of
from slipstream.wire.errors import (
    ConfigError,
    NameTakenError,
    PeerLostError,
    ProtocolError,
    SlipstreamError,
)
from slipstream.wire.files.keys import ClientKey
from slipstream.wire.messages.codec import decode_to_follower, encode
from slipstream.wire.messages.followers import (
    EndNode,
    FetchedThere,
    FetchToo,
    Follow,
    FollowerEnds,
    FollowerState,
    Following,
    Heeded,
    Refused,
    StartNode,
    ToLeader,
)
from slipstream.wire.messages.pieces import cut
from slipstream.wire.process.patience import Patience
from slipstream.wire.process.safe_text import one_line

_log = logging.getLogger(__name__)
_SIGN_S = 1.0  # between two signs of life
_LOOK_S = 0.25
_MAX_WAITING = 64  # messages to a leader that does not read


class FollowerLink:
    """A follower's link to node 0. Use it inside one event loop."""

    def __init__(
        self,
        place: NodePlace,
        facts: Mapping[str, str],
        key: ClientKey,
        *,
        silence_s: float,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        """Connect to nothing yet; ``open`` does.

        Args:
            place: Place of this node.
            facts: Facts that every node must have in common.
            key: Key that all nodes prove.
            silence_s: Time without a message of node 0 after which it has ended.
            now: Returns monotonic seconds.
        """
        self._place = place
        self._facts = dict(facts)
        self._key = key
        self._silence_s = silence_s
        self._now = now
        self._incarnation = secrets.token_hex(4)
        self._leader = ""  # incarnation of the node 0 that accepted this node
        self._socket: zmq.asyncio.Socket | None = None
        self._changed = asyncio.Event()
        self._last: FetchedThere | None = None
        self._taken = 0  # number of the last order to fetch
        self.state: FollowerState = "waiting"
        self.silent_s = 0.0  # time since the last message of node 0
        self.num_heard = 0
        self.start: StartNode | None = None
        self.end: EndNode | None = None
        self.fetches: asyncio.Queue[FetchToo] = asyncio.Queue(_MAX_WAITING)

    @property
    def is_admitted(self) -> bool:
        """True once this process is a node of the engine."""
        return bool(self._leader)

    @property
    def own(self) -> str:
        """This node's name in logs."""
        return self._place.named(self._place.node, socket.gethostname())

    @property
    def leader_named(self) -> str:
        """Node 0's name in logs."""
        return f"{self._place.named(0)} at {self._place.address}"

    def open(self, context: zmq.asyncio.Context) -> zmq.asyncio.Socket:
        """Connect; return the socket.

        Raises:
            ConfigError: the address is invalid.
        """
        endpoint = endpoint_of(self._place.address, named="--rendezvous")
        link = context.socket(zmq.DEALER)
        link.setsockopt(zmq.LINGER, LINGER_MS)
        link.setsockopt(zmq.SNDHWM, _MAX_WAITING)
        link.setsockopt(zmq.IMMEDIATE, 1)  # queue no signs of life without a connection
        connect(link, endpoint, server_key=self._key.public, key=self._key)
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
                case Heeded(leader=leader):
                    self._heeded(leader)
                case Refused(reason=reason, is_taken=is_taken):
                    why = one_line(reason, most=2 * MOST_TEXT)
                    raise NameTakenError(why) if is_taken else ConfigError(why)
                case StartNode():
                    self.start = self.start or message
                case EndNode():
                    self.end = self.end or message
                case FetchToo():
                    await self._fetch(message)
            self._wake()

    def _heeded(self, leader: str) -> None:
        if not self._leader:
            _log.info("%s follows %s", self.own, self.leader_named)
            self._leader = leader
        elif leader != self._leader:
            raise PeerLostError(f"another process leads at {self._place.address} now")

    async def _fetch(self, order: FetchToo) -> None:
        if self._last is not None and self._last.command_id == order.command_id:
            await self.send(self._last)  # the answer was lost with a connection
        elif order.command_id > self._taken:  # else an old order, late over another connection
            self._taken = order.command_id
            await self.fetches.put(order)

    async def _give_signs(self) -> None:
        while True:
            await self.send(self._sign())
            await asyncio.sleep(_SIGN_S)

    def _sign(self) -> ToLeader:
        node, incarnation = self._place.node, self._incarnation
        if self._leader:
            return Following(node=node, incarnation=incarnation, state=self.state)
        return Follow(
            node=node,
            incarnation=incarnation,
            host=socket.gethostname(),
            pid=os.getpid(),
            facts=self._facts,
        )

    async def _look(self) -> None:
        looked_s = self._now()
        while True:
            await asyncio.sleep(_LOOK_S)
            gap_s, looked_s = self._now() - looked_s, self._now()
            if self._leader:
                self.silent_s += min(gap_s, LONGEST_GAP_S)
            if self.silent_s >= self._silence_s:
                raise PeerLostError(
                    f"{self.leader_named} ended: it gave no sign of life for {self._silence_s:g} s "
                    "(generators.node_silence_s)"
                )
            self._wake()

    def _wake(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    async def send(self, message: ToLeader) -> None:
        """Send a message if there is a connection; node 0 asks again for lost answers."""
        if self._socket is not None:
            with suppress(zmq.Again):
                await self._socket.send_multipart(cut([encode(message)]), zmq.NOBLOCK)

    # ---- waits and answers ---------------------------------------------------

    async def until_started(self, timeout_s: float) -> StartNode | None:
        """Wait for the order to start the ranks of this node; None if the engine ends instead.

        Raises:
            PeerLostError: node 0 was not reached in time.
        """
        patience = Patience(f"node 0 at {self._place.address}", timeout_s)
        while self.start is None and self.end is None:
            if not self.is_admitted and patience.is_over():
                raise PeerLostError(
                    f"{self.own} does not reach node 0 at {self._place.address} (--rendezvous) "
                    f"within {timeout_s:g} s (generators.rendezvous_timeout_s): nobody listens "
                    "there, or proves another key than this one (run.key_file)"
                )
            await self.next_change()
        return self.start if self.end is None else None

    async def until_ended(self) -> EndNode:
        """Wait until node 0 orders this node to end."""
        while self.end is None:
            await self.next_change()
        return self.end

    async def next_change(self) -> None:
        """Wait for a message, or for a moment."""
        await self._changed.wait()

    async def report(self, state: FollowerState) -> None:
        """Tell node 0 the state of this node."""
        self.state = state
        if self.is_admitted:
            await self.send(self._sign())

    async def answer(self, command_id: int, *, error: str = "", num_bytes: int = 0) -> None:
        """Tell node 0 the result of a fetch."""
        self._last = FetchedThere(
            node=self._place.node,
            incarnation=self._incarnation,
            command_id=command_id,
            error=error,
            num_bytes=num_bytes,
        )
        await self.send(self._last)

    async def leave(self, reason: str = "") -> None:
        """Tell node 0 that this node ends."""
        await self.send(
            FollowerEnds(
                node=self._place.node,
                incarnation=self._incarnation,
                reason=one_line(reason, most=MOST_TEXT),
            )
        )
