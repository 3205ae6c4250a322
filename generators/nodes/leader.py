"""Node 0 of an engine on several hosts: orders the others to start, fetch versions, and end."""

import asyncio
import logging
import secrets
import socket
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import TypeVar

import zmq
import zmq.asyncio

from slipstream.generators.config import GeneratorSettings
from slipstream.generators.nodes.book import FollowerBook
from slipstream.generators.nodes.card import facts_of
from slipstream.generators.nodes.limits import LINGER_MS, MOST_TEXT
from slipstream.generators.nodes.place import NodePlace
from slipstream.generators.nodes.verdict import blamed, is_of_peers
from slipstream.generators.sglang.process import SglangProcess
from slipstream.generators.sglang.start_order import EngineNode
from slipstream.weightbus.net.curve import MAX_BYTES, LeaderListener
from slipstream.weightbus.net.listening import endpoint_of, listen_at
from slipstream.wire.errors import (
    ChildDiedError,
    ConfigError,
    PeerLostError,
    ProtocolError,
    PublishError,
    text_of,
)
from slipstream.wire.files.keys import ClientKey, read_client_key
from slipstream.wire.messages.codec import decode_to_leader, encode
from slipstream.wire.messages.followers import (
    EndNode,
    FetchedThere,
    FetchToo,
    StartNode,
    ToFollower,
)
from slipstream.wire.messages.pieces import joined_message
from slipstream.wire.messages.weightbus import ReceiveVersion, RelayAddress
from slipstream.wire.process.health import Health
from slipstream.wire.process.patience import Patience
from slipstream.wire.process.rate_limited_log import RateLimitedLog
from slipstream.wire.process.run_until import running, unless
from slipstream.wire.process.safe_text import one_line
from slipstream.wire.settings.rendezvous import Address

T = TypeVar("T")
_log = logging.getLogger(__name__)
_malformed = RateLimitedLog(_log)
_LOOK_S = 0.25
_LONGEST_WAIT_S = 1.0
_END_S = 10.0  # wait for the other nodes to end
EXPLAIN_S = 3.0  # silence after which a node counts as gone, once a server has failed
SETTLE_S = 1.0  # additional wait for reports of other nodes


