"""Learner side of the weight bus: brings every engine that joined to the newest version.

Newest wins: a version that is ready before the older one left replaces it. Each member is served
by a task of its own over a group of its own, so that its slowness or death concerns nobody else.
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable

import zmq
import zmq.asyncio

from weightbus.config import WeightBusSection
from weightbus.member import Member, Publish
from weightbus.snapshot import WeightSnapshot
from wire.bus import Join, Leave, Outcome, PublishRecord
from wire.codec import decode_agent_message
from wire.errors import ProtocolError

_log = logging.getLogger(__name__)
_RETRY_S = 1.0
_WATCH_S = 1.0


class Publisher:
    """Serves the newest snapshot to every engine that joined. Lives in one event loop."""

    def __init__(
        self,
        settings: WeightBusSection,
        *,
        on_record: Callable[[PublishRecord], Awaitable[None]],
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._settings = settings
        self._on_record = on_record
        self._now = now
        self._members: dict[str, Member] = {}
        self._serving: dict[str, asyncio.Task[None]] = {}
        self._newest: asyncio.Task[Publish] | None = None
        self._changed = asyncio.Event()

    def submit(self, snapshot: WeightSnapshot) -> None:
        """Offer a version; returns at once. Call it on the loop's thread."""
        self._newest = asyncio.create_task(asyncio.to_thread(self._prepare, snapshot))
        self._changed.set()
        self._changed = asyncio.Event()

    def _prepare(self, snapshot: WeightSnapshot) -> Publish:
        return Publish(snapshot, snapshot.manifest(bucket_bytes=self._settings.bucket_bytes))

    async def run(self, endpoint: str) -> None:
        """Serve until cancelled."""
        context = zmq.asyncio.Context()
        socket = context.socket(zmq.ROUTER)
        socket.setsockopt(zmq.LINGER, 0)
        socket.bind(endpoint)
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self._watch())
                while True:
                    peer, *frames = await socket.recv_multipart()
                    self._take(peer, b"".join(frames), socket, group)
        finally:
            for name in list(self._members):
                self._forget(name, "is left: the publisher ends")
            socket.close()
            context.term()

    # ---- membership ----------------------------------------------------------

    def _take(
        self, peer: bytes, frame: bytes, socket: zmq.asyncio.Socket, group: asyncio.TaskGroup
    ) -> None:
        try:
            message = decode_agent_message(frame)
        except ProtocolError as error:
            _log.warning("malformed message on the weight bus: %s", error)
            return
        match message:
            case Join():
                self._joined(peer, message, socket, group)
            case Leave(name=name):
                if name in self._members:
                    self._forget(name, "left")
            case Outcome():
                for member in self._members.values():
                    if member.peer == peer:
                        member.take(message)

    def _joined(
        self, peer: bytes, join: Join, socket: zmq.asyncio.Socket, group: asyncio.TaskGroup
    ) -> None:
        known = self._members.get(join.name)
        if known is not None and known.join.incarnation == join.incarnation:
            known.heard_s = self._now()
            known.peer = peer
            return
        if known is not None:
            self._forget(join.name, "restarted")
        _log.info("%s joined the weight bus", join.name)
        member = Member(peer, join, socket, self._settings, now=self._now)
        self._members[join.name] = member
        self._serving[join.name] = group.create_task(self._serve(member))

    def _forget(self, name: str, why: str) -> None:
        _log.info("%s %s", name, why)
        self._serving.pop(name).cancel()
        self._members.pop(name).leave(why)

    async def _watch(self) -> None:
        """Leave out who fell silent, whatever is going on with it."""
        while True:
            await asyncio.sleep(_WATCH_S)
            limit = self._now() - self._settings.member_silence_s
            for name in [n for n, m in self._members.items() if m.heard_s < limit]:
                self._forget(name, f"was silent for {self._settings.member_silence_s:.0f} s")

    # ---- publishes -----------------------------------------------------------

    async def _serve(self, member: Member) -> None:
        """Keep one member on the newest version."""
        while True:
            changed = self._changed
            newest = self._newest
            publish = await asyncio.shield(newest) if newest is not None else None
            if publish is None or member.adopted == publish.snapshot.version:
                await changed.wait()
                continue
            record = await member.bring_to(publish)
            await self._on_record(record)
            if record.failed:
                _log.warning("%s: %s", publish.snapshot.version.label, record.failed)
                await asyncio.sleep(_RETRY_S)
