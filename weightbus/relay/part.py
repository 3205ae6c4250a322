"""A part relay: serves, for the head, the buckets on one host of a learner on several hosts."""

import asyncio
import logging
import secrets
import time
from collections.abc import Coroutine
from contextlib import suppress

import zmq
import zmq.asyncio

from slipstream.weightbus.net.curve import RemoteListener, connect
from slipstream.weightbus.net.traffic import Traffic
from slipstream.weightbus.relay.bulk import serve_buckets
from slipstream.weightbus.relay.deltas import Deltas
from slipstream.weightbus.relay.learner_socket import LearnerSocket
from slipstream.weightbus.relay.served import Versions
from slipstream.weightbus.version.engine_checksums import EngineLayout
from slipstream.weightbus.version.part_book import Holds, KnownKeys
from slipstream.wire.errors import ProtocolError, PublishError
from slipstream.wire.files.keys import ClientKey
from slipstream.wire.messages.codec import decode_head_command, encode
from slipstream.wire.messages.part_relays import (
    Hash,
    HashPart,
    Hold,
    PartHashed,
    PartHeard,
    PartHeld,
    PartState,
    Release,
)
from slipstream.wire.messages.pieces import cut
from slipstream.wire.messages.relay import ServeHead
from slipstream.wire.process.run_until import run_until

_log = logging.getLogger(__name__)
_HEARTBEAT_S = 1.0
_MAX_REPORTS = 64  # reports queued for a head that does not read them
_AGAIN_S = 3.0  # silence before connecting again: a head refuses a key that it does not know yet