class Leader:
    """Node 0's link to the others. Use it inside one event loop, as ``leading`` makes it."""

    def __init__(
        self,
        place: NodePlace,
        facts: Mapping[str, str],
        key: ClientKey,
        *,
        silence_s: float,
        receive_timeout_s: float,
        on_stop: Callable[[], None],
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        """Start without other nodes; ``serve`` answers them.

        Args:
            place: Place of node 0.
            facts: Facts that every node must have in common with it.
            key: Key that all nodes prove.
            silence_s: Time without a sign of life after which a node has ended.
            receive_timeout_s: Limit for a version to arrive on all nodes.
            on_stop: Ends this generator cleanly.
            now: Returns monotonic seconds.

        Raises:
            ConfigError: the address is invalid.
        """
        self._place = place
        self._receive_timeout_s = receive_timeout_s
        self._on_stop = on_stop
        self._is_stopping = False
        self._is_dismissed = False
        self._deaf = ""  # reason that no messages of nodes are read any more
        self._now = now
        self.book = FollowerBook(
            place,
            facts,
            leader=secrets.token_hex(4),
            host=socket.gethostname(),
            silence_s=silence_s,
            now_s=now(),
        )
        endpoint = endpoint_of(place.address, named="--rendezvous")
        self._listener = LeaderListener(endpoint, key)
        self._socket: zmq.asyncio.Socket | None = None
        self._changed = asyncio.Event()
        self._command_id = 0
        self._fetching: FetchToo | None = None
        self._fetched: dict[int, FetchedThere] = {}  # answers to it, by node
        self._asked: dict[int, bytes] = {}  # connection that it was sent over, by node
        self._may_be_read = (
            False  # others may read their memory until all have carried out an order
        )

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
            self._deaf = repr(why)
            self._wake()

    async def _read(self, link: zmq.asyncio.Socket) -> None:
        while True:
            peer, *frames = await link.recv_multipart()
            try:
                message = decode_to_leader(joined_message(frames, most_bytes=MAX_BYTES))
            except ProtocolError as error:
                _malformed.say("a node of this engine sent a malformed message: %s", error)
                continue
            if isinstance(message, FetchedThere):
                self._note_fetched(message)
            elif (answer := self.book.heard(peer, message)) is not None:
                await self._send(peer, answer)
                await self._repeat_fetch(message.node)
            self._wake()

    def _note_fetched(self, message: FetchedThere) -> None:
        known, fetching = self.book.known.get(message.node), self._fetching
        is_of_node = known is not None and known.incarnation == message.incarnation
        if is_of_node and fetching is not None and message.command_id == fetching.command_id:
            self._fetched[message.node] = message

    async def _repeat_fetch(self, node: int) -> None:
        """Repeat an order that was sent over a broken connection."""
        known, fetching = self.book.known.get(node), self._fetching
        if fetching is None or known is None or node in self._fetched:
            return
        if self._asked.get(node, known.peer) != known.peer:
            self._asked[node] = known.peer
            await self._send(known.peer, fetching)

    async def _look(self) -> None:
        while True:
            self.book.look(self._now())
            self._wake()
            await asyncio.sleep(_LOOK_S)

    def _wake(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    async def _send(self, peer: bytes, message: ToFollower) -> None:
        if self._socket is not None:
            with suppress(zmq.ZMQError):  # the connection is gone; the node comes over another
                await self._socket.send_multipart([peer, encode(message)])

    # ---- the start -----------------------------------------------------------

    async def until_all_are_there(self, timeout_s: float) -> None:
        """Wait until each of the other nodes has a process.

        Raises:
            PeerLostError: a node did not come in time.
        """

        def log(line: str) -> None:
            _log.info("%s; missing: %s", line, self._names(self.book.missing))

        patience = Patience(f"the other nodes at {self._place.address}", timeout_s, log=log)
        while missing := self.book.missing:
            if patience.is_over():
                verb = "do" if len(missing) > 1 else "does"
                advice = self.book.refused or (
                    "start it with --follow, the same --name, the same --rendezvous and the same "
                    "key (run.key_file)"
                )
                raise PeerLostError(
                    f"{self._names(missing)} {verb} not come to node 0 at {self._place.address} "
                    f"within {timeout_s:g} s (generators.rendezvous_timeout_s); {advice}"
                )
            await self._next_change()

    async def start(self) -> tuple[EngineNode, socket.socket]:
        """Order every node to start its ranks; return this node's part, and its listening store.

        Raises:
            ConfigError: this machine does not have the address of node 0.
        """
        host = self._place.address.host
        store = listen_at(host, named="--rendezvous")
        port = store.getsockname()[1]
        order = StartNode(host=host, port=port)
        self.book.begin(order)
        for known in list(self.book.known.values()):
            await self._send(known.peer, order)
        return EngineNode(0, self._place.nodes, Address(host, port)), store

    async def until_all_run(self) -> None:
        """Wait for the ranks of every node to run; ``watch`` notices those that end instead."""
        while self.book.not_running:
            await self._next_change()

    async def watch(self) -> None:
        """Wait until another node ends, then raise; ``on_stop`` is called if one was asked to end.

        Raises:
            PeerLostError: a node has ended before its time.
        """
        while not self.book.ended:
            if self._deaf:
                raise PeerLostError(f"node 0 hears no other node any more: {self._deaf}")
            if (stopping := self.book.stopping) and not self._is_stopping:
                _log.info("%s was asked to end: the engine ends", self._names(stopping))
                self._is_stopping = True
                self._on_stop()
            await self._next_change()
        raise PeerLostError(self._line(await self._verdict("")))

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
            if why := await self._other_than(process.reason()):
                raise PeerLostError(why) from error
            raise

    async def _other_than(self, own: str) -> str:
        """Describe the other node that has ended; empty if this one ended for its own reason."""
        end_s = self._now() + SETTLE_S + (EXPLAIN_S if is_of_peers(own) else 0.0)
        while self._now() < end_s and not self.book.ended:
            if self.book.silent(EXPLAIN_S):
                break
            await self._next_change()
        node, text = await self._verdict(own)
        return self._line((node, text)) if node else ""

    async def _verdict(self, own: str) -> tuple[int, str]:
        ended = {node: text or "it was asked to end" for node, text in self.book.ended.items()}
        failed = "a server of the engine failed"
        silent = {
            node: f"{failed} and {text}" for node, text in self.book.silent(EXPLAIN_S).items()
        }
        return blamed(0, own, ended, silent if own else {})

    def _line(self, verdict: tuple[int, str]) -> str:
        node, text = verdict
        return f"{self.book.named(node)} ended: {one_line(text, most=MOST_TEXT)}"

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
        self._asked = {node: known.peer for node, known in self.book.known.items()}
        try:
            async with asyncio.timeout(self._receive_timeout_s):
                for peer in self._asked.values():
                    await self._send(peer, order)
                while len(self._fetched) < self._place.nodes - 1:
                    self._refuse_failed()
                    await self._next_change()
                self._refuse_failed()
        except TimeoutError as error:
            late = [node for node in range(1, self._place.nodes) if node not in self._fetched]
            raise PublishError(
                f"{self._names(late)} did not receive {receive.manifest.version.label} in "
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

    # ---- the end -------------------------------------------------------------

    async def dismiss(self, error: BaseException | None, *, is_orderly: bool = False) -> None:
        """Order the other nodes to end, as this one does.

        Args:
            error: Error that ends this node.
            is_orderly: True if it was asked to end, whatever the error is.
        """
        if self._is_dismissed:
            return
        self._is_dismissed = True
        is_orderly = is_orderly or error is None
        reason = "it was asked to end" if is_orderly or error is None else text_of(error)
        order = EndNode(reason=one_line(reason, most=MOST_TEXT), is_orderly=is_orderly)
        self.book.finish(order)
        for known in list(self.book.known.values()):
            await self._send(known.peer, order)

    async def until_all_ended(self) -> None:
        """Wait for the other nodes to end, for some seconds."""
        end_s = self._now() + _END_S
        while known := self.book.known:
            if self._now() > end_s or len(self.book.silent(EXPLAIN_S)) == len(known):
                _log.warning("%s did not say that it ended", self._names(sorted(known)))
                return
            await self._next_change()

    async def _next_change(self) -> None:
        """Wait for a message, or for a moment."""
        with suppress(TimeoutError):
            async with asyncio.timeout(_LONGEST_WAIT_S):
                await self._changed.wait()

    def _names(self, nodes: list[int]) -> str:
        return ", ".join(self.book.named(node) for node in nodes)


@asynccontextmanager
async def leading(
    settings: GeneratorSettings,
    name: str,
    place: NodePlace | None,
    stop: asyncio.Event,
    health: Health,
) -> AsyncIterator[Leader | None]:
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
    leader = Leader(
        place,
        facts_of(settings, name),
        read_client_key(Path(settings.run.key_file)),
        silence_s=settings.generators.node_silence_s,
        receive_timeout_s=settings.weightbus.receive_timeout_s,
        on_stop=stop.set,
    )
    context = zmq.asyncio.Context()
    link = leader.open(context)
    health.waits_for(f"the other hosts of its engine at {place.address}")
    coming = leader.until_all_are_there(settings.generators.rendezvous_timeout_s)
    try:
        async with running(leader.serve(link), stop.wait()) as (serving, stopping):
            serving.add_done_callback(leader.deafened)
            try:
                await unless(coming, stopping, serving)
                yield leader
            finally:
                await leader.dismiss(sys.exception(), is_orderly=stop.is_set())
                await leader.until_all_ended()
    finally:
        leader.close()
        context.term()
