"""The relay's side of the weight bus: brings every engine that joined to the newest version.

Newest wins: a version that is ready before the older one left replaces it. A member gets its first
version, and a whole one after any failure, by itself over TCP (or from disk), which disturbs
nobody; the members of a party get the following ones together.
"""

import asyncio
import logging
import secrets
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import NamedTuple

import zmq
import zmq.asyncio

from weightbus.bulk import proved, serve_buckets
from weightbus.collective_transport import Collective
from weightbus.compatibility import Libraries, why_no_collective
from weightbus.config import WeightBusSection
from weightbus.doors import MAX_WAITING, FarDoor
from weightbus.interfaces import is_loopback
from weightbus.member import Member
from weightbus.staged_transports import OverDisk, OverTcp
from weightbus.transaction import Transaction
from weightbus.transport import Transport
from weightbus.versions import Versions
from wire.bus import (
    AgentMessage,
    Heard,
    Join,
    Leave,
    MemberState,
    Outcome,
    PublishRecord,
    RelayDoor,
    TransportName,
)
from wire.codec import decode_agent_message, encode
from wire.errors import ProtocolError
from wire.versions import PolicyVersion

_log = logging.getLogger(__name__)
_RETRY_S = 1.0
_WATCH_S = 1.0
_MAX_MEMBERS = 10_000


class Sender(NamedTuple):
    """Where a message came from."""

    peer: bytes  # routing id
    socket: zmq.asyncio.Socket
    prefix: str  # of the names of engines there
    key: str  # that it proved; empty on this host


class Party:
    """Engines that share one collective."""

    def __init__(self, settings: WeightBusSection) -> None:
        self.members: list[Member] = []
        self.collective = Collective(settings)
        self.task: asyncio.Task[None] | None = None
        self.is_idle = True

    def has_room(self, member: Member, most: int) -> bool:
        """Tell whether a member may come in: only engines on like devices share a collective."""
        is_alike = all(one.join.device == member.join.device for one in self.members)
        return is_alike and len(self.members) < most