class PartRelay:
    """One part, in one event loop."""

    def __init__(
        self,
        part: int,
        versions: Versions,
        listener: RemoteListener,
        deltas: Deltas,
        *,
        stop: asyncio.Event,
        linger_s: float,
        traffic: Traffic | None = None,
    ) -> None:
        """Create a relay; ``run`` serves until ``stop``, which it may also set.

        ``linger_s`` is the time that it outlives the learner, and that a silent head's keys and
        holds stay valid.
        """
        self._part = part
        self._versions = versions
        self._listener = listener
        self._deltas = deltas
        self._stop = stop
        self._incarnation = secrets.token_hex(8)
        self._holds = Holds(linger_s=linger_s)
        self._keys = KnownKeys(linger_s=linger_s)
        versions.held = lambda: self._holds.held(time.monotonic())
        self._head: ServeHead | None = None
        self._moved = asyncio.Event()  # set when the head is another
        self._last_message_s = 0.0  # time of the head's last message, monotonic
        self._learner = LearnerSocket(
            versions, stop=stop, linger_s=linger_s, on_head=self._found_head
        )
        self._traffic = traffic or Traffic()
        self._answering: set[asyncio.Task[None]] = set()

    async def run(self, endpoint: str) -> None:
        """Serve until ``stop`` is set; the learner connects to ``endpoint``."""
        context = zmq.asyncio.Context()
        bulk = self._listener.open_bulk(context)
        try:
            await run_until(
                self._stop.wait(),
                self._learner.serve(endpoint),
                self._learner.watch(),
                serve_buckets(bulk, self._versions, self._deltas, self._listener, self._traffic),
                self._deltas.run(),
                self._watch_keys(),
                self._report(context),
            )
        finally:
            for task in self._answering:
                task.cancel()
            self._listener.close()
            context.term()

    def _found_head(self, head: ServeHead) -> None:
        if head != self._head:
            self._head = head
            self._moved.set()

    # ---- the head ------------------------------------------------------------

    async def _report(self, context: zmq.asyncio.Context) -> None:
        """Report to one head after another."""
        known: ServeHead | None = None
        while True:
            if (head := self._head) is None:
                await self._moved.wait()
                continue
            self._moved.clear()
            if head != known:
                known = head
                _log.info("part %d reports to the relay at %s", self._part, head.head.endpoint)
            socket = context.socket(zmq.DEALER)
            socket.setsockopt(zmq.LINGER, 0)
            socket.setsockopt(zmq.SNDHWM, _MAX_REPORTS)
            key = ClientKey(
                name=f"part-{self._part}",
                role="learner",
                public=head.public,
                secret=head.secret,
                broker=head.head.key,
            )
            connect(socket, head.head.endpoint, server_key=head.head.key, key=key)
            self._last_message_s = time.monotonic()
            try:
                await run_until(
                    self._moved.wait(), self._silence(), self._beat(socket), self._obey(socket)
                )
            finally:
                socket.close()
            self._versions.let_go()  # holds of a silent head lapse

    async def _silence(self) -> None:
        """Return once the head is silent."""
        while (left_s := self._last_message_s + _AGAIN_S - time.monotonic()) > 0:  # noqa: ASYNC110
            await asyncio.sleep(left_s)

    async def _beat(self, socket: zmq.asyncio.Socket) -> None:
        """Send the state of this part every second, and when a version is whole."""
        while True:
            changed, epoch, door = self._versions.changed, self._versions.epoch, self._listener.door
            if epoch is not None and door is not None:
                state = PartState(
                    part=self._part,
                    epoch=epoch,
                    incarnation=self._incarnation,
                    door=door,
                    whole=self._versions.whole(),
                    keys_digest=self._keys.digest,
                    held=tuple(sorted(self._holds.held(time.monotonic()))),
                )
                with suppress(zmq.Again):  # its queue is full: the head is gone
                    await socket.send_multipart(cut([encode(state)]), zmq.NOBLOCK)
            with suppress(TimeoutError):
                async with asyncio.timeout(_HEARTBEAT_S):
                    await changed.wait()

    async def _obey(self, socket: zmq.asyncio.Socket) -> None:
        while True:
            frames = await socket.recv_multipart()
            self._last_message_s = time.monotonic()
            try:
                command = decode_head_command(b"".join(frames))
            except ProtocolError as error:
                _log.error("the head relay sent a malformed command: %s", error)
                continue
            match command:
                case PartHeard():
                    self._heard(command, time.monotonic())
                case Hold():
                    self._begin(self._hold(socket, command))
                case Hash():
                    self._begin(self._hash(socket, command))
                case Release(version=version):
                    self._holds.release(version)
                    self._versions.let_go()

    def _begin(self, answering: Coroutine[None, None, None]) -> None:
        task = asyncio.create_task(answering)
        self._answering.add(task)
        task.add_done_callback(self._answering.discard)

    def _heard(self, command: PartHeard, now_s: float) -> None:
        if self._holds.heard(command.relay, now_s):
            _log.info("another head relay leads the publishes now")
            self._versions.let_go()
        keys = command.generator_keys  # keys of the previous head are valid until then
        if self._keys.heard(command.keys_digest, keys, now_s) and keys is not None:
            self._listener.admit(keys)

    async def _watch_keys(self) -> None:
        """Admit no key any more when no head has confirmed the keys for ``linger_s``."""
        while True:
            left_s = self._keys.lapses_in_s(time.monotonic())
            if left_s is not None and left_s <= 0:
                _log.warning("no head says who may fetch (weightbus.linger_s): nobody may")
                self._keys.lapse()
                self._listener.admit({})
            await asyncio.sleep(_HEARTBEAT_S)

    async def _hold(self, socket: zmq.asyncio.Socket, command: Hold) -> None:
        """Answer with the digests of a version that is whole here until the answer is sent."""
        version, error = command.version, ""
        digests: dict[str, str] = {}
        publication = self._versions.find(version)
        if publication is None or command.epoch != self._versions.epoch:
            error = f"{version.label} is not whole there"
        else:
            self._holds.hold(version)
            digests = await publication.digests()
            if self._versions.find(version) is not publication:
                self._holds.release(version)
                digests, error = {}, f"{version.label} was overwritten there"
        await self._answer(
            socket, PartHeld(command_id=command.command_id, error=error, digests=digests)
        )

    async def _hash(self, socket: zmq.asyncio.Socket, command: Hash) -> None:
        """Answer with this part's share in engines' checksums of a version that it holds."""
        version = command.version
        groups = command.attention_groups, command.expert_groups or 1
        of = EngineLayout("cuda", command.num_ranks, *groups)
        hashes, error = dict[str, tuple[HashPart, ...]](), f"{version.label} is not held there"
        publication = self._versions.find(version)
        if publication is not None and version in self._holds.held(time.monotonic()):
            try:
                hashes, error = await publication.hash_parts(of), ""
            except PublishError as failed:
                error = str(failed)
            if self._versions.find(version) is not publication:
                hashes, error = {}, f"{version.label} was overwritten there"
        await self._answer(
            socket, PartHashed(command_id=command.command_id, error=error, hashes=hashes)
        )

    async def _answer(self, socket: zmq.asyncio.Socket, answer: PartHeld | PartHashed) -> None:
        with suppress(zmq.ZMQError):  # the socket is full or closed: the head gives up in time
            await socket.send_multipart(cut([encode(answer)]), zmq.NOBLOCK)
