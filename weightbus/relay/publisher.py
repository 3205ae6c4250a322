"""The relay's side of the weight bus: brings every engine that joined to the newest version.

fleet.py and course.py decide the next phase and its members; this module waits and sends.
"""

import asyncio
import logging
import secrets
import time
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from typing import NamedTuple

import zmq
import zmq.asyncio

from slipstream.weightbus.config import WeightBusSection
from slipstream.weightbus.net.compatibility import Libraries
from slipstream.weightbus.net.curve import MAX_WAITING, RemoteListener
from slipstream.weightbus.relay.bulk import proved, serve_buckets
from slipstream.weightbus.relay.fleet import CollectiveGroup, Fleet, Seat, Serving
from slipstream.weightbus.relay.member import Member
from slipstream.weightbus.relay.served import Reading, Versions
from slipstream.weightbus.relay.transaction import Transaction
from slipstream.weightbus.relay.transports.base import Transport, transport_class
from slipstream.weightbus.transports import FALLBACK, TRANSPORTS, TransportEntry
from slipstream.wire.errors import ProtocolError
from slipstream.wire.messages.codec import decode_agent_message, encode
from slipstream.wire.messages.weightbus import (
    AgentMessage,
    Heard,
    Join,
    Leave,
    MemberState,
    Outcome,
    PublishRecord,
    RelayAddress,
)

_log = logging.getLogger(__name__)
_RETRY_S = 1.0
_WATCH_S = 1.0
_MAX_MEMBERS = 10_000


class Sender(NamedTuple):
    """Origin of a message."""

    peer: bytes  # routing id
    socket: zmq.asyncio.Socket
    prefix: str  # of the names of engines there
    key: str  # that it proved; empty on this host