class Publisher:
    """Serves the newest version to every engine that joined. Lives in one event loop."""

    def __init__(
        self,
        settings: WeightBusSection,
        versions: Versions,
        *,
        on_record: Callable[[PublishRecord], Awaitable[None]],
        libraries: Libraries,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        """Serve nobody yet.

        Args:
            settings: of the weight bus.
            versions: what there is to be served.
            on_record: is told of every publish.
            libraries: that collectives of this process use.
            now: monotonic seconds.
        """
        self._settings = settings
        self._versions = versions
        self._on_record = on_record
        self._libraries = libraries
        self._now = now
        self._incarnation = secrets.token_hex(8)
        self._members: dict[str, Member] = {}
        self._alone: dict[Member, asyncio.Task[None]] = {}
        self._parties: list[Party] = []

    async def run(self, door: RelayDoor, far_door: FarDoor | None = None) -> None:
        """Serve until cancelled.

        Args:
            door: Unix sockets in a private folder.
            far_door: lets in engines on other hosts.

        Raises:
            ConfigError: an address cannot be listened at.
        """
        context = zmq.asyncio.Context()
        sockets: list[zmq.asyncio.Socket] = []
        try:
            pairs: list[tuple[zmq.asyncio.Socket, zmq.asyncio.Socket, FarDoor | None]] = []
            near = context.socket(zmq.ROUTER), context.socket(zmq.ROUTER)
            sockets += near
            near[0].setsockopt(zmq.ROUTER_MANDATORY, 1)
            near[1].setsockopt(zmq.SNDHWM, MAX_WAITING)
            near[0].bind(door.endpoint)
            near[1].bind(door.bulk_endpoint)
            pairs.append((*near, None))
            if far_door is not None:
                far = far_door.open(context)
                sockets += far
                pairs.append((*far, far_door))
            async with asyncio.TaskGroup() as group:
                group.create_task(self._watch(far_door))
                for socket, bulk, checks in pairs:
                    group.create_task(serve_buckets(bulk, self._versions, checks))
                    group.create_task(self._listen(socket, checks, group))
        finally:
            for member in list(self._members.values()):
                self._forget(member, "is left: the relay ends")
            for party in self._parties:
                party.collective.close_soon()
            if far_door is not None:
                far_door.close()
            for one in sockets:
                one.close(linger=0)
            context.term()

    def states(self) -> list[MemberState]:
        """Return what each member holds, by name."""
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

    async def _listen(
        self, socket: zmq.asyncio.Socket, door: FarDoor | None, group: asyncio.TaskGroup
    ) -> None:
        while True:
            peer, *frames = await socket.recv_multipart(copy=False)
            key = proved(peer) if door is not None else ""
            if door is not None and door.name_of(key) is None:
                continue  # it was revoked, and _watch has said so
            prefix = f"{door.name_of(key)}/" if door is not None else ""  # as the broker calls it
            try:
                message = decode_agent_message(b"".join(frame.buffer for frame in frames))
            except ProtocolError as error:
                _log.warning("malformed message on the weight bus: %s", error)
                continue
            sender = Sender(peer.bytes, socket, prefix, key)
            await self._take(sender, message, group)

    async def _take(
        self, sender: "Sender", message: AgentMessage, group: asyncio.TaskGroup
    ) -> None:
        peer, socket = sender.peer, sender.socket
        match message:
            case Join():
                self._joined(sender, message, group)
                with suppress(zmq.ZMQError):  # it has gone meanwhile
                    await socket.send_multipart([peer, encode(Heard(relay=self._incarnation))])
            case Leave(name=name):
                member = self._members.get(sender.prefix + name)
                if member is not None and member.is_at(peer, socket):
                    self._forget(member, "left")
            case Outcome():
                for member in self._members.values():
                    if member.is_at(peer, socket):
                        member.take(message)

    def _joined(self, sender: "Sender", join: Join, group: asyncio.TaskGroup) -> None:
        peer, name = sender.peer, sender.prefix + join.name
        known = self._members.get(name)
        if known is not None and known.join.incarnation == join.incarnation:
            known.heard(peer, join)
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
            now=self._now,
        )
        _log.info("%s joined the weight bus (%s)", name, member.transport)
        self._members[name] = member
        self._serve_alone(member, group)

    def _transport_for(self, join: Join, name: str, *, is_far: bool) -> TransportName:
        """Return how a member gets versions: as it asks, or over TCP where that cannot be."""
        if join.transport != "collective":
            return join.transport
        why = why_no_collective(join, self._libraries)
        host = self._settings.host
        if is_far and is_loopback(host):
            why = f"it is on another host, and weightbus.host is {host}"
        if why:
            _log.warning("%s gets its weights over tcp instead of a collective: %s", name, why)
            return "tcp"
        return "collective"

    def _forget(self, member: Member, why: str) -> None:
        _log.info("%s %s", member.name, why)
        del self._members[member.name]
        if (task := self._alone.pop(member, None)) is not None:
            task.cancel()
        for party in list(self._parties):
            if member in party.members:
                self._take_out(member, party)
        member.leave(why)

    async def _watch(self, far_door: FarDoor | None) -> None:
        """Leave out who fell silent or may no longer be there, whatever is going on with it."""
        while True:
            await asyncio.sleep(_WATCH_S)
            limit = self._now() - self._settings.member_silence_s
            for member in [m for m in self._members.values() if m.heard_s < limit]:
                self._forget(member, f"was silent for {self._settings.member_silence_s:g} s")
            for member in [m for m in self._members.values() if m.key]:
                if far_door is not None and far_door.name_of(member.key) is None:
                    self._forget(member, "is left: its key was revoked")

    # ---- one member by itself ------------------------------------------------

    def _serve_alone(self, member: Member, group: asyncio.TaskGroup) -> None:
        """Serve one member by itself, if need be until it can be in a party."""
        self._alone[member] = group.create_task(self._alone_loop(member, group))

    async def _alone_loop(self, member: Member, group: asyncio.TaskGroup) -> None:
        while True:
            if member.failure:
                await asyncio.sleep(_RETRY_S)
            if member.transport == "collective" and member.adopted is not None:
                del self._alone[member]
                self._admit(member, group)
                return
            async with self._versions.read_newest(lambda v: v != member.adopted) as publication:
                transport = self._staged(member)
                transaction = Transaction(
                    publication, [member], transport, self._settings.engine_check_every
                )
                record = await transaction.run()
            await self._finished(record)
            if member.transport == "disk":
                await self._versions.clean_disk()

    def _staged(self, member: Member) -> Transport:
        chosen = OverDisk if member.transport == "disk" else OverTcp
        return chosen(timeout_s=self._settings.receive_timeout_s)

    async def _finished(self, record: PublishRecord) -> None:
        for name, why in record.failed.items():
            _log.warning("%s does not run %s: %s", name, record.version.label, why)
        await self._on_record(record)

    # ---- parties -------------------------------------------------------------

    def _admit(self, member: Member, group: asyncio.TaskGroup) -> None:
        """Put a member into a party, whose next publish it takes part in."""
        most = self._settings.engines_per_group
        party = next((p for p in self._parties if p.has_room(member, most)), None)
        if party is None:
            party = Party(self._settings)
            self._parties.append(party)
            party.task = group.create_task(self._party_loop(party, group))
        party.members.append(member)
        self._versions.wake()

    async def _party_loop(self, party: Party, group: asyncio.TaskGroup) -> None:
        """Bring a party to version after version; who fails is served alone from then on."""

        def is_wanted(version: PolicyVersion) -> bool:
            return any(member.adopted != version for member in party.members)

        while True:
            async with self._versions.read_newest(is_wanted) as publication:
                party.is_idle = False
                transaction = Transaction(
                    publication, party.members, party.collective, self._settings.engine_check_every
                )
                record = await transaction.run()
                party.is_idle = True
            await self._finished(record)
            for member in [m for m in party.members if m.name in record.failed]:
                self._take_out(member, party)
                self._serve_alone(member, group)
            if not party.members:
                self._dissolve(party)
                return

    def _take_out(self, member: Member, party: Party) -> None:
        party.members.remove(member)
        if not party.members and party.is_idle and party.task is not None:
            self._dissolve(party)

    def _dissolve(self, party: Party) -> None:
        if party in self._parties:
            self._parties.remove(party)
        party.collective.close_soon()
        if party.task is not None and party.task is not asyncio.current_task():
            party.task.cancel()