class Publisher:
    """Serves the newest version to every engine that joined. Use it in one event loop."""

    def __init__(
        self,
        settings: WeightBusSection,
        versions: Versions,
        *,
        on_record: Callable[[PublishRecord], Awaitable[None]],
        libraries: Libraries,
        transports: Mapping[str, TransportEntry] = TRANSPORTS,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        """Start without members; ``on_record`` is called with the record of every publish."""
        self._settings = settings
        self._versions = versions
        self._on_record = on_record
        self._libraries = libraries
        self._transports = transports
        self._classes = {name: transport_class(entry) for name, entry in transports.items()}
        self._states = {
            name: chosen.relay_state(settings, versions.folder)
            for name, chosen in self._classes.items()
        }
        self._now = now
        self._incarnation = secrets.token_hex(8)
        self._members: dict[str, Member] = {}
        self._fleet = Fleet(
            silence_s=settings.member_silence_s,
            retry_s=_RETRY_S,
            engines_per_group=settings.engines_per_group,
        )
        self._alone: dict[Seat, asyncio.Task[None]] = {}
        self._shared: dict[CollectiveGroup, Transport] = {}

    async def run(self, address: RelayAddress, remote: RemoteListener | None = None) -> None:
        """Serve until cancelled: at Unix sockets in a private folder, other hosts at ``remote``.

        Raises:
            ConfigError: an address cannot be bound.
        """
        context = zmq.asyncio.Context()
        sockets: list[zmq.asyncio.Socket] = []
        try:
            pairs: list[tuple[zmq.asyncio.Socket, zmq.asyncio.Socket, RemoteListener | None]] = []
            near = context.socket(zmq.ROUTER), context.socket(zmq.ROUTER)
            sockets += near
            near[0].setsockopt(zmq.ROUTER_MANDATORY, 1)
            near[1].setsockopt(zmq.SNDHWM, MAX_WAITING)
            near[0].bind(address.endpoint)
            near[1].bind(address.bulk_endpoint)
            pairs.append((*near, None))
            if remote is not None:
                far = remote.open(context)
                sockets += far
                pairs.append((*far, remote))
            async with asyncio.TaskGroup() as group:
                group.create_task(self._watch(remote))
                group.create_task(self._serve_due(group))
                for state in self._states.values():
                    group.create_task(state.run())
                for socket, bulk, checks in pairs:
                    group.create_task(serve_buckets(bulk, self._versions, checks))
                    group.create_task(self._listen(socket, checks))
        finally:
            for member in list(self._members.values()):
                self._forget(member, "is left: the relay ends")
            for shared in list(self._shared):
                self._dissolve(shared)
            if remote is not None:
                remote.close()
            for one in sockets:
                one.close(linger=0)
            context.term()
            for state in self._states.values():
                await state.close()

    def states(self) -> list[MemberState]:
        """Return the state of each member, sorted by name."""
        newest = self._versions.newest
        return [
            MemberState(
                name=name,
                state=member.state(newest),
                version=member.adopted,
                since_s=member.since_s,
                transport=member.transport,
                reason=member.failure,
            )
            for name, member in sorted(self._members.items())
        ]

    # ---- membership ----------------------------------------------------------

    async def _listen(self, socket: zmq.asyncio.Socket, listener: RemoteListener | None) -> None:
        while True:
            peer, *frames = await socket.recv_multipart(copy=False)
            key = proved(peer) if listener is not None else ""
            if listener is not None and listener.name_of(key) is None:
                continue  # it was revoked; _watch logs that
            prefix = (
                f"{listener.name_of(key)}/" if listener is not None else ""
            )  # as in the broker's names
            try:
                message = decode_agent_message(b"".join(frame.buffer for frame in frames))
            except ProtocolError as error:
                _log.warning("malformed message on the weight bus: %s", error)
                continue
            sender = Sender(peer.bytes, socket, prefix, key)
            await self._take(sender, message)

    async def _take(self, sender: "Sender", message: AgentMessage) -> None:
        peer, socket = sender.peer, sender.socket
        match message:
            case Join():
                self._joined(sender, message)
                with suppress(zmq.ZMQError):  # it is gone
                    await socket.send_multipart([peer, encode(Heard(relay=self._incarnation))])
            case Leave(name=name):
                member = self._members.get(sender.prefix + name)
                if member is not None and member.is_at(peer, socket):
                    self._forget(member, "left")
            case Outcome():
                for member in self._members.values():
                    if member.is_at(peer, socket):
                        member.take(message)

    def _joined(self, sender: "Sender", join: Join) -> None:
        peer, name = sender.peer, sender.prefix + join.name
        known = self._members.get(name)
        if known is not None and known.join.incarnation == join.incarnation:
            known.heartbeat(peer, join)
            before = self._fleet.seats[name].adopted
            self._fleet.heartbeat(name, join.adopted, self._now())
            if self._fleet.seats[name].adopted != before:
                self._versions.wake()
            return
        if known is not None:
            self._forget(known, "restarted")
        if len(self._members) >= _MAX_MEMBERS:
            _log.error("%s is refused: %d engines are on the weight bus", name, _MAX_MEMBERS)
            return
        member = Member(
            peer,
            join,
            sender.socket,
            name=name,
            relay=self._incarnation,
            key=sender.key,
            transport=self._transport_for(join, name, is_far=bool(sender.key)),
            timeout_s=self._settings.timeout_s,
        )
        _log.info("%s joined the weight bus (%s)", name, member.transport)
        self._members[name] = member
        seat = Seat(
            name,
            member.transport,
            join.device,
            join.adopted,
            last_message_s=self._now(),
            shares_group=self._classes[member.transport].shares_group,
        )
        self._fleet.join(seat)
        self._versions.wake()

    def _transport_for(self, join: Join, name: str, *, is_far: bool) -> str:
        """Return the transport of a member: the requested one, or the fallback."""
        entry = self._transports.get(join.transport)
        if entry is None:
            why = f"this relay has no such transport, only {', '.join(self._transports)}"
        else:
            why = entry.why_not_from_afar(self._settings.host) if is_far else ""
            why = why or self._classes[join.transport].why_not(join, self._libraries)
        if why:
            _log.warning(
                "%s gets its weights over %s instead of %s: %s", name, FALLBACK, join.transport, why
            )
        return FALLBACK if why else join.transport

    def _forget(self, member: Member, why: str) -> None:
        _log.info("%s %s", member.name, why)
        del self._members[member.name]
        if (task := self._alone.pop(self._fleet.seats[member.name], None)) is not None:
            task.cancel()
        self._dissolve(self._fleet.forget(member.name))
        member.leave(why)

    async def _watch(self, remote: RemoteListener | None) -> None:
        """Forget members that are silent or whose key was revoked, even while they are served."""
        while True:
            await asyncio.sleep(_WATCH_S)
            for name in self._fleet.silent(self._now()):
                self._forget(
                    self._members[name], f"was silent for {self._settings.member_silence_s:g} s"
                )
            for member in [m for m in self._members.values() if m.key]:
                if remote is not None and remote.name_of(member.key) is None:
                    self._forget(member, "is left: its key was revoked")

    # ---- publishes -----------------------------------------------------------

    async def _serve_due(self, group: asyncio.TaskGroup) -> None:
        """Start the servings that are due, whenever something has changed."""
        while True:
            changed, now = self._versions.changed, self._now()
            for serving in self._fleet.due(self._versions.newest, now):
                if (reading := self._versions.read()) is None:
                    break  # two others are being read; the end of one wakes this loop
                self._start(serving, reading, group)
            with suppress(TimeoutError):  # not wait_for, which can swallow a cancellation
                async with asyncio.timeout(self._fleet.wait_s(now)):
                    await changed.wait()

    def _start(self, serving: Serving, reading: Reading, group: asyncio.TaskGroup) -> None:
        self._fleet.started(serving)
        members = [self._members[seat.name] for seat in serving.seats]
        task = group.create_task(self._serve(serving, members, reading))
        task.add_done_callback(lambda _: reading.end())  # it may be cancelled before it runs
        if serving.group is None:
            self._alone[serving.seats[0]] = task

    async def _serve(self, serving: Serving, members: list[Member], reading: Reading) -> None:
        """Bring members to a version; the record and the fleet get the results."""
        group = serving.group
        try:
            name = serving.seats[0].transport
            if group is None:
                transport = self._open(FALLBACK if self._classes[name].shares_group else name)
            else:
                transport = self._shared.get(group) or self._open(name)
                self._shared[group] = transport
            check_every = self._settings.engine_check_every
            record = await Transaction(reading.publication, members, transport, check_every).run()
            self._alone.pop(serving.seats[0], None)
            self._dissolve(self._fleet.finished(serving, record.adopted_by, self._now()))
        finally:
            await asyncio.shield(reading.end())
        for name, why in record.failed.items():
            _log.warning("%s does not run %s: %s", name, record.version.label, why)
        await self._on_record(record)
        wanted = self._versions.wanted()
        for state in self._states.values():
            await state.keep(wanted)

    def _open(self, name: str) -> Transport:
        return self._classes[name](self._settings, self._states[name])

    def _dissolve(self, group: CollectiveGroup | None) -> None:
        if group is not None and (transport := self._shared.pop(group, None)) is not None:
            transport.close_soon()
